"""Passes cut where tokens travel, gradients of weights that are put off, and two passes that take turns."""

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
from tests.lowering.plans import lowered
from tests.lowering.test_moe import MIXED, TRAINING

BESIDE = Layout(dp=8, ep=8, overlap_expert_communication=True)
EMPTY = Segment("", ())


def plan(**changes: object) -> Plan:
    return Plan(MIXED, replace(TRAINING, global_batch=24, gradient_clipping=False), replace(BESIDE, **changes))


def test_legs_end_where_tokens_have_left() -> None:
    """Forward each mixture sends there and back, so a stage of three has six legs and the rest."""
    of = plan()
    (stage,) = of.stages
    operations = UnitBuilder(of).stage_units(stage)
    forward = [operation for unit in operations for operation in unit.forward]
    found = [*split_overlap_phases(forward)]
    assert [item for leg in found for item in leg.compute] == [
        element for element in forward if element.moe_comm is None
    ]
    assert [comm_op for leg in found for comm_op in leg.comm_ops] == [
        entry.moe_comm for entry in forward if entry.moe_comm is not None
    ]
    assert len([leg for leg in found if leg.comm_ops]) == 2 * 3
    assert not any(leg.deferred_wgrad for leg in found)


def test_a_backward_with_weights_put_off_does_the_same_work() -> None:
    of = plan()
    (stage,) = of.stages
    units = UnitBuilder(of).stage_units(stage)
    made = defer_weight_gradients(units)
    halves = [input_gradient for unit in units for input_gradient in (*unit.input_gradients, *unit.weight_gradients)]
    assert sorted(repr(replace(operation, deferred_wgrad=False)) for operation in made) == sorted(map(repr, halves))
    assert sum(item.gradient_count for item in made) == sum(
        element.gradient_count for unit in units for element in unit.backward
    )


def test_gradients_of_experts_are_behind_the_tokens_that_leave_them() -> None:
    of = plan()
    (stage,) = of.stages
    sends = [
        leg for leg in split_overlap_phases(defer_weight_gradients(UnitBuilder(of).stage_units(stage))) if leg.comm_ops
    ]
    late = [
        {operation.kernel.name.split(".")[0] for operation in leg.deferred_wgrad if operation.kernel is not None}
        for leg in sends
    ]
    assert [leg.comm_ops[0].name for leg in sends] == ["dispatch tokens", "combine tokens"] * 3
    assert all("experts" in names for names in late[1::2])
    assert all(names and "experts" not in names for names in late[::2])


@pytest.mark.parametrize("delayed", [False, True])
def test_a_backward_and_a_forward_take_turns(delayed: bool) -> None:
    """Between two turns of one pass there is one of the other, as long as both have some; the backward's is first."""
    (program,) = lowered(plan(delay_wgrad=delayed), Overlapped1F1B(OneFOneB())).programs
    tasks = [(task, stream) for task, stream in zip(program.tasks, program.streams, strict=True)]
    pair = [task.action for task, _ in tasks if isinstance(task, ComputeTask) and task.action is not None]
    both = [str(item) for item in pair if str(item) in ("0F1", "0B0")]
    turns = [element for place, element in enumerate(both) if place == 0 or both[place - 1] != element]
    assert turns == ["0B0", "0F1"] * 7
    assert sum(stream is Stream.EP for _, stream in tasks) > 0
    assert all(max(task.depends_on, default=-1) < number for number, (task, _) in enumerate(tasks))


def test_what_a_task_waits_for_is_issued_before_it() -> None:
    """The second list's first task waits for the last of the first list: nothing is left to take turns with."""
    tasks = TaskList()
    first = [tasks.add(Stream.COMPUTE, ComputeTask(EMPTY)) for _ in range(3)]
    second = len(tasks)
    tasks.add(Stream.COMPUTE, ComputeTask(EMPTY, (first[-1],)))
    tasks.add(Stream.DP, CollectiveTask(CommOp("", None, "", 0.0), (second,)))  # type: ignore[arg-type]
    tasks.interleave(first[0], second)
    after = tasks.add(Stream.COMPUTE, ComputeTask(EMPTY, (second,)))
    program = tasks.build()
    assert [task.depends_on for task in program.tasks] == [(), (), (), (2,), (3,), (3,)]
    assert after == 5
    assert isinstance(program.tasks[4], CollectiveTask)


def test_turns_alternate_and_keep_their_order() -> None:
    tasks = TaskList()
    blocks = [Segment(name, ()) for name in ("f0", "f1", "b0", "b1", "b2")]
    for place, block in enumerate(blocks):
        tasks.add(Stream.COMPUTE, ComputeTask(block))
        if place != 1:
            tasks.mark_switch_point()
    tasks.interleave(0, 2)
    assert [task.segment.name for task in tasks.build().tasks if isinstance(task, ComputeTask)] == [
        "b0", "f0", "b1", "f1", "b2",
    ]  # fmt: skip


def test_operations_that_travel_are_exchanges_of_tokens_alone() -> None:
    of = plan()
    (stage,) = of.stages
    travelling = [
        operation
        for unit in UnitBuilder(of).stage_units(stage)
        for operation in unit.forward
        if operation.moe_comm is not None
    ]
    assert {item.moe_comm.name for item in travelling if item.moe_comm is not None} == {
        "dispatch tokens", "dispatch probabilities", "combine tokens",
    }  # fmt: skip
    assert all(isinstance(element, Operation) for element in travelling)
