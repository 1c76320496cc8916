"""Launches as tasks: the step ends as if the host went from launch to launch, ahead of the device, until it waits."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.dtypes import DType
from clustersim.cost.device_models import DeviceModel, DeviceModels
from clustersim.cost.host_launch import AsyncHost
from clustersim.cost.launch_tasks import LaunchCost
from clustersim.cost.segment import SegmentCost
from clustersim.engine.engine import simulate_program
from clustersim.lowering.host_launches import add_host_launches
from clustersim.model.kernels import Kernel, KernelKind
from clustersim.program.action import FORWARD, Action
from clustersim.program.program import Program
from clustersim.program.task import CollectiveTask, ComputeTask, LaunchOp, Operation, Segment, Stream, Task, WorkType
from clustersim.symmetry.refinement import singleton_classes
from tests.conftest import examples
from tests.engine.fake_costs import UnitCost
from tests.engine.small_programs import StreamTask, make_comm_op, make_program

HOST = AsyncHost(forward_seconds=1.0, backward_seconds=2.0)
KernelCase = tuple[int, float, WorkType, bool]
"""A kernel's launches, seconds and pass, and whether the host waits for its result."""
KERNELS = st.tuples(
    st.integers(1, 3),
    st.sampled_from([0.0, 0.5, 1.0, 3.0, 8.0]),
    st.sampled_from([WorkType.FORWARD, WorkType.BACKWARD]),
    st.sampled_from([False, False, True]),
)


def interleaved(*kernels: KernelCase) -> Segment:
    operations = (
        Operation(
            Kernel("k", KernelKind.COPY, DType.BF16, flops=seconds, bytes=0.0, launches=launches, host_sync=host_sync),
            work_type,
        )
        for launches, seconds, work_type, host_sync in kernels
    )
    return Segment("phase", tuple(operations), interleaved=True)


def phase(launches: int, seconds: float) -> StreamTask:
    """A phase of one kernel."""
    return compute_task(interleaved((launches, seconds, WorkType.FORWARD, False)))


def compute_task(segment: Segment, depends_on: tuple[int, ...] = ()) -> StreamTask:
    return Stream.COMPUTE, ComputeTask(segment, depends_on, Action(0, FORWARD, 0))


def collective(seconds: float, depends_on: tuple[int, ...], *, host_sync: bool = False) -> StreamTask:
    task: Task = CollectiveTask(replace(make_comm_op("ep", seconds), host_sync=host_sync), depends_on)
    return Stream.EP, task


def with_launches(tasks: Sequence[StreamTask]) -> Program:
    return add_host_launches(make_program([tasks], {"ep": [[0]]}))


def spans(program: Program, host: AsyncHost = HOST) -> list[tuple[Task, float, float]]:
    """(task, start, end) of all tasks but launches, in order of their ids."""
    unit = UnitCost(program)
    devices = DeviceModels.uniform(DeviceModel(unit, host=host), 1)
    cost = SegmentCost(program, devices, LaunchCost(unit, devices))  # type: ignore[arg-type]
    trace, _ = simulate_program(program, singleton_classes(program), cost)
    tasks = program.programs[0].tasks
    ends = sorted(zip(trace.task.tolist(), trace.start.tolist(), trace.end.tolist(), strict=True))
    return [
        (tasks[task], start, end)
        for task, start, end in ends
        if not isinstance(getattr(tasks[task], "comm_op", None), LaunchOp)
    ]


def stepwise_end(phases: Sequence[Sequence[KernelCase]]) -> float:
    """When the device is done: the host launches one after the other, and waits for the device where it must."""
    host = device = 0.0
    for kernels in phases:
        for index, (launches, seconds, work_type, host_sync) in enumerate(kernels):
            for _ in range(launches):
                host += HOST.backward_seconds if work_type is WorkType.BACKWARD else HOST.forward_seconds
                device = max(device, host) + seconds / launches
            if host_sync and index + 1 < len(kernels):
                host = max(host, device)
    return device


@given(st.lists(st.lists(KERNELS, min_size=1, max_size=4), min_size=1, max_size=6))
@examples(60)
def test_phases_end_as_from_launch_to_launch(phases: list[list[KernelCase]]) -> None:
    program = with_launches([compute_task(interleaved(*kernels)) for kernels in phases])
    assert spans(program)[-1][2] == pytest.approx(stepwise_end(phases))


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0.5, 1.0, 4.0])), min_size=1, max_size=8))
@examples(40)
def test_without_waiting_the_longer_of_launches_and_kernels_counts(phases: list[tuple[int, float]]) -> None:
    """At least all launches and the last kernel, or the first launch and all kernels; at most both in sequence."""
    end = spans(with_launches([phase(*case) for case in phases]))[-1][2]
    launches, seconds = (sum(column) for column in zip(*phases, strict=True))
    last_launches, last_seconds = phases[-1]
    assert end >= max(launches + last_seconds / last_launches, 1.0 + seconds) - 1e-9
    assert end <= launches + seconds + 1e-9


def test_a_lead_is_carried_over_to_the_next_phase() -> None:
    """The example of `host_launches`: 1 s of kernels in 2 launches, 4 s in one; each two phases take 5 s, not 6."""
    ends = [end for _, _, end in spans(with_launches([phase(2, 1.0), phase(1, 4.0)] * 4))]
    assert np.diff(ends[1::2]).tolist() == [5.0] * 3


def test_a_free_host_changes_nothing() -> None:
    tasks = [phase(3, 1.0), collective(2.0, (0,), host_sync=True), phase(2, 4.0), compute_task(interleaved(), (1,))]
    program = make_program([tasks], {"ep": [[0]]})
    times = [sorted(span[1:] for span in spans(ran, AsyncHost())) for ran in (program, add_host_launches(program))]
    assert times[0] == times[1]


def test_graphs_of_everything_are_launched_at_once() -> None:
    """Ten launches of 1 s for each 1 s of kernels vanish, except the first graph's 0.25 s."""
    graph = replace(HOST, graph_seconds=0.25)
    assert spans(with_launches([phase(10, 1.0)] * 5), graph)[-1][2] == 5.25


def test_the_host_waits_for_token_counts_behind_the_next_computation() -> None:
    """By hand: kernels run from 1 to 5 and from 5 to 13, launched by 2; the dispatch is launched from 5 to 6.

    Without waiting it is launched by 2, before the next kernel, and begins when its tokens are there.
    """
    for host_sync, start in ((True, 6.0), (False, 5.0)):
        tasks = [phase(1, 4.0), collective(2.0, (0,), host_sync=host_sync), phase(1, 8.0)]
        (dispatch,) = (span for span in spans(with_launches(tasks)) if isinstance(span[0], CollectiveTask))
        assert dispatch[1:] == (start, start + 2.0)


def test_other_segments_wait_for_all_launches_and_the_host_for_them() -> None:
    """By hand: the last of 4 parts of a kernel of 1 s is launched at 4; the next but one is launched from 6.25 on."""
    plain = Stream.COMPUTE, ComputeTask(replace(interleaved((1, 2.0, WorkType.FORWARD, False)), interleaved=False))
    times = [span[1:] for span in spans(with_launches([phase(4, 1.0), plain, phase(1, 1.0)]))]
    assert times == [(3.25, 4.25), (4.25, 6.25), (7.25, 8.25)]
