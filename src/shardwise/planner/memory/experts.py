"""What the backward of our own block with experts has beside what autograd keeps (`model/experts.py`)."""

from __future__ import annotations

from shardwise.spec import Layout, Model


def weighing_bytes(model: Model, layout: Layout, width: int, own: float) -> float:
    """Temporaries per token where the backward is at its fullest: at the product of the experts' results with the
    router's weights, before anything that the block kept is given up. width: bytes of an activation; own: the share of
    tokens that this rank routes.

    Three tensors as wide as the sum over a token's copies, at least fp32: the gradient of the weighed copies, and its
    products with either operand. The one for the copies is then narrowed.
    """
    experts = model.experts
    assert experts is not None
    copies = experts.top_k * (own if layout.ep > 1 else 1.0)
    wide = max(4, width)
    return copies * model.hidden * (3 * wide + width * (width < wide))
