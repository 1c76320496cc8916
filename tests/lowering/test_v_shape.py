"""A custom schedule whose stages are placed in a V, as only its placement defines.

Stages 0 to 2p - 1 go down ranks 0 to p - 1 and come back, so rank 0 holds the embedding and the head. All
forwards run before all backwards, chunk by chunk.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from clustersim import Scenario
from clustersim.common.errors import InputError
from clustersim.lowering.training_step import lower_step
from clustersim.parallel.data_parallel_strategy import DataParallelStrategy, DdpStrategy, FullyShard, Zero1
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.program.action import Action, ActionKind, PipelineOrder
from clustersim.program.placement import Placement, looped_placement
from clustersim.program.task import CollectiveTask, ComputeTask, ReceiveTask, SendTask
from clustersim.scenario.validation_rules.consistency import find_problems
from clustersim.schedules.validation import dry_run, validate_order
from tests.closed_form.fixed_durations import FixedDurations, Step
from tests.lowering.plans import SMALL, TRAINING

MICROBATCHES = 4


@dataclass(frozen=True)
class VSchedule:
    """All microbatches forward through the first chunk and the second, then backward in the opposite order."""

    name: ClassVar[str] = "v"

    def placement(self, ranks: int) -> Placement:
        return Placement((*range(ranks), *reversed(range(ranks))))

    def require_supported(self, ranks: int, microbatches: int) -> None:
        """Accepts any numbers."""

    def order(self, ranks: int, microbatches: int) -> PipelineOrder:
        placement = self.placement(ranks)
        return tuple(
            tuple(
                Action(stage, kind, microbatch)
                for kind, stages in ((ActionKind.FORWARD, rank_stages), (ActionKind.BACKWARD, rank_stages[::-1]))
                for stage in stages
                for microbatch in range(microbatches)
            )
            for rank_stages in map(placement.stages_on_rank, range(ranks))
        )


def v_plan(pp: int, **layout: object) -> Plan:
    layout_spec = Layout(pp=pp, **layout)
    training = replace(TRAINING, global_batch=MICROBATCHES * layout_spec.dp, gradient_clipping=False)
    return Plan(replace(SMALL, tied_embeddings=True), training, layout_spec, VSchedule().placement)


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_the_order_is_valid_only_on_its_placement(pp: int) -> None:
    order = VSchedule().order(pp, MICROBATCHES)
    validate_order(order, placement=VSchedule().placement(pp), microbatches=MICROBATCHES)
    if pp > 1:
        with pytest.raises(InputError, match="is not of this rank's stages"):
            validate_order(order, placement=looped_placement(pp, 2), microbatches=MICROBATCHES)


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_messages_are_received_by_the_rank_of_their_group(pp: int) -> None:
    pipeline_plan = v_plan(pp)
    program = lower_step(pipeline_plan, VSchedule().order(pp, MICROBATCHES))
    sent, received = set(), set()
    for rank, rank_program in enumerate(program.programs):
        for task in rank_program.tasks:
            if isinstance(task, SendTask):
                receiver_of_sender = dict(program.groups[task.comm_op.comm_group].members.tolist())
                sent.add((receiver_of_sender[rank], task.comm_op, task.tag))
            if isinstance(task, ReceiveTask):
                received.add((rank, task.comm_op, task.tag))
    assert sent == received
    message_count = 2 * (2 * pp - 1) - 2  # all adjacent stages in both directions, except at the turning point
    assert len(sent) == message_count * MICROBATCHES
    assert all(rank == pipeline_plan.placement.stage_ranks[tag.stage] for rank, _, tag in received)


@pytest.mark.parametrize("pp", [2, 3])
def test_a_rank_with_both_ends_holds_the_tied_matrix_once(pp: int) -> None:
    pipeline_plan = v_plan(pp)
    last_stage = pipeline_plan.stages[-1]
    assert pipeline_plan.placement.stage_ranks[0] == pipeline_plan.placement.stage_ranks[-1] == 0
    assert pipeline_plan.stage_head(last_stage).parameter_count == 2 * 64  # the final norm alone
    program = lower_step(pipeline_plan, VSchedule().order(pp, MICROBATCHES))
    assert "embedding" not in program.groups
    assert not any(isinstance(task, CollectiveTask) for rank_program in program.programs for task in rank_program.tasks)
    held_parameters = sum(
        pipeline_plan.parameter_count(stage) for rank in range(pp) for stage in pipeline_plan.stages_on_rank(rank)
    )
    assert held_parameters == sum(map(pipeline_plan.parameter_count, pipeline_plan.stages))


@pytest.mark.parametrize("data", [DdpStrategy(bucket=1e12), Zero1(bucket=1e12)])
def test_gradients_of_a_chunk_are_reduced_in_its_last_backward(data: object) -> None:
    pipeline_plan = v_plan(2, dp=2, data=data)
    program = lower_step(pipeline_plan, VSchedule().order(2, MICROBATCHES))
    for rank, rank_program in enumerate(program.programs):
        reducing_actions = [
            rank_program.tasks[task.depends_on[0]].action
            for task in rank_program.tasks
            if isinstance(task, CollectiveTask) and task.comm_op.name == "reduce gradients"
        ]
        first, last = pipeline_plan.placement.stages_on_rank(rank)
        assert reducing_actions == [Action(stage, ActionKind.BACKWARD, MICROBATCHES - 1) for stage in (last, first)]


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_the_engine_takes_the_dry_run_time(pp: int) -> None:
    """Equal layers of one forward and two backward seconds each, and messages that take no time."""
    step = Step(2 * pp, Layout(pp=pp), VSchedule(), MICROBATCHES)
    fixed = FixedDurations(forward=1.0, backward=2.0)
    expected = dry_run(VSchedule().order(pp, MICROBATCHES)).makespan
    assert step.step_seconds(fixed) == pytest.approx(expected)
    passes = [task for task in step.program.programs[0].tasks if isinstance(task, ComputeTask) and task.action]
    assert len(passes) == 4 * MICROBATCHES


@dataclass(frozen=True)
class SplitBackwardVSchedule(VSchedule):
    """Backward in halves: each weight gradient follows its input gradient."""

    def order(self, ranks: int, microbatches: int) -> PipelineOrder:
        halves = (ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
        return tuple(
            tuple(
                action._replace(kind=kind)
                for action in actions
                for kind in (halves if action.kind is ActionKind.BACKWARD else (action.kind,))
            )
            for actions in super().order(ranks, microbatches)
        )


@pytest.mark.parametrize("data", [DdpStrategy(), Zero1(), FullyShard()])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_the_partial_norm_is_passed_from_rank_to_rank(pp: int, data: DataParallelStrategy) -> None:
    """With clipping and split backward: rank r waits for r - 1, whatever stages they hold; nothing deadlocks."""
    step = Step(
        2 * pp,
        Layout(pp=pp, dp=2, data=data),
        SplitBackwardVSchedule(),
        MICROBATCHES,
        training={"gradient_clipping": True},
    )
    norm_messages = [
        (task.tag.stage, task.comm_op.comm_group)
        for program in step.program.programs
        for task in program.tasks
        if isinstance(task, SendTask) and task.comm_op.name == "gradient norm"
    ]
    assert norm_messages == [(rank, "pp_next") for rank in range(1, pp)]
    assert step.step_seconds(FixedDurations(forward=1.0, backward=2.0)) > 0


@dataclass(frozen=True)
class PartlySplitVSchedule(SplitBackwardVSchedule):
    """Only the first rank runs its backwards in halves."""

    def order(self, ranks: int, microbatches: int) -> PipelineOrder:
        full_orders = VSchedule().order(ranks, microbatches)
        return (SplitBackwardVSchedule().order(ranks, microbatches)[0], *full_orders[1:])


@pytest.mark.parametrize("pp", [2, 3])
def test_gradients_pass_between_full_and_split_backwards(pp: int) -> None:
    """Valid by rule 4 of `schedules.validation`; whether the norm is passed on is decided for all ranks at once."""
    order, placement = PartlySplitVSchedule().order(pp, MICROBATCHES), PartlySplitVSchedule().placement(pp)
    validate_order(order, placement=placement, microbatches=MICROBATCHES)
    step = Step(2 * pp, Layout(pp=pp), PartlySplitVSchedule(), MICROBATCHES, training={"gradient_clipping": True})
    assert step.step_seconds(FixedDurations(forward=1.0, backward=2.0)) == pytest.approx(
        dry_run(order, weight=0.0).makespan
    )


@dataclass(frozen=True)
class UnevenStagesSchedule(VSchedule):
    """Three stages on two ranks."""

    def placement(self, ranks: int) -> Placement:
        return Placement((*range(ranks), 0))


def test_stages_of_a_scenario_are_those_of_its_placement() -> None:
    """Ranks may hold different numbers of stages; layer counts for three stages are valid, those for four are not."""
    model, training = {"preset": "llama-tiny", "layers": 6}, {"sequence": 512, "global_batch": 4}
    mapping = {"model": model, "cluster": {"name": "dgx-h100", "gpus": 2}, "layout": {"pp": 2}, "training": training}
    uneven = replace(Scenario.from_mapping(mapping), schedule=UnevenStagesSchedule())
    for counts, legal in (((3, 2, 1), True), ((2, 2, 1, 1), False)):
        errors = find_problems(replace(uneven, layout=replace(uneven.layout, layers_per_stage=counts)))
        assert (not errors) == legal, errors
