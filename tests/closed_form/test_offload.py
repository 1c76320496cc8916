"""How long copies and the host's optimizer take, by hand."""

from dataclasses import replace

import numpy as np
import pytest

from clustersim import Scenario, simulate
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

SECONDS = HostMemory(capacity=1e13, bandwidth=100e9, to_host=20e9, from_host=10e9, latency=0.5, optimizer_fraction=0.4)
LAYERS = 6
UNITS = LAYERS + 2
"""Embedding, layers and head: the pieces in which an optimizer on the host works."""


def scenario(*overrides: str, host: HostMemory = SECONDS) -> Scenario:
    """A small Llama on two GPUs of a node, whose kernels nothing slows and whose host launches at once."""
    given = {
        "model": {"preset": "llama3-8b", "layers": LAYERS},
        "cluster": {"name": "dgx-h100", "gpus": 2},
        "layout": {"dp": 2, "data": "zero1"},
        "training": {"sequence": 1024, "global_batch": 2},
        "cost": {"interference": 0.0},
    }
    read = Scenario.from_mapping(given, overrides)
    framework = replace(read.framework, launch_seconds=0.0, backward_launch_seconds=0.0)
    return replace(read, framework=framework, cluster=replace(read.cluster, host_memory=host))


def spans(answer: SimulationResult, stream: Stream) -> list[tuple[str, float, float]]:
    """Name, start and end of what rank 0 does on a stream, in order."""
    trace, tasks = answer.trace, answer.program.programs[0].tasks
    rows = trace.rank_events(0, stream).tolist()
    found = []
    for row in rows:
        task = tasks[int(trace.task[row])]
        assert isinstance(task, CollectiveTask)
        found.append((task.comm_op.name, float(trace.start[row]), float(trace.end[row])))
    return found


def block_of(task: Task) -> Segment:
    assert isinstance(task, ComputeTask)
    return task.segment


class _Nothing:
    """No exchanges between ranks."""

    time_comm_op = link_demand = None


@pytest.mark.parametrize(
    ("sharers", "what", "seconds"),
    [
        (1, HostOpKind.D2H, 0.5 + 100e9 / 20e9),  # the link
        (8, HostOpKind.D2H, 0.5 + 100e9 / 12.5e9),  # an eighth of the memory's bandwidth
        (8, HostOpKind.H2D, 0.5 + 100e9 / 10e9),  # the link
        (20, HostOpKind.H2D, 0.5 + 100e9 / 5e9),
        (8, HostOpKind.ON_HOST, 100e9 / (12.5e9 * 0.4)),
    ],
)
def test_gpus_share_what_the_hosts_memory_can_do(sharers: int, what: HostOpKind, seconds: float) -> None:
    cost = HostTransferCost(_Nothing(), SECONDS, np.full(3, sharers))  # type: ignore[arg-type]
    exchange = HostOp("copy", CollectiveType.SEND_RECV, HOST_GROUP.name, 100e9, what)
    assert cost.time_comm_op(exchange).seconds == pytest.approx(np.full(3, seconds))
    demand = cost.link_demand(exchange)
    assert demand.latency == pytest.approx(np.full(3, seconds))  # it loads no link of the network
    assert not demand.transfer.any()


def test_the_hosts_optimizer_is_a_pipeline_of_copies_and_updates() -> None:
    """Of equal pieces: one of each, and for every further piece the slowest of the three.

    A rank updates half of the parameters: 4 bytes of a gradient go, 2 of a weight come back, and the CPU moves 30:
    master weights and two moments in and out (24), the gradient in (4), the new weight out (2).
    """
    offloaded, here = (simulate(scenario(f"training.offload.optimizer={item}")) for item in ("true", "false"))
    count = parameter_count(offloaded.scenario.model) / 2 / UNITS
    out, back = 0.5 + 4 * count / 20e9, 0.5 + 2 * count / 10e9
    update = 30 * count / (50e9 * 0.4)
    there = out + update + back + (UNITS - 1) * max(out, update, back)
    gpu = (
        here.breakdown.rank_seconds(0)["optimizer"] - offloaded.breakdown.rank_seconds(0)["optimizer"]
    )  # the norm stays
    assert gpu > 0
    assert offloaded.step_time - here.step_time == pytest.approx(there - gpu, rel=1e-9)
    assert offloaded.breakdown.rank_seconds(0)["exposed host"] == pytest.approx(there, rel=1e-9)


def test_a_part_on_the_host_is_updated_beside_the_gpus_part() -> None:
    """Half of the optimizer stays, and the host has half as much to do."""
    half = simulate(scenario("training.offload.optimizer=50 %"))
    count = parameter_count(half.scenario.model) / 4 / UNITS
    update = 30 * count / (50e9 * 0.4)
    names = [name for name, _, _ in spans(half, Stream.HOST)]
    assert names == ["optimizer on the host"] * UNITS
    assert [end - start for _, start, end in spans(half, Stream.HOST)] == pytest.approx([update] * UNITS)
    whole = simulate(scenario()).breakdown.rank_seconds(0)["optimizer"]
    none = simulate(scenario("training.offload.optimizer=true")).breakdown.rank_seconds(0)["optimizer"]
    assert half.breakdown.rank_seconds(0)["optimizer"] == pytest.approx(
        (whole + none) / 2, rel=0.02
    )  # but for its launch


def test_copies_that_take_longest_follow_each_other_without_a_pause() -> None:
    """All layers go out one after the other, then come back one after the other; kernels hide behind them.

    The first copy back needs what the last copy out has brought there.
    """
    answer = simulate(scenario("training.offload.activations=all"))
    out, back = spans(answer, Stream.D2H), spans(answer, Stream.H2D)
    assert len(out) == len(back) == LAYERS
    size = answer.program.programs[0].tasks
    (kept,) = {task.comm_op.payload for task in size if isinstance(task, CollectiveTask)
               and isinstance(task.comm_op, HostOp) and task.comm_op.kind is HostOpKind.D2H}  # fmt: skip
    assert out[-1][2] - out[0][1] == pytest.approx(LAYERS * (0.5 + kept / 20e9))
    assert back[0][1] == out[-1][2]
    assert back[-1][2] - back[0][1] == pytest.approx(LAYERS * (0.5 + kept / 10e9))


def test_fetches_are_as_many_layers_ahead_as_there_are_buffers() -> None:
    """With fast copies, the copy back of a layer begins when the backward `prefetch` layers before it does.

    Buckets of gradients cut each layer's backward into several tasks, all of which read its activations.
    """
    fast = replace(SECONDS, bandwidth=1e15, to_host=1e15, from_host=1e15, latency=0.0)
    for prefetch in (1, 2):
        answer = simulate(scenario(f"training.offload.activations.prefetch={prefetch}", host=fast))
        trace, tasks = answer.trace, answer.program.programs[0].tasks
        backwards = [
            row for row in trace.rank_events(0, Stream.COMPUTE).tolist()
            if any(operation.is_last_use for operation in block_of(tasks[int(trace.task[row])]).operations)
        ]  # fmt: skip
        begins = [start for _, start, _ in spans(answer, Stream.H2D)]
        ends = trace.end[backwards]
        for layer in range(prefetch + 1, LAYERS):
            assert begins[layer] == pytest.approx(float(ends[layer - prefetch - 1]))


def test_shards_come_before_each_gather_and_gradients_go_after_each_reduction() -> None:
    """FSDP gathers each unit forward and again backward, but for the head; a rank's shard is half of 4 bytes each."""
    answer = simulate(scenario("layout.data=fsdp", "training.offload.parameters=true", "training.global_batch=4"))
    model, program = answer.scenario.model, answer.program.programs[0]
    moved = dict.fromkeys(HostOpKind, 0.0)
    for task in program.tasks:
        if isinstance(task, CollectiveTask) and isinstance(task.comm_op, HostOp):
            moved[task.comm_op.kind] += task.comm_op.payload
    count, head = parameter_count(model), 128256 * 4096 + 4096
    assert moved[HostOpKind.H2D] == pytest.approx(2 * (2 * count - head) * 4 / 2)
    assert moved[HostOpKind.D2H] == pytest.approx(2 * count * 4 / 2)
    assert moved[HostOpKind.ON_HOST] == pytest.approx((4 + 30) * count / 2)  # the norm reads gradients once more
    assert answer.breakdown.rank_seconds(0)["optimizer"] == 0.0


@pytest.mark.parametrize(("layout", "ranks"), [("{dp: 1}", 1), ("{dp: 2, data: zero2}", 2), ("{dp: 2, data: fsdp}", 2)])
def test_gradients_go_with_every_backward_and_only_weights_come_back(layout: str, ranks: int) -> None:
    """Two microbatches of each rank; ranks that reduce gradients send their part of them."""
    overrides = [f"layout={layout}", f"cluster.gpus={ranks}", f"training.global_batch={2 * ranks}"]
    answer = simulate(scenario(*overrides, "training.offload={optimizer: true, gradients: true}"))
    count, moved = parameter_count(answer.scenario.model) / ranks, dict.fromkeys(HostOpKind, 0.0)
    for task in answer.program.programs[0].tasks:
        if isinstance(task, CollectiveTask) and isinstance(task.comm_op, HostOp):
            moved[task.comm_op.kind] += task.comm_op.payload
    assert moved[HostOpKind.D2H] == pytest.approx(2 * 4 * count)
    assert moved[HostOpKind.ON_HOST] == pytest.approx((4 + 30) * count)
    assert moved[HostOpKind.H2D] == pytest.approx(2 * count)
    first = spans(answer, Stream.D2H)[0]
    assert first[0] == "offload gradients"
    assert first[1] < answer.step_time / 2  # long before the last backward is done


def test_what_the_heatmap_sums_to_is_the_breakdown() -> None:
    for overrides in (["training.offload={activations: all, optimizer: true}"],
                      ["layout.data=fsdp", "training.offload={activations: 3, parameters: true}"]):  # fmt: skip
        answer = simulate(scenario(*overrides))
        shares = category_seconds(
            answer.trace_table, answer.cost.time_segment, bin_count=50, makespan=answer.trace.makespan
        )
        own = answer.breakdown.rank_seconds(0)
        for part, share in zip(TIME_CATEGORIES, shares, strict=True):
            assert share[0].sum() == pytest.approx(own[part.value], rel=1e-9, abs=1e-9)
        assert own[TimeCategory.EXPOSED_HOST.value] > 0.5 * answer.step_time


def test_the_next_step_waits_for_the_weights_of_the_last() -> None:
    """Steps in a row are the first one's time apart: nothing of an update hides behind the next step."""
    one = simulate(scenario("training.offload.optimizer=true"))
    three = simulate(scenario("training.offload.optimizer=true", "steps=3"))
    assert three.step_times.tolist() == pytest.approx([one.step_time] * 3)
