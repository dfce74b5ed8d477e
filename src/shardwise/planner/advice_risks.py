"""Advice about what a Run risks: days of work, or what it learns. Given whether the Run fits or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardwise.planner.advice_case import Advice, Case
from shardwise.planner.price import choose_price

_LONG_HOURS = 3.0  # of work between checkpoints, from which its loss is named
_FAILURE_GPU_HOURS = 16_384 * 54 * 24 / 419  # 419 unexpected interruptions in 54 days of Llama 3 405B


def half_precision(case: Case) -> Iterator[Advice]:
    """fp16 ends at 65,504, bf16 where fp32 does."""
    peak = case.cluster.gpu.peak_flops("bf16")
    if case.recipe.precision.compute == "fp16" and peak:
        yield Advice(
            "precision",
            f"fp16 overflows above 65,504 and skips those steps; {case.cluster.gpu.name} has bf16 "
            f"({peak / 1e12:.0f} TFLOP/s), which reaches as far as fp32",
            "BLOOM chose bf16 after fp16 diverged at 104B parameters (arXiv 2211.05100)",
            risk=True,
        )


def checkpoints(case: Case) -> Iterator[Advice]:
    """A failure costs what was done since the last checkpoint: all of it, where there is none before the end."""
    every = case.recipe.checkpoint.every
    if case.hours is None:
        return
    apart = min(case.hours, every * case.found.step.seconds / 3600) if every else case.hours
    if apart < _LONG_HOURS:
        return
    gpu_hours = apart * case.cluster.gpus
    offer = choose_price(case.offers, case.cluster.gpu.name, case.today)
    dollars = f" ({gpu_hours * offer.usd_per_gpu_hour:,.0f} USD)" if offer else ""
    expected = case.hours * case.cluster.gpus / _FAILURE_GPU_HOURS
    better = max(1, int(1800 / case.found.step.seconds))
    yield Advice(
        "checkpoints",
        f"recipe.checkpoint.every {every}" + ("" if every else " saves only at the end") + f": a failure loses up to "
        f"{apart:.1f} hours, {gpu_hours:,.0f} GPU-hours{dollars}; {expected:.2g} failures are to be expected; "
        f"every: {better} saves each half hour",
        "one unexpected interruption in 50,700 GPU-hours: Llama 3 405B, arXiv 2407.21783, section 3.3.4",
        risk=True,
    )


def evaluation(case: Case) -> Iterator[Advice]:
    """A run that nobody looks at until its end."""
    policy = case.recipe.evaluation
    if policy.tokens == 0:
        yield Advice(
            "evaluation",
            "recipe.evaluation.tokens 0: no validation loss is ever computed, so nothing says that the run learned",
            "the Run file (docs/run-file.md)",
        )
    elif policy.every == 0 and case.hours is not None and case.hours >= _LONG_HOURS:
        yield Advice(
            "evaluation",
            f"recipe.evaluation.every 0: the first validation loss comes after {case.hours:.0f} hours; "
            f"every: {max(1, int(1800 / case.found.step.seconds))} gives one each half hour",
            "the Run file (docs/run-file.md)",
        )


def low_precision(case: Case) -> Iterator[Advice]:
    """Products in fp8 or fp4 change what is learned, and only a validation loss beside that of bf16 says how much."""
    products, policy = case.recipe.precision.products, case.recipe.evaluation
    if products != "compute" and not (policy.tokens and policy.every):
        yield Advice(
            "precision",
            f"products in {products} without a validation loss on the way: recipe.evaluation.every {policy.every}, "
            f"tokens {policy.tokens}; evaluate each {max(1, int(1800 / case.found.step.seconds))} steps, and "
            "compare with a short run in bf16 first",
            "DeepSeek-V3 held its fp8 to a relative loss error of 0.25 % against bf16 (arXiv 2412.19437, section 3.3)",
            risk=True,
        )


def dropped_tokens(case: Case) -> Iterator[Advice]:
    """A capacity factor drops choices of tokens; dropless exchange needs none."""
    experts = case.model.experts
    if experts and experts.capacity_factor:
        yield Advice(
            "capacity factor",
            f"model.experts.capacity_factor {experts.capacity_factor:g} drops what an expert gets beyond "
            f"{experts.capacity_factor:g} times its mean share; without one nothing is dropped, and uneven experts are "
            "exchanged as they are",
            "MegaBlocks (arXiv 2211.15841): dropping costs quality, and dropless training is no slower",
            risk=False,
        )


RISKS: tuple[Callable[[Case], Iterator[Advice]], ...] = (
    half_precision,
    low_precision,
    checkpoints,
    evaluation,
    dropped_tokens,
)
