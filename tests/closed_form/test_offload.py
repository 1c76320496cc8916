"""Durations of host copies and of the offloaded optimizer, against closed forms."""

from dataclasses import replace

import numpy as np
import pytest

from clustersim import Scenario, simulate
from clustersim.common.errors import InputError
from clustersim.cost.host_transfers import HostTransferCost
from clustersim.hardware.host_memory import HostMemory
from clustersim.model.transformer import parameter_count
from clustersim.parallel.mesh import HOST_GROUP
from clustersim.program.task import (
    CollectiveTask,
    CollectiveType,
    ComputeTask,
    HostOp,
    HostOpKind,
    Segment,
    Stream,
    Task,
)
from clustersim.results.dominant_categories import category_seconds
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.time_categories import TIME_CATEGORIES, TimeCategory

HOST_MEMORY = HostMemory(
    capacity=1e13, bandwidth=100e9, device_to_host=20e9, host_to_device=10e9, latency=0.5, optimizer_fraction=0.4
)
LAYERS = 6
UNITS = LAYERS + 2
"""Embedding, layers and head: the units in which an offloaded optimizer works."""


def scenario(*overrides: str, host: HostMemory = HOST_MEMORY) -> Scenario:
    """A small Llama on two GPUs of a node, without interference and with zero launch time."""
    config = {
        "model": {"preset": "llama3-8b", "layers": LAYERS},
        "cluster": {"name": "dgx-h100", "gpus": 2},
        "layout": {"dp": 2, "data": "zero1"},
        "training": {"sequence": 1024, "global_batch": 2},
        "framework": "ideal",
        "cost": {"interference": 0.0},
    }
    parsed = Scenario.from_mapping(config, overrides)
    framework = replace(parsed.framework, launch_seconds=0.0, backward_launch_seconds=0.0)
    return replace(parsed, framework=framework, cluster=replace(parsed.cluster, host_memory=host))


def stream_spans(result: SimulationResult, stream: Stream) -> list[tuple[str, float, float]]:
    """Name, start and end of what rank 0 does on a stream, in order."""
    trace, tasks = result.trace, result.program.programs[0].tasks
    events = trace.rank_events(0, stream).tolist()
    named_spans = []
    for event in events:
        task = tasks[int(trace.task[event])]
        assert isinstance(task, CollectiveTask)
        named_spans.append((task.comm_op.name, float(trace.start[event]), float(trace.end[event])))
    return named_spans


def segment_of_task(task: Task) -> Segment:
    assert isinstance(task, ComputeTask)
    return task.segment


class _NoCommCost:
    """No communication between ranks."""

    time_comm_op = link_demand = None


@pytest.mark.parametrize(
    ("sharers", "kind", "seconds"),
    [
        (1, HostOpKind.D2H, 0.5 + 100e9 / 20e9),  # the link
        (8, HostOpKind.D2H, 0.5 + 100e9 / 12.5e9),  # an eighth of the memory's bandwidth
        (8, HostOpKind.H2D, 0.5 + 100e9 / 10e9),  # the link
        (20, HostOpKind.H2D, 0.5 + 100e9 / 5e9),
        (8, HostOpKind.ON_HOST, 100e9 / (12.5e9 * 0.4)),
    ],
)
def test_gpus_share_host_memory_bandwidth(sharers: int, kind: HostOpKind, seconds: float) -> None:
    cost = HostTransferCost(_NoCommCost(), HOST_MEMORY, np.full(3, sharers))  # type: ignore[arg-type]
    host_op = HostOp("copy", CollectiveType.SEND_RECV, HOST_GROUP.name, 100e9, kind)
    assert cost.time_comm_op(host_op).seconds == pytest.approx(np.full(3, seconds))
    demand = cost.link_demand(host_op)
    assert demand.latency == pytest.approx(np.full(3, seconds))  # it loads no link of the network
    assert not demand.transfer.any()


def test_the_offloaded_optimizer_pipelines_copies_and_updates() -> None:
    """Of equal units: one of each of the three stages, and for every additional unit the slowest of the three.

    A rank updates half of the parameters: 4 bytes of a gradient go out, 2 of a weight come back, and the CPU
    moves 30: master weights and two moments in and out (24), the gradient in (4), the new weight out (2).
    """
    offloaded, on_gpu = (simulate(scenario(f"training.offload.optimizer={flag}")) for flag in ("true", "false"))
    count = parameter_count(offloaded.scenario.model) / 2 / UNITS
    d2h_seconds, h2d_seconds = 0.5 + 4 * count / 20e9, 0.5 + 2 * count / 10e9
    update = 30 * count / (50e9 * 0.4)
    host_seconds = d2h_seconds + update + h2d_seconds + (UNITS - 1) * max(d2h_seconds, update, h2d_seconds)
    gpu_seconds = (
        on_gpu.breakdown.rank_seconds(0)["optimizer"] - offloaded.breakdown.rank_seconds(0)["optimizer"]
    )  # the norm stays
    assert gpu_seconds > 0
    assert offloaded.step_time - on_gpu.step_time == pytest.approx(host_seconds - gpu_seconds, rel=1e-9)
    assert offloaded.breakdown.rank_seconds(0)["exposed host"] == pytest.approx(host_seconds, rel=1e-9)


@pytest.mark.parametrize(("threads", "rate"), [(None, 12.5e9 * 0.4), (1, 2e9), (2, 4e9), (3, 12.5e9 * 0.4)])
def test_few_threads_reach_less_than_the_memory_s_bandwidth(threads: int | None, rate: float) -> None:
    host = replace(HOST_MEMORY, core_bandwidth=2e9)
    cost = HostTransferCost(_NoCommCost(), host, np.full(2, 8), threads)  # type: ignore[arg-type]
    update = HostOp("update", CollectiveType.SEND_RECV, HOST_GROUP.name, 100e9, HostOpKind.ON_HOST)
    assert cost.time_comm_op(update).seconds == pytest.approx(np.full(2, 100e9 / rate))
    copy = replace(update, kind=HostOpKind.H2D)  # a DMA, not work of a core
    assert cost.time_comm_op(copy).seconds == pytest.approx(np.full(2, 0.5 + 100e9 / 10e9))


def test_a_sequential_update_waits_for_each_slice_and_moves_more() -> None:
    """Units one after the other; beyond the 30 bytes, gradients are scaled (8), and weights are read to convert (4).

    The first unit's gradients come first; those of the others are out before the CPU is ready for them.
    """
    offload = "training.offload={optimizer: true, update: sequential, threads: 1}"
    core = "cluster.node.host_memory.core_bandwidth=5 GB/s"
    result = simulate(scenario(offload, core, host=replace(HOST_MEMORY, core_bandwidth=5e9)))
    count = parameter_count(result.scenario.model) / 2 / UNITS
    d2h_seconds, h2d_seconds = 0.5 + 4 * count / 20e9, 0.5 + 2 * count / 10e9
    update = 42 * count / 5e9
    expected = d2h_seconds + UNITS * (update + h2d_seconds)
    assert result.breakdown.rank_seconds(0)["exposed host"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("offload", "complaint"),
    [
        ("{optimizer: true, threads: 1}", "core_bandwidth"),
        ("{optimizer: true, threads: 0}", "threads"),
        ("{optimizer: true, update: eager}", "sequential"),
        ("{activations: all, threads: 1}", "optimizer: true"),
        ("{update: sequential}", "optimizer: true"),
    ],
)
def test_an_update_on_the_host_that_cannot_be(offload: str, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        simulate(scenario(f"training.offload={offload}"))


def test_a_partly_offloaded_optimizer_updates_on_both_sides() -> None:
    """Half of the optimizer stays on the GPU, and the host has half as much to do."""
    half_offloaded = simulate(scenario("training.offload.optimizer=50 %"))
    count = parameter_count(half_offloaded.scenario.model) / 4 / UNITS
    update = 30 * count / (50e9 * 0.4)
    names = [name for name, _, _ in stream_spans(half_offloaded, Stream.HOST)]
    assert names == ["optimizer on the host"] * UNITS
    assert [end - start for _, start, end in stream_spans(half_offloaded, Stream.HOST)] == pytest.approx(
        [update] * UNITS
    )
    not_offloaded = simulate(scenario()).breakdown.rank_seconds(0)["optimizer"]
    fully_offloaded = simulate(scenario("training.offload.optimizer=true")).breakdown.rank_seconds(0)["optimizer"]
    assert half_offloaded.breakdown.rank_seconds(0)["optimizer"] == pytest.approx(
        (not_offloaded + fully_offloaded) / 2, rel=0.02
    )  # but for its launch


def test_copies_that_are_the_bottleneck_run_back_to_back() -> None:
    """All layers are copied out one after the other, then back in; kernels hide behind the copies.

    The first copy back needs the data of the last copy out.
    """
    result = simulate(scenario("training.offload.activations=all"))
    d2h, h2d = stream_spans(result, Stream.D2H), stream_spans(result, Stream.H2D)
    assert len(d2h) == len(h2d) == LAYERS
    tasks = result.program.programs[0].tasks
    (saved_bytes,) = {task.comm_op.payload for task in tasks if isinstance(task, CollectiveTask)
               and isinstance(task.comm_op, HostOp) and task.comm_op.kind is HostOpKind.D2H}  # fmt: skip
    assert d2h[-1][2] - d2h[0][1] == pytest.approx(LAYERS * (0.5 + saved_bytes / 20e9))
    assert h2d[0][1] == d2h[-1][2]
    assert h2d[-1][2] - h2d[0][1] == pytest.approx(LAYERS * (0.5 + saved_bytes / 10e9))


def test_fetches_run_prefetch_layers_ahead() -> None:
    """With fast copies, the fetch of a layer starts with the backward that is `prefetch` layers before it.

    Gradient buckets split each layer's backward into several tasks, all of which read its activations.
    """
    fast_host = replace(HOST_MEMORY, bandwidth=1e15, device_to_host=1e15, host_to_device=1e15, latency=0.0)
    for prefetch in (1, 2):
        result = simulate(scenario(f"training.offload.activations.prefetch={prefetch}", host=fast_host))
        trace, tasks = result.trace, result.program.programs[0].tasks
        backward_events = [
            event for event in trace.rank_events(0, Stream.COMPUTE).tolist()
            if any(operation.is_last_use for operation in segment_of_task(tasks[int(trace.task[event])]).operations)
        ]  # fmt: skip
        fetch_starts = [start for _, start, _ in stream_spans(result, Stream.H2D)]
        backward_ends = trace.end[backward_events]
        for layer in range(prefetch + 1, LAYERS):
            assert fetch_starts[layer] == pytest.approx(float(backward_ends[layer - prefetch - 1]))


def test_offloaded_fsdp_copies_shards_in_and_gradients_out() -> None:
    """FSDP gathers each unit forward and again backward, but for the head; a rank's shard is half of 4 bytes each."""
    result = simulate(scenario("layout.data=fsdp", "training.offload.parameters=true", "training.global_batch=4"))
    model, program = result.scenario.model, result.program.programs[0]
    bytes_by_op = dict.fromkeys(HostOpKind, 0.0)
    for task in program.tasks:
        if isinstance(task, CollectiveTask) and isinstance(task.comm_op, HostOp):
            bytes_by_op[task.comm_op.kind] += task.comm_op.payload
    count, head = parameter_count(model), 128256 * 4096 + 4096
    assert bytes_by_op[HostOpKind.H2D] == pytest.approx(2 * (2 * count - head) * 4 / 2)
    assert bytes_by_op[HostOpKind.D2H] == pytest.approx(2 * count * 4 / 2)
    assert bytes_by_op[HostOpKind.ON_HOST] == pytest.approx((4 + 30) * count / 2)  # the norm reads gradients once more
    assert result.breakdown.rank_seconds(0)["optimizer"] == 0.0


@pytest.mark.parametrize(("framework", "clipping_bytes"), [("ideal", 0), ("pytorch", 2 * 4)])
@pytest.mark.parametrize(("layout", "ranks"), [("{dp: 1}", 1), ("{dp: 2, data: zero2}", 2), ("{dp: 2, data: fsdp}", 2)])
def test_gradient_offload_copies_gradients_out_and_weights_in(
    layout: str, ranks: int, framework: str, clipping_bytes: float
) -> None:
    """Two microbatches of each rank; ranks that reduce gradients send their part of them.

    PyTorch's clip_grad_norm_ scales gradients whatever their norm: one more read and write of 4 bytes each.
    """
    overrides = [f"layout={layout}", f"cluster.gpus={ranks}", f"training.global_batch={2 * ranks}"]
    offload = "training.offload={optimizer: true, gradients: true}"
    result = simulate(scenario(*overrides, offload, f"framework={framework}"))
    count, bytes_by_op = parameter_count(result.scenario.model) / ranks, dict.fromkeys(HostOpKind, 0.0)
    for task in result.program.programs[0].tasks:
        if isinstance(task, CollectiveTask) and isinstance(task.comm_op, HostOp):
            bytes_by_op[task.comm_op.kind] += task.comm_op.payload
    assert bytes_by_op[HostOpKind.D2H] == pytest.approx(2 * 4 * count)
    assert bytes_by_op[HostOpKind.ON_HOST] == pytest.approx((4 + clipping_bytes + 30) * count)
    assert bytes_by_op[HostOpKind.H2D] == pytest.approx(2 * count)
    first_span = stream_spans(result, Stream.D2H)[0]
    assert first_span[0] == "offload gradients"
    assert first_span[1] < result.step_time / 2  # long before the last backward is done


def test_the_heatmap_sums_to_the_time_breakdown() -> None:
    for overrides in (["training.offload={activations: all, optimizer: true}"],
                      ["layout.data=fsdp", "training.offload={activations: 3, parameters: true}"]):  # fmt: skip
        result = simulate(scenario(*overrides))
        shares = category_seconds(
            result.trace_table, result.cost.time_segment, bin_count=50, makespan=result.trace.makespan
        )
        rank_categories = result.breakdown.rank_seconds(0)
        for category, share in zip(TIME_CATEGORIES, shares, strict=True):
            assert share[0].sum() == pytest.approx(rank_categories[category.value], rel=1e-9, abs=1e-9)
        assert rank_categories[TimeCategory.EXPOSED_HOST.value] > 0.5 * result.step_time


def test_the_next_step_waits_for_the_updated_weights() -> None:
    """All steps take as long as the first one: nothing of an update overlaps the next step."""
    one_step = simulate(scenario("training.offload.optimizer=true"))
    three_steps = simulate(scenario("training.offload.optimizer=true", "steps=3"))
    assert three_steps.step_times.tolist() == pytest.approx([one_step.step_time] * 3)
