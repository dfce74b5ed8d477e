"""What `train` needs of a Run beyond a legal layout."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.spec.legality import illegal
from shardwise.spec.model import Model
from shardwise.spec.noun import InputError
from shardwise.spec.recipe import Precision, Recipe
from shardwise.spec.run import Run


def untrainable(model: Model) -> Iterator[str]:
    """What can be planned of a model, but what `train` does not do yet."""
    for field in ("attention_sinks", "mlp_bias") if model.experts else ("attention_sinks",):
        if getattr(model, field):
            also = " of a model with experts" if field == "mlp_bias" else ""
            yield f"model.{field}{also} cannot be trained by this version, only planned; {model.name} has it"


def untrainable_precision(precision: Precision) -> Iterator[str]:
    """Likewise, of a precision."""
    if precision.products != "compute":
        yield (
            f"recipe.precision: products in {precision.products} cannot be trained by this version, only planned; "
            "what works: precision: bf16"
        )


def not_trainable(model: Model, recipe: Recipe) -> Iterator[str]:
    """`untrainable`, and what `train` needs of a recipe and did not get."""
    yield from untrainable(model)
    if not recipe.batch_tokens:
        yield (
            "recipe.batch_tokens is required for training: a batch that moved with the layout would change what is "
            "learned"
        )
    if not (recipe.steps or recipe.tokens):
        yield "recipe.steps or recipe.tokens is required for training"
    yield from _unbalanced(model, recipe)
    precision = recipe.precision
    yield from untrainable_precision(precision)
    wide = {precision.parameters, precision.gradients, precision.moments}
    if len(wide) > 1 or precision.parameters in ("bf16", "fp16"):
        yield (
            f"recipe.precision: parameters {precision.parameters}, gradients {precision.gradients} and moments "
            f"{precision.moments} must be one of fp32 or fp64; nearest: fp32 for all three"
        )
    elif precision.compute not in ("bf16", "fp16", precision.parameters):
        yield (
            f"recipe.precision.compute {precision.compute} does not go with parameters {precision.parameters}; "
            f"nearest: {precision.parameters}"
        )
    if precision.reduce not in (precision.gradients, "bf16"):
        yield (
            f"recipe.precision.reduce {precision.reduce} does not go with gradients {precision.gradients}; "
            f"nearest: {precision.gradients}, or bf16"
        )


def _unbalanced(model: Model, recipe: Recipe) -> Iterator[str]:
    """Ways of balancing experts that the model has nothing for."""
    balance, experts = recipe.balance, model.experts
    if balance.auxiliary and experts is None:
        yield f"recipe.balance.auxiliary {balance.auxiliary:g} needs a model with experts; what works: 0"
    if balance.bias_rate and not (experts and experts.router_bias):
        yield (
            f"recipe.balance.bias_rate {balance.bias_rate:g} needs routers with a bias; what works: 0"
            + (", or model.experts.router_bias: true" if experts else "")
        )


def require_trainable(run: Run, world: int) -> None:
    """Raise InputError with every reason why `train` cannot run this Run on `world` ranks."""
    layout = run.fixed_layout
    reasons = [*illegal(run.model, layout, run.recipe), *not_trainable(run.model, run.recipe)]
    if layout.async_tp and run.cluster.gpu.name == "cpu":
        reasons.append("layout.async_tp needs CUDA, and cluster.gpu is cpu; nearest: async_tp: false")
    if layout.world != world:
        reasons.append(
            f"layout: {layout.describe()} makes {layout.world} ranks, but {world} are started; "
            f"use --nproc {layout.world}, or change the layout (layout: auto fits any number)"
        )
    if reasons:
        raise InputError("\n".join(reasons))
