"""What is saved on one layout is restored bit for bit on another."""

import pytest
import torch
import torch.distributed as dist
from tiny import FIELDS, bits, bits_of, build, checkpointer, save, train

from shardwise.checkpoints.manifest import inspect, step_name, verify
from shardwise.checkpoints.restore import find, restore
from shardwise.checkpoints.state import apply, collect
from shardwise.spec import InputError

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def saved(directory, wrapper, optimizer="adamw", asynchronous=False):
    """Train two steps and save; the state's bits then and two steps later."""
    model, optim = build(wrapper, optimizer)
    train(model, optim, 0, 2)
    then = bits_of(model, optim)
    save(directory, 2, collect(model, optim), asynchronous=asynchronous)
    train(model, optim, 2, 2)
    return then, bits_of(model, optim)


def restored(directory, wrapper, optimizer="adamw"):
    """Restore into a model with other weights; the state's bits then and two steps later."""
    model, optim = build(wrapper, optimizer, seed=1)
    state = collect(model, optim)
    entry = find(directory, say=print)
    assert entry is not None
    restore(entry.path, state)
    apply(model, optim, state)
    then = bits_of(model, optim)
    train(model, optim, 2, 2)
    return then, bits_of(model, optim)


@pytest.mark.parametrize("optimizer", ["adamw", "fused", "sgd", "momentum"])
def test_one_process_without_a_group_resumes_exactly(tmp_path, optimizer):
    assert saved(tmp_path, "plain", optimizer) == restored(tmp_path, "plain", optimizer)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "fused", "sgd"])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_two_ranks_resume_exactly(tmp_path, ranks, wrapper, optimizer, asynchronous):
    before = ranks(2).run(saved, tmp_path, wrapper, optimizer, asynchronous)
    assert ranks(2).run(restored, tmp_path, wrapper, optimizer) == before
    assert len(inspect(tmp_path / step_name(2)).checkpoint.files) == 3  # both ranks wrote


@pytest.mark.parametrize(
    ("world", "wrapper", "new_world", "new_wrapper"),
    [
        (1, "plain", 2, "fsdp"),
        (2, "fsdp", 1, "plain"),
        (2, "fsdp", 2, "ddp"),
        (2, "fsdp", 4, "fsdp"),
        (2, "ddp", 4, "fsdp"),
        (4, "fsdp", 2, "fsdp"),
    ],
)
def test_another_layout(tmp_path, ranks, world, wrapper, new_world, new_wrapper):
    before = ranks(world).run(saved, tmp_path, wrapper) if world > 1 else [saved(tmp_path, wrapper)]
    after = (
        ranks(new_world).run(restored, tmp_path, new_wrapper) if new_world > 1 else [restored(tmp_path, new_wrapper)]
    )
    assert {str(then) for then, _ in before + after} == {str(before[0][0])}


def names(wrapper):
    model, optimizer = build(wrapper)
    return sorted(key for key in bits_of(model, optimizer))


def test_names_do_not_depend_on_the_wrapper(ranks):
    assert ranks(2).run(names, "ddp") == ranks(2).run(names, "fsdp") == [names("plain")] * 2
    assert "model.block.0.weight" in names("plain")
    assert "optimizer.block.0.weight.exp_avg" in names("plain")


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "fused", "sgd", "momentum"])
def test_collecting_before_the_first_step_changes_nothing(tmp_path, optimizer, gradients):
    def run(collects):
        model, optim = build("plain", optimizer)
        if gradients:
            model(torch.tensor([[1, 2]])).sum().backward()
        if collects:
            state = collect(model, optim)
            names = {name for name, _ in model.named_parameters()}
            assert set(state["optimizer"]) == (set() if optimizer == "sgd" else names)
            save(tmp_path, 0, state)
        train(model, optim, 0, 2)
        return bits_of(model, optim)

    expected = run(collects=False)
    assert run(collects=True) == expected
    if not gradients:
        model, optim = build("plain", optimizer, seed=1)
        state = collect(model, optim)
        restore(tmp_path / step_name(0), state)
        apply(model, optim, state)
        train(model, optim, 0, 2)
        assert bits_of(model, optim) == expected


def draw_after_saving(directory):
    model, optimizer = build("ddp", "sgd")
    torch.manual_seed(100 + dist.get_rank())
    torch.rand(3)
    save(directory, 1, collect(model, optimizer))
    return torch.rand(3).tolist()


def draw_after_restoring(directory):
    model, optimizer = build("ddp", "sgd")
    torch.manual_seed(200 + dist.get_rank())
    state = collect(model, optimizer)
    fresh = torch.rand(3).tolist()
    restore(directory / step_name(1), state)
    apply(model, optimizer, state)
    return fresh, torch.rand(3).tolist()


def test_every_rank_gets_its_own_generator_back(tmp_path, ranks):
    drawn = ranks(2).run(draw_after_saving, tmp_path)
    assert drawn[0] != drawn[1]
    assert [after for _, after in ranks(2).run(draw_after_restoring, tmp_path)] == drawn
    more = ranks(4).run(draw_after_restoring, tmp_path)
    assert [after for _, after in more[:2]] == drawn
    assert all(fresh == after for fresh, after in more[2:])  # ranks that were not there keep theirs


def overwritten(directory, wrapper):
    model, optimizer = build(wrapper)
    train(model, optimizer, 0, 1)
    state = collect(model, optimizer)
    then = bits(state)

    def overwrite():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7.0)
            for moments in optimizer.state.values():
                moments["exp_avg"].fill_(7.0)

    save_and_meanwhile(directory, state, overwrite)
    assert bits(state) != then
    restore(directory / step_name(1), state)
    return bits(state) == then


def save_and_meanwhile(directory, state, work):
    saver = checkpointer(directory, [], asynchronous=True)
    for step in (1, 2):  # twice, because the second save reuses the host buffers of the first
        saver.save(step, state, tokens=0, **FIELDS)
        work()
    saver.close()
    assert saver.last_error is None


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_weights_may_change_as_soon_as_an_asynchronous_save_returns(tmp_path, ranks, wrapper):
    assert ranks(2).run(overwritten, tmp_path, wrapper) == [True, True]
    assert verify(inspect(tmp_path / step_name(2))) is None


def refused(directory, wrapper, key, change):
    model, optimizer = build(wrapper, seed=1)
    state = collect(model, optimizer)
    before = bits(state)
    if change == "unknown":
        state["model"]["block.9.weight"] = torch.zeros(1)
    else:
        tensor = state["model"][key]
        state["model"][key] = tensor.double() if change == "dtype" else torch.zeros(9, *tensor.shape[1:])
    with pytest.raises(InputError) as refusal:
        restore(directory / step_name(2), state)
    assert bits(collect(model, optimizer)) == before
    return str(refusal.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("dtype", "model.block.0.bias is float32[3], but float64[3] is needed"),
        ("shape", "model.block.0.bias is float32[3], but float32[9] is needed"),
        ("unknown", "model.block.9.weight is missing"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path, ranks, change, message):
    saved(tmp_path, "plain")
    assert message in refused(tmp_path, "plain", "block.0.bias", change)
    assert all(message in text for text in ranks(2).run(refused, tmp_path, "fsdp", "block.0.bias", change))


def refused_on_one(directory):
    """Only rank 1 asks for something that is not there; rank 0 must not wait for it."""
    state = {"model": {"block.0.bias": torch.zeros(3)}}
    if dist.get_rank() == 1:
        state["model"]["nothing"] = torch.zeros(1)
    with pytest.raises(InputError, match=r"model\.nothing is missing"):
        restore(directory / step_name(2), state)


def test_a_misfit_of_one_rank_is_learnt_by_all(tmp_path, ranks):
    saved(tmp_path, "plain")
    ranks(2).run(refused_on_one, tmp_path)


def test_apply_refuses_what_does_not_fit():
    model, optimizer = build("plain")
    state = collect(model, optimizer)
    before = bits(state)
    with pytest.raises(InputError, match=r"model\.block\.0\.bias is float32\[1\], but float32\[3\] is needed"):
        apply(model, optimizer, {**state, "model": {**state["model"], "block.0.bias": torch.zeros(1)}})
    assert bits_of(model, optimizer) == before


@pytest.mark.parametrize("damage", ["no directory", "no index", "garbage index", "truncated shard"])
def test_an_unreadable_checkpoint_is_one_message(tmp_path, damage):
    path = tmp_path / step_name(2)
    if damage != "no directory":
        saved(tmp_path, "plain")
    if damage == "no index":
        (path / ".metadata").unlink()
    if damage == "garbage index":
        (path / ".metadata").write_bytes(b"garbage")
    if damage == "truncated shard":
        (path / "__0_0.distcp").write_bytes((path / "__0_0.distcp").read_bytes()[:5000])
    with pytest.raises(InputError) as refusal:
        restore(path, collect(*build("plain")))
    assert str(refusal.value).startswith(str(path))
    assert "\n" not in str(refusal.value)


def found(directory):
    said = []
    entry = find(directory, say=said.append)
    return entry.step, said


def test_ranks_find_the_same_checkpoint(tmp_path, ranks):
    ranks(2).run(saved, tmp_path, "fsdp")
    tensors = {"model": {"weight": torch.ones(3)}}
    save(tmp_path, 5, tensors)
    save(tmp_path, 7, tensors)
    shard = tmp_path / step_name(5) / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    (tmp_path / step_name(7) / "manifest.json").unlink()
    (first, said), (second, silent) = ranks(2).run(found, tmp_path)
    assert first == second == 2
    assert [line.split(" is skipped")[0] for line in said] == [step_name(7), step_name(5)]
    assert silent == []
