"""Backward split into halves: what each half does, and what is communicated between and around them."""

from collections import Counter
from dataclasses import replace

import pytest

from clustersim.lowering.pass_costs import pass_costs, with_pass_costs
from clustersim.lowering.training_step import NORM_BYTES
from clustersim.lowering.units import UnitBuilder
from clustersim.model.training import FullRecompute, NoRecompute, Recompute, SelectiveRecompute
from clustersim.parallel.data_parallel_strategy import DataParallelStrategy, DdpStrategy, FullyShard, Zero1, Zero2
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.program.action import ActionKind
from clustersim.program.task import (
    CollectiveTask,
    CommOp,
    CommOverlap,
    ComputeTask,
    Operation,
    ReceiveTask,
    SendTask,
    WorkType,
)
from clustersim.schedules.one_f_one_b import OneFOneB
from clustersim.schedules.zero_bubble import ZeroBubble
from tests.closed_form.fixed_durations import SEQUENCE, FixedDurations
from tests.lowering.plans import TRAINING, data_parallel_task_names, lower_plan, make_plan, task_names

UNCLIPPED = replace(TRAINING, gradient_clipping=False)
INPUT_GRADIENT, WEIGHT_GRADIENT = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT
LAYOUTS = [
    Layout(pp=2),
    Layout(pp=2, tp=2),
    Layout(pp=2, tp=2, sequence_parallel=True),
    Layout(pp=2, tp=2, sequence_parallel=True, tp_comm_overlap=True),
    Layout(pp=2, cp=2),
]


def body_counts(operations: tuple[Operation, ...]) -> Counter[object]:
    """Counts of kernels and collectives, overlapping or not."""
    bodies: list[object] = []
    for operation in operations:
        bodies += (
            [operation.body.kernel, operation.body.comm_op]
            if isinstance(operation.body, CommOverlap)
            else [operation.body]
        )
    return Counter(bodies)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recompute", [NoRecompute(), SelectiveRecompute(), FullRecompute(), FullRecompute(1)])
def test_the_halves_have_the_operations_of_a_full_backward(layout: Layout, recompute: Recompute) -> None:
    plan = make_plan(layout, replace(UNCLIPPED, recompute=recompute))
    units = UnitBuilder(plan)
    for stage in plan.stages:
        for unit in units.stage_units(stage):
            assert body_counts(unit.input_gradients) + body_counts(unit.weight_gradients) == body_counts(unit.backward)
            assert not any(input_gradient.gradient_count for input_gradient in unit.input_gradients)
            assert (
                sum(weight_gradient.gradient_count for weight_gradient in unit.weight_gradients) == unit.parameter_count
            )


def test_recomputation_precedes_the_input_gradients() -> None:
    units = UnitBuilder(make_plan(Layout(pp=2), replace(UNCLIPPED, recompute=FullRecompute()))).stage_units(
        make_plan(Layout(pp=2)).stages[0]
    )
    layer = units[1]
    is_recompute = [input_gradient.work_type is WorkType.RECOMPUTE for input_gradient in layer.input_gradients]
    assert is_recompute == sorted(is_recompute, reverse=True)
    assert any(is_recompute)
    assert all(weight_gradient.work_type is WorkType.BACKWARD for weight_gradient in layer.weight_gradients)


def test_only_input_gradients_receive_and_send() -> None:
    first_rank, last_rank = lower_plan(
        make_plan(Layout(pp=2), replace(UNCLIPPED, global_batch=2)), ZeroBubble(1)
    ).programs
    assert task_names(last_rank) == [
        "receive 1F0", "F0", "I0", "send 0I0", "receive 1F1", "F1", "I1", "send 0I1", "W0", "W1", "optimizer",
    ]  # fmt: skip
    assert task_names(first_rank) == [
        "F0", "send 1F0", "F1", "send 1F1", "receive 0I0", "I0", "W0", "receive 0I1", "I1", "W1", "optimizer",
    ]  # fmt: skip
    halves = [
        task
        for task in last_rank.tasks
        if isinstance(task, ComputeTask) and task.action and task.action.kind is WEIGHT_GRADIENT
    ]
    assert not any(task.depends_on for task in halves)


def task_names_of_strategy(data: DataParallelStrategy, microbatches: int = 2) -> list[str]:
    training = replace(UNCLIPPED, global_batch=2 * microbatches)
    return data_parallel_task_names(lower_plan(make_plan(Layout(dp=2, data=data), training), ZeroBubble(1)).programs[0])


def test_gradients_are_reduced_from_the_last_weight_gradients() -> None:
    names = task_names_of_strategy(DdpStrategy(bucket=10_000.0))
    first_reduction = names.index("reduce gradients")
    assert names[first_reduction - 1] == "W1"
    assert Counter(names[:first_reduction]) == Counter(["F0", "I0", "W0", "F1", "I1", "W1"])
    assert set(names[first_reduction:]) == {"reduce gradients", "W1", "optimizer"}


def test_zero_2_reduces_weight_gradients_of_all_microbatches() -> None:
    names = task_names_of_strategy(Zero2(bucket=1e12, overlap_param_gather=True))
    preceding = [names[index - 1] for index, name in enumerate(names) if name == "reduce gradients"]
    assert preceding == ["W0", "W1"]


def test_zero_3_gathers_for_input_gradients_and_reduces_after_weight_gradients() -> None:
    """The head stays gathered from its forward; the weight-gradient half needs no parameters."""
    names = task_names_of_strategy(FullyShard(prefetch=0), microbatches=1)
    backward = names[names.index("I0") :]
    assert backward == [
        "I0", *["gather layer", "I0"] * 4, "gather embedding", "I0",
        "W0", "reduce head", *["W0", "reduce layer"] * 4, "W0", "reduce embedding", "optimizer",
    ]  # fmt: skip


def gradient_norm_ops(plan: Plan) -> list[CommOp]:
    """Sends, receives and reductions of the gradient norm."""
    programs = lower_plan(plan, ZeroBubble(1)).programs
    tasks = [
        task
        for program in programs
        for task in program.tasks
        if isinstance(task, SendTask | ReceiveTask | CollectiveTask)
    ]
    return [task.comm_op for task in tasks if task.comm_op.name == "gradient norm"]


@pytest.mark.parametrize("pp", [1, 3])
def test_the_gradient_norm_is_passed_from_stage_to_stage(pp: int) -> None:
    """P - 1 messages, each sent and received; a single stage reduces as usual."""
    norm_ops = gradient_norm_ops(make_plan(Layout(pp=pp), TRAINING))
    assert [norm_op.comm_group for norm_op in norm_ops] == ["pp_next"] * 2 * (pp - 1) or pp == 1
    assert all(comm_op.payload == NORM_BYTES for comm_op in norm_ops)
    assert ("model" in {item.comm_group for item in norm_ops}) == (pp == 1)


def test_the_norm_of_sharded_gradients_is_summed_among_replicas_first() -> None:
    data = Zero1(overlap_param_gather=True)
    program = lower_plan(make_plan(Layout(pp=2, dp=2, data=data), TRAINING), ZeroBubble(1)).programs[1]
    norm = [
        task for task in program.tasks if not isinstance(task, ComputeTask) and task.comm_op.name == "gradient norm"
    ]
    assert [(type(task), task.comm_op.comm_group) for task in norm] == [
        (CollectiveTask, "dp"),
        (ReceiveTask, "pp_next"),
    ]
    assert {program.tasks.index(task) for task in norm} == set(program.tasks[-1].depends_on)


def test_costs_are_those_of_the_kernels_of_all_stages() -> None:
    """Four layers of 1 s forward, 2 s input and 0.5 s weight gradient, in two stages."""
    plan = make_plan(Layout(pp=2), replace(UNCLIPPED, sequence=SEQUENCE))
    costs = pass_costs(plan, FixedDurations(1.0, 2.0, 0.5).fixed_cost(lower_plan(plan)))
    assert (costs.forward, costs.input_gradient, costs.weight_gradient) == (4.0, 8.0, 2.0)


def test_other_schedules_have_no_costs() -> None:
    plan = make_plan(Layout(pp=2), UNCLIPPED)
    assert with_pass_costs(OneFOneB(), plan, FixedDurations().fixed_cost(lower_plan(plan))) == OneFOneB()
