"""MoE overlap: passes split at their dispatches, deferred weight gradients, and two interleaved passes."""

from dataclasses import replace

import pytest

from clustersim.lowering.moe_overlap import defer_weight_gradients, split_overlap_phases
from clustersim.lowering.task_list import TaskList
from clustersim.lowering.units import UnitBuilder
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.program.task import CollectiveTask, CommOp, ComputeTask, Operation, Segment, Stream
from clustersim.schedules.one_f_one_b import OneFOneB
from clustersim.schedules.overlapped_1f1b import Overlapped1F1B
from tests.lowering.plans import lower_plan
from tests.lowering.test_moe import MOE_MODEL, TRAINING

OVERLAPPED = Layout(dp=8, ep=8, overlap_moe_expert_parallel_comm=True)
EMPTY_SEGMENT = Segment("", ())


def overlapped_plan(**changes: object) -> Plan:
    return Plan(MOE_MODEL, replace(TRAINING, global_batch=24, gradient_clipping=False), replace(OVERLAPPED, **changes))


def test_overlap_segments_end_at_their_dispatches() -> None:
    """Each MoE layer's forward dispatches and combines, so a stage of three has six segments and a remainder."""
    moe_plan = overlapped_plan()
    (stage,) = moe_plan.stages
    stage_units = UnitBuilder(moe_plan).stage_units(stage)
    forward = [operation for unit in stage_units for operation in unit.forward]
    overlap_segments = [*split_overlap_phases(forward)]
    assert [item for overlap_segment in overlap_segments for item in overlap_segment.compute] == [
        element for element in forward if element.moe_comm is None
    ]
    assert [comm_op for overlap_segment in overlap_segments for comm_op in overlap_segment.comm_ops] == [
        entry.moe_comm for entry in forward if entry.moe_comm is not None
    ]
    assert len([overlap_segment for overlap_segment in overlap_segments if overlap_segment.comm_ops]) == 2 * 3
    assert not any(overlap_segment.deferred_wgrad for overlap_segment in overlap_segments)


def test_deferred_weight_gradients_do_the_same_work() -> None:
    moe_plan = overlapped_plan()
    (stage,) = moe_plan.stages
    units = UnitBuilder(moe_plan).stage_units(stage)
    deferred = defer_weight_gradients(units)
    halves = [input_gradient for unit in units for input_gradient in (*unit.input_gradients, *unit.weight_gradients)]
    assert sorted(repr(replace(operation, deferred_wgrad=False)) for operation in deferred) == sorted(map(repr, halves))
    assert sum(item.gradient_count for item in deferred) == sum(
        element.gradient_count for unit in units for element in unit.backward
    )


def test_expert_weight_gradients_overlap_the_combine() -> None:
    moe_plan = overlapped_plan()
    (stage,) = moe_plan.stages
    sending_segments = [
        overlap_segment
        for overlap_segment in split_overlap_phases(defer_weight_gradients(UnitBuilder(moe_plan).stage_units(stage)))
        if overlap_segment.comm_ops
    ]
    deferred_names = [
        {
            operation.kernel.name.split(".")[0]
            for operation in overlap_segment.deferred_wgrad
            if operation.kernel is not None
        }
        for overlap_segment in sending_segments
    ]
    assert [overlap_segment.comm_ops[0].name for overlap_segment in sending_segments] == [
        "dispatch tokens",
        "combine tokens",
    ] * 3
    assert all("experts" in names for names in deferred_names[1::2])
    assert all(names and "experts" not in names for names in deferred_names[::2])


@pytest.mark.parametrize("delayed", [False, True])
def test_a_backward_and_a_forward_are_interleaved(delayed: bool) -> None:
    """Between two turns of one pass there is one of the other while both have some; the backward is first."""
    (program,) = lower_plan(overlapped_plan(delay_wgrad_compute=delayed), Overlapped1F1B(OneFOneB())).programs
    tasks = [(task, stream) for task, stream in zip(program.tasks, program.streams, strict=True)]
    actions = [task.action for task, _ in tasks if isinstance(task, ComputeTask) and task.action is not None]
    pair_actions = [str(action) for action in actions if str(action) in ("0F1", "0B0")]
    turns = [
        pair_action
        for index, pair_action in enumerate(pair_actions)
        if index == 0 or pair_actions[index - 1] != pair_action
    ]
    assert turns == ["0B0", "0F1"] * 7
    assert sum(stream is Stream.EP for _, stream in tasks) > 0
    assert all(max(task.depends_on, default=-1) < task_id for task_id, (task, _) in enumerate(tasks))


def test_dependencies_are_issued_before_their_task() -> None:
    """The second list's first task waits for the last of the first list, so nothing is left to interleave."""
    tasks = TaskList()
    first_ids = [tasks.add(Stream.COMPUTE, ComputeTask(EMPTY_SEGMENT)) for _ in range(3)]
    second_start = len(tasks)
    tasks.add(Stream.COMPUTE, ComputeTask(EMPTY_SEGMENT, (first_ids[-1],)))
    tasks.add(Stream.DP, CollectiveTask(CommOp("", None, "", 0.0), (second_start,)))  # type: ignore[arg-type]
    tasks.interleave(first_ids[0], second_start)
    last_id = tasks.add(Stream.COMPUTE, ComputeTask(EMPTY_SEGMENT, (second_start,)))
    program = tasks.build()
    assert [task.depends_on for task in program.tasks] == [(), (), (), (2,), (3,), (3,)]
    assert last_id == 5
    assert isinstance(program.tasks[4], CollectiveTask)


def test_interleaving_alternates_and_keeps_the_order() -> None:
    tasks = TaskList()
    segments = [Segment(name, ()) for name in ("f0", "f1", "b0", "b1", "b2")]
    for index, segment in enumerate(segments):
        tasks.add(Stream.COMPUTE, ComputeTask(segment))
        if index != 1:
            tasks.mark_switch_point()
    tasks.interleave(0, 2)
    assert [task.segment.name for task in tasks.build().tasks if isinstance(task, ComputeTask)] == [
        "b0", "f0", "b1", "f1", "b2",
    ]  # fmt: skip


def test_moe_communication_is_dispatch_and_combine_only() -> None:
    moe_plan = overlapped_plan()
    (stage,) = moe_plan.stages
    moe_operations = [
        operation
        for unit in UnitBuilder(moe_plan).stage_units(stage)
        for operation in unit.forward
        if operation.moe_comm is not None
    ]
    assert {moe_operation.moe_comm.name for moe_operation in moe_operations if moe_operation.moe_comm is not None} == {
        "dispatch tokens", "dispatch probabilities", "combine tokens",
    }  # fmt: skip
    assert all(isinstance(item, Operation) for item in moe_operations)
