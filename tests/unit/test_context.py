"""Context parallelism: each method against attention over whole sequences, forward and gradients."""

import pytest
import torch
import torch.distributed as dist

from shardwise.model.layers import causal_attention
from shardwise.parallel.attention import attend_block, attend_block_backward, attend_suffix
from shardwise.parallel.gathered import attend_pieces, gathered_attention
from shardwise.parallel.pieces import by_rank, in_order, own_positions, split_pieces
from shardwise.parallel.ring import ring_attention
from shardwise.parallel.ulysses import ulysses_attention

METHODS = {"allgather": gathered_attention, "ring": ring_attention, "ulysses": ulysses_attention}
LENGTH = 24
SHAPES = {  # heads, KV heads, size of queries and keys, size of values
    "every head its own keys": (4, 4, 8, 8),
    "grouped queries": (8, 4, 5, 5),
    "latent": (4, 4, 12, 8),
}
TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 3e-2}


def tensors(shape: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, keys, values, and the gradient of the result, the same on every rank."""
    heads, groups, size, value_size = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    sizes = (heads, size), (groups, size), (groups, value_size), (heads, value_size)
    return [torch.randn(2, n, LENGTH, d, generator=generator, dtype=torch.float64).to(dtype) for n, d in sizes]


def attended(attend, q, k, v, grad, **options) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, **options)
    assert out.dtype == q.dtype
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def spread(method: str, shape: str, dtype: torch.dtype, scale: float | None) -> list[torch.Tensor]:
    group = dist.group.WORLD
    own = own_positions(LENGTH, dist.get_world_size(), dist.get_rank())
    parts = [x[:, :, own] for x in tensors(shape, dtype)]
    return attended(METHODS[method], *parts, scale=scale, group=group)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_equals_attention_over_whole_sequences(ranks, method, world, shape, dtype):
    scale = 0.4 if shape == "latent" else None
    exact = attended(causal_attention, *(x.double() for x in tensors(shape, dtype)), scale=scale)
    for rank, parts in enumerate(ranks(world).run(spread, method, shape, dtype, scale)):
        own = own_positions(LENGTH, world, rank)
        for part, whole in zip(parts, exact, strict=True):
            difference = (part.double() - whole[:, :, own]).abs().max() / whole.abs().max()
            assert difference <= TOLERANCE[dtype]


def test_pieces_are_balanced_and_go_both_ways():
    positions = [own_positions(16, 4, rank) for rank in range(4)]
    assert positions[1].tolist() == [2, 3, 12, 13]
    assert torch.cat(positions).sort().values.tolist() == list(range(16))
    assert len({int(part.sum()) for part in positions}) == 1  # as many keys seen
    parts = [part.double()[None, :, None] for part in positions]  # (1, S / cp, 1)
    whole = in_order(torch.cat([split_pieces(part) for part in parts]))
    assert whole.flatten().tolist() == list(range(16))
    assert by_rank(whole, 4).equal(torch.cat([split_pieces(part) for part in parts]))


@pytest.mark.parametrize("rank", range(3))
def test_pieces_see_the_prefix_up_to_their_end(rank):
    q, k, v, grad = tensors("grouped queries", torch.float64)
    own = own_positions(LENGTH, 3, rank)
    exact = attended(causal_attention, q, k, v, torch.zeros_like(grad).index_copy(2, own, grad[:, :, own]))
    out, by_q, by_k, by_v = attended(attend_pieces, q[:, :, own], k, v, grad[:, :, own], scale=None, rank=rank)
    for found, wanted in ((out, exact[0][:, :, own]), (by_q, exact[1][:, :, own]), (by_k, exact[2]), (by_v, exact[3])):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-14)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", ["grouped queries", "latent"])  # torch's kernel, and the plain form
def test_a_block_alone_is_attention(shape, causal):
    q, k, v, grad = tensors(shape, torch.float64)
    scale = q.shape[-1] ** -0.5

    def plain(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    exact = attended(plain, q, k, v, grad)
    out, lse = attend_block(q, k, v, causal, scale)
    found = [out, *attend_block_backward(grad, q, out, lse, k, v, causal, scale)]
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)
    assert lse.dtype == torch.float64


def test_the_last_queries_see_all_keys_but_the_future():
    q, k, v, grad = tensors("grouped queries", torch.float64)
    exact = attended(causal_attention, q, k, v, grad)[0]
    assert torch.allclose(attend_suffix(q[:, :, 20:], k, v, None), exact[:, :, 20:], rtol=0, atol=1e-14)
