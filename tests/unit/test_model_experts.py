"""Mixture-of-experts layers, against one token and one expert at a time."""

import math

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardwise.model.decoder import Decoder
from shardwise.model.experts import MoE, Router, update_balance_bias
from shardwise.model.grouped import grouped_product, one_by_one, one_kernel
from shardwise.model.init import initial_value
from shardwise.spec import InputError, Model, load_run
from shardwise.spec.presets import model_preset
from shardwise.spec.trainable import require_trainable

SOFTMAX = {"count": 6, "top_k": 3, "ffn": 5}
SIGMOID = {
    "count": 8, "top_k": 3, "ffn": 5, "router": "sigmoid", "router_bias": True, "groups": 4, "top_groups": 2,
    "scale": 2.5, "shared_ffn": 7, "shared_gate": True,
}  # fmt: skip
KINDS = {
    "softmax": SOFTMAX,
    "not normalized": {**SOFTMAX, "normalized": False},
    "sigmoid": SIGMOID,
    "small capacity": {**SIGMOID, "capacity_factor": 0.8},
}


def model_of(experts: dict, **changes) -> Model:
    return Model.load(model_preset("tiny-moe").dump() | {"hidden": 12, "heads": 2, "head_dim": 6} | changes | {
        "experts": experts
    })  # fmt: skip


def random_(module: torch.nn.Module) -> torch.nn.Module:
    """fp64, with weights that make every term count."""
    torch.manual_seed(0)
    module = module.double()
    for tensor in module.state_dict().values():
        tensor.normal_(std=0.5)
    return module


def choices(moe: MoE, x: torch.Tensor) -> list[list[tuple[int, torch.Tensor]]]:
    """Of each token of one sequence (S, hidden), its experts and their weights, by the definition."""
    spec, bias = moe.router.spec, moe.router.balance_bias
    taken, found = [0] * spec.count, []
    for token in x:
        logits = moe.router.weight @ token
        scores = logits.sigmoid() if spec.router == "sigmoid" else logits.exp() / logits.exp().sum()
        wanted = (scores if bias is None else scores + bias).tolist()
        size = spec.count // spec.groups
        groups = [sorted(range(g * size, (g + 1) * size), key=lambda e: -wanted[e]) for g in range(spec.groups)]
        groups.sort(key=lambda group: -sum(wanted[expert] for expert in group[:2]))
        allowed = [expert for group in groups[: spec.top_groups] for expert in group]
        best = sorted(allowed, key=lambda e: -wanted[e])[: spec.top_k]
        total = sum(scores[e] for e in best) if spec.normalized else 1.0
        kept = []
        for expert in best:
            taken[expert] += 1
            capacity = (
                math.ceil(spec.capacity_factor * len(x) * spec.top_k / spec.count) if spec.capacity_factor else 99
            )
            if taken[expert] <= capacity:
                kept.append((expert, spec.scale * scores[expert] / total))
        found.append(kept)
    return found


def expected_of(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    e = moe.experts
    for b, sequence in enumerate(x):
        for s, (token, kept) in enumerate(zip(sequence, choices(moe, sequence), strict=True)):
            for expert, weight in kept:
                inner = e.up[expert] @ token
                inner = (
                    F.silu(e.gate[expert] @ token) * inner if e.gate is not None else F.gelu(inner, approximate="tanh")
                )
                out[b, s] += weight * (e.down[expert] @ inner)
    if moe.shared is not None:
        out = out + moe.shared(x) * (moe.shared_gate(x).sigmoid() if moe.shared_gate is not None else 1)
    return out


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_definition(kind, activation):
    moe = random_(MoE(model_of(KINDS[kind], activation=activation)))
    x = torch.randn(3, 10, 12, dtype=torch.float64, requires_grad=True)
    target = torch.randn_like(x)
    inputs = [x, *moe.parameters()]
    out, expected = moe(x), expected_of(moe, x)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    ours = torch.autograd.grad((out * target).sum(), inputs)
    theirs = torch.autograd.grad((expected * target).sum(), inputs)
    for own, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, their, rtol=1e-11, atol=1e-11)
    if kind == "small capacity":
        assert sum(len(kept) for sequence in x for kept in choices(moe, sequence)) < 3 * 10 * 3


def test_the_bias_is_for_the_choice_only():
    router = random_(Router(model_of({**SIGMOID, "groups": 1, "top_groups": 1})))
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    router.balance_bias.zero_()[5] = 10
    weights, indices = router(x)
    assert (indices == 5).any(-1).all()
    scores = F.linear(x, router.weight).sigmoid().gather(-1, indices)
    torch.testing.assert_close(weights, 2.5 * scores / scores.sum(-1, keepdim=True))


def test_a_router_is_wide_and_no_wider_than_its_weight_is_gathered():
    router = random_(Router(model_of(SOFTMAX))).float()
    x = torch.randn(1, 4, 12, dtype=torch.bfloat16)
    weights, _ = router(x)
    assert weights.dtype == torch.float32
    gathered = Router(model_of(SOFTMAX)).to(torch.bfloat16)
    gathered.load_state_dict(router.state_dict())
    assert torch.equal(gathered(x)[0], weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[5, 0, 3, 9], [0, 0, 17, 0], [4, 4, 4, 5], [0, 0, 0, 0]])
def test_both_forms_of_the_grouped_product(dtype, counts):
    torch.manual_seed(0)
    x, weight = torch.randn(sum(counts), 16).to(dtype), torch.randn(4, 24, 16).to(dtype)
    results = []
    for form in (one_kernel, one_by_one):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight)]
        out = form(*leaves, torch.tensor(counts))
        torch.manual_seed(1)
        results.append([out, *torch.autograd.grad(out, leaves, torch.randn(out.shape).to(dtype))])
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs)
    for group, count in enumerate(counts):
        assert (results[0][2][group] == 0).all() == (count == 0)


def test_sizes_that_the_kernel_does_not_take():
    counts = torch.tensor([2, 0, 3])
    x, weight = torch.randn(5, 7, dtype=torch.bfloat16), torch.randn(3, 9, 7, dtype=torch.bfloat16)
    expected = torch.cat([x[:2] @ weight[0].T, x[2:] @ weight[2].T])
    torch.testing.assert_close(grouped_product(x, weight, counts), expected)
    x, weight = (tensor.double().requires_grad_() for tensor in (x, weight))
    torch.autograd.gradcheck(lambda x, weight: grouped_product(x, weight, counts), (x, weight))


def test_load_counts_training_forwards_once():
    model = model_of(SIGMOID, layers=1)
    decoder = random_(Decoder(model, torch.float64))
    block, router = decoder.blocks["0"], decoder.blocks["0"].mlp.router
    x = torch.randn(2, 10, 12, dtype=torch.float64, requires_grad=True)
    _, indices = router.eval()(block.mlp_norm(x))
    assert router.load.sum() == 0

    block.mlp.train()
    block.mlp(block.mlp_norm(x))
    assert torch.equal(router.load, indices.flatten().bincount(minlength=8))

    router.load.zero_()
    checkpoint(block, x, None, use_reentrant=False).sum().backward()
    assert router.load.sum() == 2 * 10 * 3
    assert "mlp.router.load" not in block.state_dict()


def auxiliary_loss(router: Router, x: torch.Tensor) -> torch.Tensor:
    """Σ over sequences of Σ f P, term by term."""
    spec, total = router.spec, 0.0
    for sequence in x:
        scores = F.linear(sequence, router.weight)
        scores = scores.sigmoid() if spec.router == "sigmoid" else scores.softmax(-1)
        shares = scores / scores.sum(-1, keepdim=True)
        _, indices = router.eval()(sequence[None])
        for expert in range(spec.count):
            frequency = spec.count / spec.top_k / len(sequence) * int((indices == expert).sum())
            total = total + frequency * shares[:, expert].mean()
    return total


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_auxiliary_loss(kind):
    """Weights are what they were; gradients are those of the loss with the auxiliary term added."""
    router = random_(Router(model_of(KINDS[kind])))
    x = torch.randn(3, 10, 12, dtype=torch.float64, requires_grad=True)
    target, inputs = torch.randn(3, 10, 3, dtype=torch.float64), [x, router.weight]
    weights, _ = router.eval()(x)
    expected = torch.autograd.grad((weights * target).sum() + 0.3 * auxiliary_loss(router, x), inputs)
    plain = torch.autograd.grad((router(x)[0] * target).sum(), inputs)
    router.train().auxiliary_scale = 0.3
    balanced, _ = router(x)
    assert torch.equal(balanced, weights)
    for ours, theirs, without in zip(
        torch.autograd.grad((balanced * target).sum(), inputs), expected, plain, strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
        assert not torch.allclose(ours, without)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "small capacity"])
def test_a_sequence_over_two_ranks_is_balanced_and_dropped_as_one(kind):
    """Positions are dealt out as context parallelism does; each part learns of the other what it asks for."""
    moe = random_(MoE(model_of(KINDS[kind])))
    moe.router.auxiliary_scale = 0.3
    x = torch.randn(2, 12, 12, dtype=torch.float64)
    parts = [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]]
    whole_out = moe(x)
    expected = torch.autograd.grad(whole_out.square().sum(), list(moe.parameters()))

    with torch.no_grad():
        moe.router.eval()
        _, indices = moe.router(x)
        moe.router.train()
    counts = torch.stack([sequence.flatten().bincount(minlength=moe.router.spec.count) for sequence in indices])
    moe.router.sequence_parts = 2
    moe.router.sum_over_sequence = lambda own: counts
    moe.router.whole_sequence = lambda own: indices
    summed, out = [torch.zeros_like(p) for p in moe.parameters()], torch.empty_like(x)
    for part in parts:
        moe.router.own_part = lambda keep, part=part: keep[:, part]
        out[:, part] = moe(x[:, part])
        for total, gradient in zip(
            summed, torch.autograd.grad(moe(x[:, part]).square().sum(), list(moe.parameters())), strict=True
        ):
            total += gradient
    torch.testing.assert_close(out, whole_out, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(summed, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def test_dropping():
    """The latest of a sequence go, whatever else is in the batch; they are not dispatched; none go in evaluation."""
    moe = random_(MoE(model_of({**SOFTMAX, "capacity_factor": 0.5})))
    x = torch.randn(3, 10, 12, dtype=torch.float64)
    torch.testing.assert_close(moe(x), torch.cat([moe(sequence[None]) for sequence in x]))
    weights, indices = moe.router(x)
    assert ((indices == 6) == (weights == 0)).all()
    assert all((sequence == expert).sum() <= math.ceil(0.5 * 10 * 3 / 6) for sequence in indices for expert in range(6))

    seen = []
    moe.experts.register_forward_pre_hook(
        lambda module, arguments: seen.append((len(arguments[0]), int(arguments[1].sum())))
    )
    moe(x)
    kept = int((indices < 6).sum())
    assert seen == [(kept, kept)]
    assert kept < 90
    moe.eval()(x)
    assert seen[1] == (90, 90)


class Rolled:
    """As if another rank with the last four of six experts stood before this one with the first two."""

    def send(self, rows, counts):
        self.sent, first = counts, int(counts[:2].sum())
        return torch.cat((rows[first:], rows[:first])), first

    def arrived(self, rows, route):
        return rows, self.sent.roll(-2)

    def back(self, rows, route):
        return torch.cat((rows[len(rows) - route :], rows[: len(rows) - route]))


def test_the_exchange_surrounds_the_experts():
    """Rows are sent sorted by expert; what comes back is added up with the weights; shared experts have their turn in
    between."""
    moe = random_(MoE(model_of(SIGMOID | {"count": 6, "groups": 1, "top_groups": 1})))
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    expected = moe(x)
    for name in ("gate", "up", "down"):
        setattr(moe.experts, name, torch.nn.Parameter(getattr(moe.experts, name).roll(-2, 0)))
    moe.exchange, events = Rolled(), []
    for name in ("router", "shared", "experts"):
        getattr(moe, name).register_forward_pre_hook(lambda module, arguments, name=name: events.append(name))
    torch.testing.assert_close(moe(x), expected)
    assert moe.exchange.sent.tolist() == moe.router(x)[1].flatten().bincount(minlength=6).tolist()
    assert events[:3] == ["router", "shared", "experts"]


def test_update_of_the_bias():
    router = Router(model_of(SIGMOID))
    router.load += torch.tensor([8, 8, 0, 16, 8, 8, 9, 7])
    plain = Router(model_of(SOFTMAX))
    for _ in range(2):
        update_balance_bias([router, plain], 0.01)
    torch.testing.assert_close(router.balance_bias, 0.02 * torch.tensor([0.0, 0, 1, -1, 0, 0, -1, 1]))


def test_the_bias_balances():
    """Tokens that all like the same experts are spread over all of them."""
    router = random_(Router(model_of({**SIGMOID, "groups": 1, "top_groups": 1})))
    x = torch.randn(4, 64, 12, dtype=torch.float64) + 2
    router.balance_bias.zero_()
    shares = []
    for _ in range(300):
        router.load.zero_()
        router(x)
        shares.append(router.load.max() / router.load.double().mean())
        update_balance_bias([router], 0.005)
    assert shares[0] > 1.8
    assert shares[-1] < 1.2


def test_first_layers_are_dense():
    decoder = Decoder(model_of({**SOFTMAX, "dense_layers": 1}, layers=2))
    assert [isinstance(block.mlp, MoE) for block in decoder.blocks.values()] == [False, True]
    stage = Decoder(model_of({**SOFTMAX, "dense_layers": 1}, layers=2), layers=range(1, 2))
    assert isinstance(stage.blocks["1"].mlp, MoE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_block_compiles_whole(dtype):
    model = model_preset("tiny-moe")
    decoder = Decoder(model, dtype)
    torch.manual_seed(0)
    for parameter in decoder.parameters():
        parameter.data.normal_(std=0.05)
    decoder = decoder.double() if dtype == torch.float64 else decoder
    for block in decoder.blocks.values():
        block.mlp.router.auxiliary_scale = 0.1
    ids = torch.randint(320, (2, 8))
    expected = decoder(ids, ids)
    gradients = torch.autograd.grad(expected, list(decoder.parameters()))
    loads = [block.mlp.router.load.clone() for block in decoder.blocks.values()]
    for block in decoder.blocks.values():
        block.mlp.router.load.zero_()
        block.compile(fullgraph=True, backend="aot_eager")
    found = decoder(ids, ids)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(torch.autograd.grad(found, list(decoder.parameters())), gradients, strict=True):
        torch.testing.assert_close(ours, theirs)
    for block, load in zip(decoder.blocks.values(), loads, strict=True):
        assert torch.equal(block.mlp.router.load, load)


def test_initial_weights():
    model, shape = model_preset("tiny-moe"), torch.Size((8, 64, 64))
    for name, std in {"experts.up": 0.02, "experts.down": 0.02 / math.sqrt(8), "router.weight": 0.02}.items():
        drawn = initial_value(model, f"blocks.0.mlp.{name}", shape, 3, "cpu")
        assert drawn.std().item() == pytest.approx(std, rel=0.02)
        assert not torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize(
    ("model", "balance", "message"),
    [
        ("tiny-llama", {"auxiliary": 0.1}, "recipe.balance.auxiliary 0.1 needs a model with experts"),
        ("tiny-llama", {"bias_rate": 0.1}, "recipe.balance.bias_rate 0.1 needs routers with a bias; what works: 0"),
        ("tiny-moe", {"bias_rate": 0.1}, "what works: 0, or model.experts.router_bias: true"),
        ("tiny-moe", {"auxiliary": -1}, "recipe.balance.auxiliary: .*greater than or equal to 0"),
        ("tiny-moe", {"auxiliary": 0.1}, None),
    ],
)
def test_balances_that_the_model_allows(model, balance, message):
    recipe = {"batch_tokens": 1024, "steps": 1, "balance": balance}
    run = {"model": model, "cluster": {"gpu": "cpu"}, "layout": {}, "recipe": recipe}
    if message is None:
        require_trainable(load_run(run), 1)
        return
    with pytest.raises(InputError, match=message):
        require_trainable(load_run(run), 1)


def test_dropping_is_not_compiled():
    model = {"preset": "tiny-moe", "experts": {**SOFTMAX, "capacity_factor": 1.25}}
    run = {"model": model, "cluster": {"gpu": "cpu"}, "recipe": {"batch_tokens": 1024, "steps": 1}}
    require_trainable(load_run({**run, "layout": {}}), 1)
    with pytest.raises(InputError, match="model.experts.capacity_factor makes .* what works: compile: false"):
        require_trainable(load_run({**run, "layout": {"compile": True}}), 1)


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ({"top_k": 7}, "top_k 7 is more than the 6 experts; nearest: 6"),
        ({"groups": 4}, "groups 4 does not divide the 6 experts; nearest: 3"),
        ({"groups": 3, "top_groups": 4}, "top_groups 4 is more than the 3 groups; nearest: 3"),
        ({"groups": 3}, "top_k 3 is more than the 2 experts of 1 groups; nearest: 2"),
        ({"shared_gate": True}, "shared_gate needs a shared expert"),
    ],
)
def test_experts_that_cannot_be(experts, message):
    with pytest.raises(InputError, match=message):
        model_of({**SOFTMAX, **experts})
