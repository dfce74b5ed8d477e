"""The state of a training run as named tensors. Names do not depend on the wrapper (none, DDP, FSDP2) or on the layout.

    {"model": {name: tensor}, "optimizer": {name: {"exp_avg": tensor, …}}, "rng/3": {"cpu": tensor, "cuda": tensor}}

Sharded tensors are DTensors. Hyperparameters are not part of it: they follow from the Run and the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.spec import InputError

# torch.distributed.checkpoint keeps only one of several plain tensors with the same name, so each rank has its own.
RNG = "rng/"


class Stateful(Protocol):
    """What has named tensors: a module, or the stages of one. Of several with one name, the first counts."""

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]: ...

    def named_buffers(self) -> Iterable[tuple[str, Tensor]]: ...


def collect(model: Stateful, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of this rank. Weights and moments are the live tensors, not copies: loading into them loads the model.

    An optimizer that has not stepped yet gets the zero state with which its first step would begin. The random number
    generators are torch's, on the CPU and, where CUDA is in use, on the current device; their states are copies.
    """
    rng = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        rng["cuda"] = torch.cuda.get_rng_state()
    return {
        "model": _named([*model.named_buffers(), *model.named_parameters()]),
        "optimizer": _moments(model, optimizer),
        _rng_key(): rng,
    }


@torch.no_grad()
def apply(model: Stateful, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Make `state` (nested as `collect` gives it) the state of model, optimizer and this rank's generators.

    A rank that has no generator state in it keeps its own. Raises InputError naming tensors that are missing or differ
    in shape or dtype, before anything is changed.
    """
    live, given = flatten(collect(model, optimizer)), flatten(state)
    live = {key: tensor for key, tensor in live.items() if not key.startswith(RNG)}
    refuse("state", mismatches(live, {key: (tensor.shape, tensor.dtype) for key, tensor in given.items()}))
    for key, tensor in live.items():
        tensor.copy_(given[key])
    rng = state.get(_rng_key(), {})
    if "cpu" in rng:
        torch.set_rng_state(rng["cpu"].cpu())
    if "cuda" in rng and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(rng["cuda"].cpu())


def flatten(state: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Nested names joined by dots, as torch.distributed.checkpoint does it. Raises TypeError for what is no tensor."""
    flat: dict[str, Tensor] = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        elif isinstance(value, Tensor):
            flat[f"{prefix}{key}"] = value
        else:
            raise TypeError(f"{prefix}{key}: only tensors can be saved, not {type(value).__name__}")
    return flat


def mismatches(wanted: Mapping[str, Tensor], found: Mapping[str, tuple[torch.Size, torch.dtype]]) -> list[str]:
    """One line per tensor of `wanted` that `found` (global shape and dtype by name) lacks or has otherwise."""
    lines = []
    for key, tensor in wanted.items():
        if key not in found:
            lines.append(f"{key} is missing")
        elif found[key] != (tensor.shape, tensor.dtype):
            (shape, dtype) = found[key]
            lines.append(f"{key} is {_form(shape, dtype)}, but {_form(tensor.shape, tensor.dtype)} is needed")
    return lines


def refuse(where: str, lines: list[str]) -> None:
    """Raise InputError with the first few lines and the number of the others; nothing where there are none."""
    if lines:
        others = f"; and {len(lines) - 3} more" if len(lines) > 3 else ""
        raise InputError(f"{where} does not fit this model and optimizer: {'; '.join(lines[:3])}{others}")


def _rng_key() -> str:
    return f"{RNG}{dist.get_rank() if dist.is_initialized() else 0}"


def _form(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _named(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Without the name that DDP puts in front."""
    return {name.removeprefix("module."): tensor for name, tensor in reversed(list(tensors))}


def _moments(model: Stateful, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """The optimizer's tensors by parameter name; parameters without any are left out."""
    if not optimizer.state:
        _make_first_moments(optimizer)
    moments = {}
    for name, parameter in _optimized(model, optimizer).items():
        if tensors := {key: value for key, value in optimizer.state[parameter].items() if isinstance(value, Tensor)}:
            moments[name] = tensors
    return moments


def _optimized(model: Stateful, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What the optimizer updates, by name: the model's parameters, or this rank's parts of them, of which only the
    optimizer knows the names."""
    groups = [group for group in optimizer.param_groups if "param_names" in group]
    named = [pair for group in groups for pair in zip(group["param_names"], group["params"], strict=True)]
    return _named(named or model.named_parameters())


def _make_first_moments(optimizer: torch.optim.Optimizer) -> None:
    """What the optimizer's first step would begin with: made by one step with zero gradients and zero learning rate,
    then set to zero, since that leaves `step` at 1 and SGD's momentum at weight_decay × weight."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    for tensors in optimizer.state.values():
        for tensor in tensors.values():
            if isinstance(tensor, Tensor):
                tensor.zero_()
