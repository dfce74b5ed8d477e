"""Traces to steps, parts and a diagnosis: exact on planted overlaps, and equal to brute force on real traces."""

import json
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from shardwise.profiling.breakdown import PARTS, Breakdown
from shardwise.profiling.files import read_trace, read_traces
from shardwise.profiling.groups import by_layout
from shardwise.profiling.kernels import slowest_kernels
from shardwise.profiling.profile import Recompilation, analyse
from shardwise.profiling.steps import find_steps
from shardwise.profiling.trace import COMMUNICATION, COPY, KINDS
from shardwise.profiling.tracks import timeline_of
from shardwise.spec import InputError, Layout
from traces import ELEMENTWISE, GEMM, TraceBuilder, sweep

DATA = Path(__file__).parent.parent / "data" / "traces"
MS = 1e-3


def profile(tmp_path, *builders, **more):
    paths = [builder.write(tmp_path / f"rank{place}.json") for place, builder in enumerate(builders)]
    return analyse(read_traces(paths), **more)


def parts(tmp_path, builder):
    """Of the only step, in milliseconds, those that are not zero."""
    (step,) = profile(tmp_path, builder).ranks[0].steps
    assert sum(step.parts.values()) == pytest.approx(step.seconds)
    return {part: round(seconds / MS, 6) for part, seconds in step.parts.items() if seconds > 1e-9}, step


def test_planted_overlaps_are_measured_exactly(tmp_path):
    builder = TraceBuilder()
    builder.step(0, 100)
    builder.kernel(0, 20, launched=0)
    builder.kernel(15, 30, ELEMENTWISE, launched=0, stream=8)  # 5 ms of it under a product
    builder.collective(10, 50, "all_gather", "1", launched=0)  # 20 ms under work: 20 stick out
    builder.collective(45, 60, "reduce_scatter", "1", launched=0)  # 5 ms beside the other: 10 stick out
    builder.copy(55, 70)  # 5 ms under communication
    builder.kernel(70, 100, launched=0)
    found, step = parts(tmp_path, builder)
    assert found == {"compute": 50, "memory_bound": 10, "exposed_communication": 30, "copy": 10}
    assert step.exposed == pytest.approx({"all_gather": 20 * MS, "reduce_scatter": 10 * MS})
    assert step.communication == pytest.approx({"all_gather": 40 * MS, "reduce_scatter": 15 * MS})
    assert step.by_group["all_gather", "1"] == pytest.approx((40 * MS, 20 * MS, 1))


@pytest.mark.parametrize(
    ("called", "kind", "stream"),
    [
        ("mesh_tp", "all_gather", "tensor"),
        ("mesh_fsdp", "all_gather", "all_gather"),
        ("TENSOR_MODEL_PARALLEL_GROUP", "all_reduce", "tensor"),
        ("CONTEXT_PARALLEL_GROUP", "all_gather", "context"),
        ("mesh_ep", "all_gather", "expert"),
        ("", "all_to_all", "expert"),
        ("", "send_recv", "pipeline"),
        ("", "all_reduce", "reduce_scatter"),
    ],
)
def test_communication_goes_to_its_stream(tmp_path, called, kind, stream):
    builder = TraceBuilder()
    builder.step(0, 10)
    builder.collective(2, 6, kind, "3", called)
    _, step = parts(tmp_path, builder)
    assert step.exposed == pytest.approx({stream: 4 * MS})


@pytest.mark.parametrize(
    ("layout", "kind", "ranks", "stream"),
    [
        ({"dp_shard": 2, "tp": 4}, "all_gather", "[4, 5, 6, 7]", "tensor"),
        ({"dp_shard": 2, "tp": 4}, "all_gather", "[1, 5]", "all_gather"),
        ({"dp_shard": 4, "cp": 2}, "send_recv", "[0, 1]", "context"),
        ({"dp_shard": 2, "cp": 2, "tp": 2}, "all_to_all", "[0, 2]", "context"),
        ({"dp_shard": 4, "pp": 2, "zero": 2}, "send_recv", "[0, 4]", "pipeline"),
        ({"dp_shard": 4, "pp": 2, "zero": 2}, "reduce_scatter", "[0, 1, 2, 3]", "reduce_scatter"),
        ({"dp_shard": 8, "ep": 4}, "all_to_all", "[0, 1, 2, 3]", "expert"),
        ({"dp_shard": 8, "ep": 4}, "all_gather", "[0, 4]", "all_gather"),
    ],
)
def test_groups_go_by_their_ranks_where_the_layout_is_known(tmp_path, layout, kind, ranks, stream):
    builder = TraceBuilder(world=8)
    builder.step(0, 10)
    builder.collective(2, 6, kind, "3", **{"Process Group Ranks": ranks})
    (trace,) = read_trace(builder.write(tmp_path / "t.json"))
    (traffic,) = by_layout(trace, Layout.load(layout)).traffics
    assert traffic.stream == stream


def test_why_the_device_is_idle(tmp_path):
    builder = TraceBuilder()
    builder.step(0, 100)
    builder.note(0, 10, "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__")
    builder.kernel(12, 30)  # 2 ms late: the host's
    builder.call(20, 30.01, "cudaDeviceSynchronize")
    builder.kernel(35, 50)  # 5 ms after the host had waited
    builder.kernel(52, 60, launched=40)  # was queued: waits for something else
    builder.note(60, 80, "save_checkpoint")
    builder.note(80, 90, "_compile.compile_inner (dynamo_timed)")
    builder.kernel(90, 100)
    found, _ = parts(tmp_path, builder)
    assert found == {
        "compute": 51, "input": 10, "host": 2, "synchronisation": 5, "idle": 2, "checkpoint": 20, "recompilation": 10,
    }  # fmt: skip


def test_the_optimizer_is_what_was_launched_in_it(tmp_path):
    builder = TraceBuilder()
    builder.step(0, 20)
    builder.kernel(0, 10, launched=0)
    builder.note(2, 4, "Optimizer.step#AdamW.step")
    builder.kernel(10, 16, ELEMENTWISE, launched=3)
    builder.kernel(16, 20, ELEMENTWISE, launched=5)
    assert parts(tmp_path, builder)[0] == {"compute": 10, "optimizer": 6, "memory_bound": 4}


def test_a_step_lasts_until_the_device_is_done_with_it(tmp_path):
    builder = TraceBuilder()
    builder.step(0, 10)
    builder.step(10, 20)
    builder.kernel(1, 15, launched=1)
    builder.kernel(15, 30, launched=11)
    trace = read_trace(builder.write(tmp_path / "t.json"))[0]
    windows, how = find_steps(trace)
    assert np.allclose(windows, [(0, 0.015), (0.015, 0.030)])
    assert how == "annotations of steps"


def test_steps_from_optimizer_steps_and_from_repetition(tmp_path):
    builder = TraceBuilder()
    for start in (0, 100, 200, 300):
        for place in range(5):
            builder.kernel(start + 10 * place, start + 10 * place + 5, GEMM)
            builder.kernel(start + 10 * place + 5, start + 10 * place + 8, ELEMENTWISE)
        builder.kernel(start + 60, start + 70, "void softmax_warp_backward<float>(float*)")
    windows, how = find_steps(read_trace(builder.write(tmp_path / "a.json"))[0])
    assert how == "kernels that repeat"
    assert np.allclose(np.diff(windows), 0.1)
    assert len(windows) == 3
    for start in (0, 100, 200, 300):
        builder.note(start + 80, start + 90, "Optimizer.step#AdamW.step")
    windows, how = find_steps(read_trace(builder.write(tmp_path / "b.json"))[0])
    assert how == "from one optimizer step to the next"
    assert np.allclose(windows, [(0.09, 0.19), (0.19, 0.29), (0.29, 0.39)])


@pytest.mark.parametrize("name", ["alexnet_1gpu.json.gz", "nccl_rank0_two_steps.json.gz"])
def test_real_traces_equal_a_brute_force_sweep(name):
    (trace,) = read_trace(DATA / name)
    breakdown = Breakdown(trace)
    device = trace.device
    labels = {"gemm": "compute", "attention": "compute", "memory": "memory_bound", "copy": "copy"}
    labels["communication"] = "exposed_communication"
    optimizer = np.zeros(len(device.start), dtype=bool)
    updates = trace.named("^optimizer.step")
    for start, end in zip(trace.host.start[updates], trace.host.end[updates], strict=True):
        optimizer |= (device.launched >= start) & (device.launched <= end)
    optimizer &= ~np.isin(device.kind, (COMMUNICATION, COPY))
    spans = [
        (float(start), float(end), "optimizer" if updating else labels[KINDS[kind]])
        for start, end, kind, updating in zip(device.start, device.end, device.kind, optimizer, strict=True)
    ]
    order = list(PARTS[:5])
    assert len(spans) == len(device.start) > 90
    for window in find_steps(trace)[0]:
        expected = sweep(spans, window, order)
        step = breakdown.step(window)
        for part in order:
            assert step.parts[part] == pytest.approx(expected[part], rel=1e-9, abs=1e-12)
        assert sum(step.parts[part] for part in PARTS[5:]) == pytest.approx(expected[""], rel=1e-9)
        timeline = timeline_of(trace, window)
        busy = sum(step.parts[part] for part in ("compute", "memory_bound", "optimizer"))
        assert timeline.busy("compute") == pytest.approx(busy)
        for stream, seconds in step.exposed.items():
            assert timeline.exposed(stream) == pytest.approx(seconds, abs=1e-9)


def test_a_real_trace_of_two_nccl_ranks():
    answer = analyse(read_traces([DATA / "nccl_rank0_two_steps.json.gz"]))
    assert len(answer.ranks[0].steps) == 2
    assert answer.diagnosis.bottleneck == "host-bound"
    assert answer.chip == "NVIDIA A100-PG509-200"
    assert answer.mean.by_group["all_reduce", "0"][2] == 5
    assert answer.dump()["ranks"][0]["steps"][0]["launches"] > 1000


def busy_step(builder, start, end, busy):
    """A step whose device works for `busy` from its beginning, all launched early."""
    builder.step(start, end)
    builder.kernel(start, start + busy)


def planted(cause):
    builder = TraceBuilder()
    for start in (0, 100, 200):
        busy_step(builder, start, start + 100, 60)
        if cause == "input":
            builder.note(start + 60, start + 98, "shardwise: input")
        elif cause == "synchronisation":
            for place in range(4):
                at = start + 60 + 10 * place
                builder.call(at - 5, at + 0.01, "cudaDeviceSynchronize")
                builder.kernel(at + 7, at + 10)
        elif cause == "recompilation":
            builder.note(start + 60, start + 98, "_compile.compile_inner (dynamo_timed)")
        elif cause == "checkpoint":
            builder.note(start + 60, start + 98, "dcp.save")
        elif cause == "host-bound":
            for place in range(100):
                builder.kernel(start + 60 + 0.4 * place + 0.3, start + 60 + 0.4 * place + 0.4, ELEMENTWISE)
        elif cause == "bubble":
            builder.collective(start + 60, start + 99, "send_recv")
        elif cause == "copies":
            builder.copy(start + 60, start + 99, "DtoH")
        elif cause == "memory-bound":
            builder.kernel(start + 60, start + 100, ELEMENTWISE, launched=start)
        elif cause == "compute":
            builder.kernel(start + 60, start + 100, launched=start)
        else:
            kind = cause.removeprefix("exposed ")
            called = {"tensor": "mesh_tp", "context": "mesh_cp", "expert": "mesh_ep"}.get(kind, "")
            builder.collective(start + 60, start + 99, kind if not called else "all_gather", "1", called)
    return builder


CAUSES = ["input", "synchronisation", "recompilation", "checkpoint", "host-bound", "bubble", "copies", "memory-bound",
          "compute", "exposed all_gather", "exposed reduce_scatter", "exposed tensor", "exposed context",
          "exposed expert"]  # fmt: skip


@pytest.mark.parametrize("cause", CAUSES)
def test_planted_bottlenecks_are_named(tmp_path, cause):
    answer = profile(tmp_path, planted(cause))
    diagnosis = answer.diagnosis
    assert diagnosis.bottleneck == cause
    assert diagnosis.evidence
    if cause != "compute":
        assert 0.15 < diagnosis.share < 0.42
        assert 1 <= len(diagnosis.remedies) <= 3


def test_one_long_wait_is_told_from_slow_launches(tmp_path):
    def diagnosis(*gaps):
        builder = TraceBuilder()
        for start, gap in zip((0, 100), gaps, strict=True):
            builder.step(start, start + 100)
            builder.kernel(start, start + 20, launched=start)
            builder.operator(start + 20, start + 20 + gap, "aten::to")
            builder.call(start + 20, start + 20 + 0.9 * gap, "cudaMalloc")
            builder.kernel(start + 20 + gap, start + 100, launched=start + 20 + gap)
        return profile(tmp_path, builder).diagnosis

    often, once = diagnosis(50, 50), diagnosis(70, 2)
    assert often.evidence[1] == "the longest wait: 50.0 ms, while the host was in aten::to: cudaMalloc"
    assert any("compile" in remedy.change for remedy in often.remedies)
    assert once.evidence[1] == "most of it is one wait of 70.0 ms, while the host was in aten::to: cudaMalloc"
    assert not any("compile" in remedy.change for remedy in once.remedies)


def test_the_straggling_rank_is_found(tmp_path):
    ranks = []
    for rank in range(4):
        builder = TraceBuilder(rank, world=4)
        busy = 90 if rank == 2 else 60
        for start in (0, 100):
            busy_step(builder, start, start + 100, busy)
            builder.collective(start + busy, start + 100, "all_reduce", launched=start)
        ranks.append(builder)
    answer = profile(tmp_path, *ranks)
    assert answer.critical == 2
    assert answer.diagnosis.bottleneck == "straggler"
    assert answer.straggler.rank == 2
    assert answer.straggler.waited == pytest.approx(30 * MS)
    assert answer.straggler.late == pytest.approx(30 * MS)
    assert answer.ranks[0].waited == pytest.approx((30 * MS, 30 * MS))


def test_a_rank_that_waits_for_input_is_no_slow_chip(tmp_path):
    ranks = []
    for rank in range(2):
        builder = TraceBuilder(rank)
        builder.step(0, 100)
        late = 30 if rank == 1 else 0
        if late:
            builder.note(0, 30, "shardwise: input")
        builder.kernel(late, late + 60, launched=late)
        builder.collective(late + 60, 100, "all_reduce", launched=late)
        ranks.append(builder)
    answer = profile(tmp_path, *ranks)
    assert (answer.critical, answer.diagnosis.bottleneck) == (1, "input")


def test_products_far_below_the_roofline(tmp_path):
    builder = TraceBuilder()
    builder.step(0, 100)
    shapes = {"Input Dims": [[4096, 4096], [4096, 4096]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
    for place in range(10):
        builder.operator(10 * place, 10 * place + 0.1, "aten::mm", **{"External id": place}, **shapes)
        builder.kernel(10 * place, 10 * place + 10, launched=0, **{"External id": place})
    answer = profile(tmp_path, builder)
    bound = 2 * 4096**3 / 989e12
    assert answer.kernels[0].roofline == pytest.approx(bound / 0.01, rel=1e-2)
    assert answer.diagnosis.bottleneck == "kernels below roofline"


def test_compilations_that_torch_reports_are_told_with_their_reason(tmp_path):
    builder = TraceBuilder()
    for start in (0, 100):
        busy_step(builder, start, start + 100, 40)
        builder.kernel(start + 99, start + 100)
    reason = "tensor 'x' size mismatch at index 0. expected 3, actual 4"
    answer = profile(tmp_path, builder, recompilations=[Recompilation("forward", reason, 0.1)])
    assert answer.diagnosis.bottleneck == "recompilation"
    assert any(reason in line for line in answer.diagnosis.evidence)


def test_operators_are_the_work_on_a_cpu(tmp_path):
    builder = TraceBuilder()
    builder.step(0, 100)
    builder.note(0, 10, "shardwise: input")
    builder.operator(2, 8, "aten::stack")  # fetching, not computing
    builder.operator(10, 40, "aten::linear")
    builder.operator(12, 38, "aten::addmm")  # within it
    builder.note(30, 70, "gloo:all_gather")
    builder.operator(90, 100, "aten::mul_")
    found, step = parts(tmp_path, builder)
    assert found == {"compute": 30, "input": 10, "exposed_communication": 30, "host": 20, "memory_bound": 10}
    assert step.exposed == pytest.approx({"all_gather": 30 * MS})


def test_kernels_are_summed_by_name(tmp_path):
    builder = TraceBuilder()
    for start in (0, 100):
        builder.step(start, start + 100)
        builder.kernel(start, start + 30)
        builder.kernel(start + 30, start + 40)
        builder.kernel(start + 50, start + 60, ELEMENTWISE)
    (trace,) = read_trace(builder.write(tmp_path / "t.json"))
    first, second = slowest_kernels(trace, find_steps(trace)[0])
    assert (first.kind, first.calls, second.kind, second.calls) == ("gemm", 2, "memory", 1)
    assert first.seconds == pytest.approx(40 * MS)
    assert second.name == "at::native::vectorized_elementwise_kernel"


def test_an_export_of_nsight_systems(tmp_path):
    path = tmp_path / "report.sqlite"
    base = sqlite3.connect(path)
    owner = 7 << 24
    base.executescript("""
        CREATE TABLE StringIds (id INTEGER, value TEXT);
        CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT);
        CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER,
            correlationId INTEGER, globalPid INTEGER, demangledName INTEGER, shortName INTEGER);
        CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER,
            correlationId INTEGER, globalPid INTEGER, bytes INTEGER, copyKind INTEGER);
        CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER,
            correlationId INTEGER, nameId INTEGER);
        CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, text TEXT, textId INTEGER, globalTid INTEGER);
    """)
    names = [(1, GEMM), (2, "ncclDevKernel_AllGather_RING_LL(int)"), (3, "cudaLaunchKernel")]
    base.executemany("INSERT INTO StringIds VALUES (?, ?)", names)
    base.execute("INSERT INTO TARGET_INFO_GPU VALUES (0, 'NVIDIA H100 80GB HBM3')")
    kernels = [(0, 40, 7, 1, 1), (30, 90, 20, 2, 2)]
    for start, end, stream, correlation, name in kernels:
        row = (start * 10**6, end * 10**6, 0, stream, correlation, owner, name, name)
        base.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        base.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (0, 10, ?, ?, 3)", (owner + 5, correlation))
    base.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (90000000, 95000000, 0, 9, 9, ?, 100, 1)", (owner,))
    base.execute("INSERT INTO NVTX_EVENTS VALUES (0, 100000000, 'iteration 3', NULL, ?)", (owner + 5,))
    base.commit()
    base.close()
    (trace,) = read_trace(path)
    (window,), _ = find_steps(trace)
    step = Breakdown(trace).step(window)
    assert trace.chip == "NVIDIA H100 80GB HBM3"
    assert step.seconds == pytest.approx(0.1)
    assert step.parts["compute"] == pytest.approx(0.04)
    assert step.exposed == pytest.approx({"all_gather": 0.05})
    assert step.parts["copy"] == pytest.approx(0.005)
    assert step.parts["host"] == pytest.approx(0.005)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b"not json", "not a trace of PyTorch's profiler"),
        ("a.json.gz", b"\x1f\x8bbroken", "cannot be read"),
        ("a.json", b'{"traceEvents": []}', "no kernel, operator or annotation"),
        ("a.json", b'{"some": "thing"}', "no traceEvents"),
        ("a.sqlite", b"SQLite format 3\x00 and no more", "not an export of Nsight Systems"),
    ],
)
def test_what_is_no_trace(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_traces([path])


def test_a_rank_that_is_given_twice(tmp_path):
    first = planted("input").write(tmp_path / "a.json")
    second = planted("input").write(tmp_path / "b.json")
    with pytest.raises(InputError, match=r"rank 0 stands in .*a\.json, too"):
        read_traces([first, second])


def test_the_dump_is_json(tmp_path):
    document = json.loads(json.dumps(profile(tmp_path, planted("exposed all_gather")).dump()))
    assert document["diagnosis"]["bottleneck"] == "exposed all_gather"
    assert document["diagnosis"]["remedies"][0]["class"] in ("modelled", "upper bound")
