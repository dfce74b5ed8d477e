"""Advice: choices of a Run that are legal and fit, but that cost speed, money or work. Each with its figure and source.

Every figure about speed is a second prediction: the same Run with that one choice made otherwise, which must fit no
worse. Advice without a better alternative is not given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardwise.planner.advice_case import Advice, Case
from shardwise.planner.advice_risks import RISKS
from shardwise.planner.memory import capacity_bytes
from shardwise.planner.price import choose_price
from shardwise.planner.search import Found
from shardwise.spec.memory import GIB
from shardwise.spec.presets import gpu_names, gpu_preset

COSTLY = 0.05  # share of the step time above which `check` fails
_WORTH = 0.01  # share of the step time from which a faster alternative is named
_DEBUG_HOURS = 1 / 6  # a run that computes for less is there to try things out

MODELLED = "predicted with that choice changed"


def advise(case: Case) -> tuple[Advice, ...]:
    """All that applies, the dearest first. About speed only where the Run may fit: what does not fit is not slow."""
    rules = (*RISKS, *(() if case.found.verdict == "oom" else _SPEED))
    given = [advice for rule in rules for advice in rule(case)]
    return tuple(sorted(given, key=lambda item: (not item.risk, -(item.gain or 0.0))))


def tensor_parallelism(case: Case) -> Iterator[Advice]:
    """Less of it where the model fits with less; and none of it over the slow links."""
    tp, domain = case.layout.tp, case.cluster.gpu.domain
    fewer = [n for n in range(1, tp) if tp % n == 0]
    others: list[Found] = []
    for policy in (case.layout.recompute, "selective", "full"):  # more recompute only where it does not fit otherwise
        others = others or case.layouts(*({"tp": n, "recompute": policy} for n in fewer))
    if (better := _fastest(case, others)) is None:
        return
    best, gain = better
    exposed = case.found.step.parts["tensor"] / case.found.step.seconds
    text = (
        f"tp {tp} before the model needs it: tp {best.layout.tp} (dp_shard {best.layout.dp_shard}, recompute "
        f"{best.layout.recompute}) {_fits(best)} and takes {_less(gain)}; TP's communication is {exposed:.0%} of the "
        f"step"
    )
    if tp > domain:
        text += f", because {tp} ranks do not share the fast link of {domain} chips"
    yield Advice("tensor parallelism", text, MODELLED, gain)


def tensor_across_domains(case: Case) -> Iterator[Advice]:
    """Where nothing better fits, it still deserves a word."""
    tp, gpu = case.layout.tp, case.cluster.gpu
    if tp <= gpu.domain or not gpu.intra or not gpu.inter or any(tensor_parallelism(case)):
        return
    exposed = case.found.step.parts["tensor"] / case.found.step.seconds
    fast, slow = (link.bytes_per_second(2**26) / 1e9 for link in (gpu.intra, gpu.inter))
    yield Advice(
        "tensor parallelism",
        f"tp {tp} leaves the fast link of {gpu.domain} chips: {slow:.0f} instead of {fast:.0f} GB/s, and {exposed:.0%} "
        "of the step is its communication; pp or dp_shard across nodes sends less",
        f"links {gpu.intra.name} and {gpu.inter.name} of the preset, 64 MiB messages",
        risk=exposed > COSTLY,
    )


def zero3(case: Case) -> Iterator[Advice]:
    """Gathering weights again for the backward only pays where they do not fit until then."""
    layout = case.layout
    if layout.zero != 3:
        return
    replicated = {"zero": 0, "dp_replicate": layout.data_ranks, "dp_shard": 1}
    others = case.exactly(layout.model_copy(update={"zero": 2}), layout.model_copy(update=replicated))
    if (better := _fastest(case, others)) is None:
        return
    best, gain = better
    more = (best.memory.live - case.found.memory.live) / GIB
    again = f", once for each of {case.found.subject.micro_batches} micro-batches" if layout.pp > 1 else ""
    yield Advice(
        "ZeRO-3",
        f"zero 3 gathers the weights again for the backward{again}: zero {best.layout.zero} {_fits(best)} "
        f"({more:+.1f} GiB) and takes {_less(gain)}",
        MODELLED,
        gain,
    )


def sharding_across_nodes(case: Case) -> Iterator[Advice]:
    """HSDP: shard within the fast domain, replicate across."""
    layout, domain = case.layout, case.cluster.gpu.domain
    within = max(1, domain // (layout.tp * layout.cp))
    if layout.zero < 2 or layout.dp_shard <= within or layout.dp_shard % within or within == 1:
        return
    changed = {"dp_shard": within, "dp_replicate": layout.data_ranks // within}
    for other in case.exactly(layout.model_copy(update=changed)):
        gain, more = case.saving(other), (other.memory.live - case.found.memory.live) / GIB
        if gain >= _WORTH:
            yield Advice(
                "sharding across nodes",
                f"dp_shard {layout.dp_shard} gathers weights over the network: dp_replicate "
                f"{other.layout.dp_replicate} × dp_shard {within} (HSDP) {_fits(other)} ({more:+.1f} GiB) and takes "
                f"{_less(gain)}",
                MODELLED,
                gain,
            )


def recomputation(case: Case) -> Iterator[Advice]:
    """Flash attention keeps no scores, so repeating a block buys less than it did."""
    if case.layout.recompute == "none":
        return
    weaker = ["none"] if case.layout.recompute == "selective" else ["none", "selective"]
    others = case.exactly(*(case.layout.model_copy(update={"recompute": policy}) for policy in weaker))
    if (better := _fastest(case, others)) is None:
        return
    best, gain = better
    more = (best.memory.live - case.found.memory.live) / GIB
    yield Advice(
        "recompute",
        f"recompute {case.layout.recompute} is not needed: {best.layout.recompute} {_fits(best)} ({more:+.1f} GiB) and "
        f"takes {_less(gain)}",
        MODELLED,
        gain,
    )


def micro_batch(case: Case) -> Iterator[Advice]:
    """Small products leave a chip idle; where memory is left, more sequences at a time fill it."""
    size = case.layout.micro_batch
    if case.recipe.batch_tokens is None or case.found.verdict != "fits":
        return
    others = case.exactly(*(case.layout.model_copy(update={"micro_batch": size * n}) for n in (2, 4, 8, 16)))
    if (better := _fastest(case, others)) is None:
        return
    best, gain = better
    left = ((capacity_bytes(case.cluster.gpu) or 0.0) - case.found.memory.used[2]) / GIB
    yield Advice(
        "micro-batch",
        f"micro_batch {size} leaves {left:.1f} GiB unused: {best.layout.micro_batch} {_fits(best)} and takes "
        f"{_less(gain)}, at the same batch",
        MODELLED,
        gain,
    )


def alignment(case: Case) -> Iterator[Advice]:
    """Tensor cores load rows of 16 bytes: eight elements of bf16."""
    tp = case.layout.tp
    for field, step in (("vocabulary", 128), ("hidden", 64), ("ffn", 64)):
        size = getattr(case.model, field)
        share = size // tp if field != "hidden" else size
        if share % 8 == 0:
            continue
        step *= tp if field != "hidden" else 1
        padded = -(-size // step) * step
        others = case.with_model(case.model.model_copy(update={field: padded}))
        gain = case.saving(others[0]) if others else 0.0
        if gain >= _WORTH:
            yield Advice(
                "alignment",
                f"model.{field} {size}" + (f" (of which a rank has {share})" if share != size else "") + " is no "
                f"multiple of 8, which slow kernels serve: {padded} takes {_less(gain)}",
                f"{MODELLED}; GPT-2's 50,257 columns made its step 1.6 times as long on one H200 "
                "(benchmarks/train_one_gpu.sh)",
                gain,
            )


def debug_card(case: Case) -> Iterator[Advice]:
    """A run of minutes is there to try things out, and for that the hour's price counts, not the speed."""
    here = choose_price(case.offers, case.cluster.gpu.name, case.today)
    if here is None or case.hours is None or case.hours > _DEBUG_HOURS:
        return
    offers = [choose_price(case.offers, name, case.today) for name in gpu_names()]
    cheaper = sorted(
        (offer for offer in offers if offer and offer.usd_per_gpu_hour < here.usd_per_gpu_hour / 2),
        key=lambda offer: offer.usd_per_gpu_hour,
    )
    for offer in cheaper:
        for other in case.on(gpu_preset(offer.gpu)):
            hours = case.hours * case.found.tokens_per_second / other.tokens_per_second
            yield Advice(
                "debugging",
                f"{60 * case.hours:.1f} minutes on {here.gpu}, whose hour costs {here.usd_per_gpu_hour:.2f} USD per "
                f"GPU: {offer.gpu} at {offer.usd_per_gpu_hour:.2f} ({offer.provider}, {offer.date}) {_fits(other)} and "
                f"needs {60 * hours:.1f} minutes",
                "the dated price snapshot",
            )
            return


_Rule = Callable[[Case], Iterator[Advice]]
_SPEED: tuple[_Rule, ...] = (
    tensor_parallelism,
    tensor_across_domains,
    zero3,
    sharding_across_nodes,
    recomputation,
    micro_batch,
    alignment,
    debug_card,
)


def _fastest(case: Case, others: list[Found]) -> tuple[Found, float] | None:
    """The fastest of them and the share of the step that it saves; None where that is not worth a word."""
    best = max(others, key=lambda item: item.tokens_per_second, default=None)
    gain = case.saving(best) if best else 0.0
    return (best, gain) if best and gain >= _WORTH else None


def _fits(other: Found) -> str:
    return "fits" if other.verdict == "fits" else "fits no worse (tight)"


def _less(gain: float) -> str:
    return f"{100 * gain:.0f} % less time" if gain >= 0.1 else f"{100 * gain:.1f} % less time"
