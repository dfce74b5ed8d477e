"""Attention over a part of the keys: what context parallelism is made of."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.parallel import compat


def attend_suffix(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Causal attention of queries that stand at the last Sq of Sk positions: q (B, H, Sq, d), k (B, G, Sk, d),
    v (B, G, Sk, e) -> (B, H, Sq, e).

    On CUDA in bf16 and fp16 this is FlashAttention-2, whose causal mask is aligned at the bottom right, as it is needed
    here (`scaled_dot_product_attention` aligns at the top left); elsewhere the mask is a tensor.
    """
    queries, keys, grouped = q.shape[2], k.shape[2], q.shape[1] != k.shape[1]
    if queries == keys:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    if _flash_works(q, v):
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return compat.flash_attention(*_padded(q, k, v), True, scale)[0][..., : v.shape[-1]]
    mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)


def attend_block(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention and the log-sum-exp of its scores, without gradients: q (B, H, Sq, d), k (B, G, Sk, d), v (B, G, Sk, e)
    -> (B, H, Sq, e) and (B, H, Sq), the latter in at least fp32. Causal: Sq = Sk."""
    if _flash_works(q, v):
        out, lse = compat.flash_attention(*_padded(q, k, v), causal, scale)
        return out[..., : v.shape[-1]], lse
    keys, values = _repeat(k, q), _repeat(v, q)
    if _cpu_flash_works(q, v):
        return compat.cpu_attention(q, keys, values, causal, scale)
    scores = _scores(q, keys, causal, scale)
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp_() @ values.to(scores.dtype)).to(q.dtype), lse


def attend_block_backward(
    grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v where attention was over these keys and others: out (B, H, Sq, e) and lse (B, H, Sq) are
    those over all of them, grad (B, H, Sq, e) is the gradient of the former."""
    if _flash_works(q, v):
        wide = _padded(grad, q, k, v, out)
        gradients = compat.flash_attention_backward(*wide, lse.contiguous(), causal, scale)
        by_q, by_k, by_v = (x[..., : like.shape[-1]] for x, like in zip(gradients, (q, k, v), strict=True))
        return by_q, by_k, by_v
    keys, values = _repeat(k, q), _repeat(v, q)
    if _cpu_flash_works(q, v):
        inputs = grad.contiguous(), q, keys, values, out.contiguous(), lse.contiguous()
        by_q, by_k, by_v = compat.cpu_attention_backward(*inputs, causal, scale)
    else:
        share = (_scores(q, keys, causal, scale) - lse[..., None]).exp_()
        grad, keys, values = (x.to(share.dtype) for x in (grad, keys, values))
        by_v = share.mT @ grad
        by_scores = share * (grad @ values.mT - (grad * out).sum(-1, keepdim=True)) * scale
        by_q, by_k = by_scores @ keys, by_scores.mT @ q.to(share.dtype)
    return by_q, by_k.unflatten(1, (k.shape[1], -1)).sum(2), by_v.unflatten(1, (v.shape[1], -1)).sum(2)


def _flash_works(q: Tensor, v: Tensor) -> bool:
    return (
        q.is_cuda
        and torch.version.hip is None  # where the alignment of the mask is another
        and q.dtype in (torch.bfloat16, torch.float16)
        and max(q.shape[-1], v.shape[-1]) <= 256
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )


def _cpu_flash_works(q: Tensor, v: Tensor) -> bool:
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1]


def _padded(*tensors: Tensor) -> list[Tensor]:
    """In the head size that FlashAttention-2 takes: the same for all, a multiple of 8. Zeros change no score."""
    size = -(-max(x.shape[-1] for x in tensors) // 8) * 8
    return [F.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x for x in tensors]


def _repeat(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values, one for every query head."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _scores(q: Tensor, keys: Tensor, causal: bool, scale: float) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ keys.to(wide).mT * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores
