"""Our weights as those of transformers, and back: the only place that knows both names."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Size, Tensor

from shardwise.model.decoder import Decoder
from shardwise.model.weight_files import WeightFiles
from shardwise.spec import InputError, Model

_QKV = ".attention.qkv"


@dataclass(frozen=True)
class Naming:
    """Where transformers keeps the weights and biases of our modules; `{}` is the number of the block.

    prefix: what a file of the bare model, without its head, leaves out. transposed: blocks keep matrices as (in, out).
    buffers: pattern of what files hold beside our tensors. tensors: whole names, of tensors that are no weight or bias
    of a module; a second `{}` is the number of the expert, whose part of ours is a tensor of theirs.
    interleaved: RoPE turns neighbouring rows of `latent` projections; ours, those half of them apart.
    """

    modules: dict[str, tuple[str, ...]]
    prefix: str
    transposed: bool
    buffers: str
    tensors: dict[str, str] = field(default_factory=dict)
    interleaved: bool = False


_GPT2 = Naming(
    modules={
        "embedding": ("transformer.wte",),
        "positions": ("transformer.wpe",),
        "blocks.{}.attention_norm": ("transformer.h.{}.ln_1",),
        "blocks.{}.attention.qkv": ("transformer.h.{}.attn.c_attn",),
        "blocks.{}.attention.out": ("transformer.h.{}.attn.c_proj",),
        "blocks.{}.mlp_norm": ("transformer.h.{}.ln_2",),
        "blocks.{}.mlp.up": ("transformer.h.{}.mlp.c_fc",),
        "blocks.{}.mlp.down": ("transformer.h.{}.mlp.c_proj",),
        "norm": ("transformer.ln_f",),
        "head": ("lm_head",),
    },
    prefix="transformer.",
    transposed=True,
    buffers=r"attn\.(masked_)?bias$",
)
_LLAMA = Naming(
    modules={
        "embedding": ("model.embed_tokens",),
        "blocks.{}.attention_norm": ("model.layers.{}.input_layernorm",),
        "blocks.{}.attention.qkv": (
            "model.layers.{}.self_attn.q_proj",
            "model.layers.{}.self_attn.k_proj",
            "model.layers.{}.self_attn.v_proj",
        ),
        "blocks.{}.attention.q_norm": ("model.layers.{}.self_attn.q_norm",),
        "blocks.{}.attention.k_norm": ("model.layers.{}.self_attn.k_norm",),
        "blocks.{}.attention.out": ("model.layers.{}.self_attn.o_proj",),
        "blocks.{}.mlp_norm": ("model.layers.{}.post_attention_layernorm",),
        "blocks.{}.mlp.gate": ("model.layers.{}.mlp.gate_proj",),
        "blocks.{}.mlp.up": ("model.layers.{}.mlp.up_proj",),
        "blocks.{}.mlp.down": ("model.layers.{}.mlp.down_proj",),
        "norm": ("model.norm",),
        "head": ("lm_head",),
    },
    prefix="model.",
    transposed=False,
    buffers=r"rotary_emb\.inv_freq$",
)
_EXPERTS = "blocks.{}.mlp.experts."
_MIXTRAL = replace(
    _LLAMA,
    modules={**_LLAMA.modules, "blocks.{}.mlp.router": ("model.layers.{}.block_sparse_moe.gate",)},
    tensors={
        f"{_EXPERTS}gate": "model.layers.{}.block_sparse_moe.experts.{}.w1.weight",
        f"{_EXPERTS}up": "model.layers.{}.block_sparse_moe.experts.{}.w3.weight",
        f"{_EXPERTS}down": "model.layers.{}.block_sparse_moe.experts.{}.w2.weight",
    },
)
_QWEN3_MOE = replace(
    _LLAMA,
    modules={**_LLAMA.modules, "blocks.{}.mlp.router": ("model.layers.{}.mlp.gate",)},
    tensors={
        _EXPERTS + part: f"model.layers.{{}}.mlp.experts.{{}}.{part}_proj.weight" for part in ("gate", "up", "down")
    },
)
_DEEPSEEK = replace(
    _QWEN3_MOE,
    modules={
        **_QWEN3_MOE.modules,
        "blocks.{}.attention.q": ("model.layers.{}.self_attn.q_proj",),
        "blocks.{}.attention.q_a": ("model.layers.{}.self_attn.q_a_proj",),
        "blocks.{}.attention.q_norm": ("model.layers.{}.self_attn.q_a_layernorm",),
        "blocks.{}.attention.q_b": ("model.layers.{}.self_attn.q_b_proj",),
        "blocks.{}.attention.kv_a": ("model.layers.{}.self_attn.kv_a_proj_with_mqa",),
        "blocks.{}.attention.kv_norm": ("model.layers.{}.self_attn.kv_a_layernorm",),
        "blocks.{}.attention.kv_b": ("model.layers.{}.self_attn.kv_b_proj",),
        "blocks.{}.mlp.shared.gate": ("model.layers.{}.mlp.shared_experts.gate_proj",),
        "blocks.{}.mlp.shared.up": ("model.layers.{}.mlp.shared_experts.up_proj",),
        "blocks.{}.mlp.shared.down": ("model.layers.{}.mlp.shared_experts.down_proj",),
    },
    tensors={
        **_QWEN3_MOE.tensors,
        "blocks.{}.mlp.router.balance_bias": "model.layers.{}.mlp.gate.e_score_correction_bias",
    },
    buffers=_LLAMA.buffers + r"|^(model\.)?layers\.61\.",  # the published model's prediction of further tokens
    interleaved=True,
)
NAMINGS = {  # by model_type
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "mixtral": _MIXTRAL,
    "qwen3_moe": _QWEN3_MOE,
    "deepseek_v3": _DEEPSEEK,
}


def their_names(model: Model, naming: Naming, name: str) -> tuple[str, ...]:
    """The tensors of transformers that make up one of ours, such as 'blocks.3.attention.qkv.weight'."""
    block = re.match(r"blocks\.(\d+)\.", name)
    number, pattern = block[1] if block else "", re.sub(r"^blocks\.\d+", "blocks.{}", name)
    if pattern in naming.tensors:
        count = model.experts.count if model.experts and pattern.startswith(_EXPERTS) else 1
        return tuple(naming.tensors[pattern].format(number, expert) for expert in range(count))
    module, _, kind = pattern.rpartition(".")
    return tuple(f"{their.format(number)}.{kind}" for their in naming.modules[module])


def their_shapes(model: Model, naming: Naming, name: str, shape: Size) -> tuple[Size, ...]:
    """The shapes of `their_names`, from that of our parameter."""
    with torch.device("meta"):
        return tuple(tensor.shape for tensor in to_theirs(model, naming, name, torch.empty(shape)))


def to_theirs(model: Model, naming: Naming, name: str, tensor: Tensor) -> tuple[Tensor, ...]:
    """One of our tensors as those of `their_names`."""
    count = len(their_names(model, naming, name))
    if _is_experts(name):
        return tensor.unbind()
    if naming.interleaved:
        tensor = _turned(model, name, tensor, lambda rows: rows.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2))
    parts = _ungroup(model, tensor) if _QKV in name else (tensor,)
    if len(parts) > count:
        parts = (torch.cat(parts),)
    return tuple(part.T if _is_transposed(naming, name, part) else part for part in parts)


def to_ours(model: Model, naming: Naming, name: str, theirs: tuple[Tensor, ...]) -> Tensor:
    """The inverse of `to_theirs`."""
    if _is_experts(name):
        return torch.stack(theirs)
    parts = tuple(part.T if _is_transposed(naming, name, part) else part for part in theirs)
    if naming.interleaved:
        return _turned(model, name, parts[0], lambda rows: rows.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2))
    if _QKV not in name:
        return parts[0]
    if len(parts) == 1:
        queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
        parts = parts[0].split([queries, keys, keys])
    return _group(model, parts)


def _is_experts(name: str) -> bool:
    return ".mlp.experts." in name


def _turned(model: Model, name: str, tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `change` to the rows (heads, rope_dim, in) of a latent attention's projection that RoPE turns, the last of
    each head's, or to those of the key that all heads share."""
    latent, projection = model.latent, name.split(".")[-2]
    if latent is None or ".attention." not in name or projection not in ("q", "q_b", "kv_a"):
        return tensor
    heads = tensor.unflatten(0, (1 if projection == "kv_a" else model.heads, -1))
    plain = heads.shape[1] - latent.rope_dim
    return torch.cat((heads[:, :plain], change(heads[:, plain:])), dim=1).flatten(0, 1)


def _is_transposed(naming: Naming, name: str, tensor: Tensor) -> bool:
    return naming.transposed and tensor.ndim == 2 and name.startswith("blocks.")


def _ungroup(model: Model, fused: Tensor) -> tuple[Tensor, ...]:
    """Rows by KV group (its queries, its key, its value) -> all queries, all keys, all values."""
    rows = fused.unflatten(0, (model.kv_heads, -1, model.head_dim))  # (G, R + 2, d, …)
    return tuple(part.flatten(0, 2) for part in rows.split([model.heads // model.kv_heads, 1, 1], dim=1))


def _group(model: Model, parts: tuple[Tensor, ...]) -> Tensor:
    """All queries, all keys, all values -> rows by KV group."""
    rows = [part.unflatten(0, (model.kv_heads, -1, model.head_dim)) for part in parts]
    return torch.cat(rows, dim=1).flatten(0, 2)


def parameter_shapes(model: Model) -> dict[str, Size]:
    """The shape of each of our parameters, and of the routers' biases, by name, in the order of the module."""
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in Decoder(model).state_dict().items()}


class ImportedWeights:
    """A directory's weights under our names, read one parameter at a time: `shapes` and `load`.

    Raises InputError naming tensors that are missing, unexpected or of another shape.
    """

    def __init__(self, model: Model, naming: Naming, files: WeightFiles):
        self._model, self._naming, self._files = model, naming, files
        bare = not any(name.startswith(naming.prefix) for name in files.shapes)
        self._prefix = naming.prefix if bare else ""
        self.shapes = parameter_shapes(model)
        wanted = {
            self._stored(their): shape
            for name, own in self.shapes.items()
            for their, shape in zip(
                their_names(model, naming, name), their_shapes(model, naming, name, own), strict=True
            )
        }
        lines = [f"{name} is missing" for name in wanted if name not in files.shapes]
        for name, shape in files.shapes.items():
            if name in wanted and shape != wanted[name]:
                lines.append(f"{name} is {list(shape)}, but {list(wanted[name])} is needed")
            elif name not in wanted and not self._may_be_there(name):
                lines.append(f"{name} is unexpected")
        if not lines and model.tied and "lm_head.weight" in files.shapes:
            (embedding,) = their_names(model, naming, "embedding.weight")
            if not torch.equal(files.load("lm_head.weight"), files.load(self._stored(embedding))):
                lines.append(f"lm_head.weight differs from {embedding}, but tie_word_embeddings says that they are one")
        if lines:
            more = f"; and {len(lines) - 5} more" if len(lines) > 5 else ""
            raise InputError(
                f"{files.directory}: the weights are not those of config.json: {'; '.join(lines[:5])}{more}"
            )

    def load(self, name: str) -> Tensor:
        """One of our parameters, on the CPU."""
        stored = tuple(self._files.load(self._stored(their)) for their in their_names(self._model, self._naming, name))
        return to_ours(self._model, self._naming, name, stored)

    def _stored(self, their: str) -> str:
        return their.removeprefix(self._prefix)

    def _may_be_there(self, name: str) -> bool:
        return bool(re.search(self._naming.buffers, name)) or (self._model.tied and name == "lm_head.weight")
