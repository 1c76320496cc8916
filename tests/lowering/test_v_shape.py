"""A schedule from outside whose stages lie in a V: nothing but its placement says so.

Stages 0 to 2p - 1 go down ranks 0 to p - 1 and come back, so rank 0 holds the embedding and the head. All forwards run
before all backwards, chunk by chunk.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from clustersim.lowering.step import lower
from clustersim.parallel.data import Replicated, Zero1
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.program.action import Action, ActionKind, Order
from clustersim.program.placement import Placement
from clustersim.program.task import Communicate, Compute, Receive, Send
from clustersim.schedules.rules import dry_run, verify
from tests.closed_form.fixed import Fixed, Step

from .plans import SMALL, TRAINING

MICROBATCHES = 4


@dataclass(frozen=True)
class There:
    """All microbatches forward through the first chunk and the second, then backward the other way."""

    name: ClassVar[str] = "v"
    chunks: ClassVar[int] = 2

    def placement(self, ranks: int) -> Placement:
        return Placement((*range(ranks), *reversed(range(ranks))))

    def order(self, ranks: int, microbatches: int) -> Order:
        return tuple(
            tuple(
                Action(stage, kind, microbatch)
                for kind, stages in ((ActionKind.FORWARD, (first, last)), (ActionKind.BACKWARD, (last, first)))
                for stage in stages
                for microbatch in range(microbatches)
            )
            for first, last in map(self.placement(ranks).stages_of, range(ranks))
        )


def plan(pp: int, **layout: object) -> Plan:
    spread = Layout(pp=pp, **layout)
    training = replace(TRAINING, global_batch=MICROBATCHES * spread.dp, gradient_clipping=False)
    return Plan(replace(SMALL, tied_embeddings=True), training, spread, There().placement)


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_the_order_is_legal_on_its_placement_and_on_no_loop(pp: int) -> None:
    order = There().order(pp, MICROBATCHES)
    verify(order, placement=There().placement(pp), microbatches=MICROBATCHES)


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_every_message_that_is_sent_is_received_by_the_rank_that_its_group_says(pp: int) -> None:
    of = plan(pp)
    program = lower(of, There().order(pp, MICROBATCHES))
    sent, received = set(), set()
    for rank, each in enumerate(program.programs):
        for task in each.tasks:
            if isinstance(task, Send):
                rows = dict(program.groups[task.exchange.group].members.tolist())
                sent.add((rows[rank], task.exchange, task.tag))
            if isinstance(task, Receive):
                received.add((rank, task.exchange, task.tag))
    assert sent == received
    hand_offs = 2 * (2 * pp - 1) - 2  # all neighbours in both directions, but for those at the turning point
    assert len(sent) == hand_offs * MICROBATCHES
    assert all(rank == of.placement.ranks[tag.stage] for rank, _, tag in received)


@pytest.mark.parametrize("pp", [2, 3])
def test_the_rank_with_embedding_and_head_holds_the_tied_matrix_once_and_sums_nothing(pp: int) -> None:
    of = plan(pp)
    last = of.stages[-1]
    assert of.placement.ranks[0] == of.placement.ranks[-1] == 0
    assert of.head_of(last).parameters == 2 * 64  # the final norm alone
    program = lower(of, There().order(pp, MICROBATCHES))
    assert "embedding" not in program.groups
    assert not any(isinstance(task, Communicate) for each in program.programs for task in each.tasks)
    held = sum(of.parameters(stage) for rank in range(pp) for stage in of.stages_of(rank))
    assert held == sum(map(of.parameters, of.stages))


@pytest.mark.parametrize("data", [Replicated(bucket=1e12), Zero1(bucket=1e12)])
def test_gradients_of_a_chunk_are_reduced_in_its_own_last_backward(data: object) -> None:
    of = plan(2, dp=2, data=data)
    program = lower(of, There().order(2, MICROBATCHES))
    for rank, each in enumerate(program.programs):
        done = [
            each.tasks[task.after[0]].action
            for task in each.tasks
            if isinstance(task, Communicate) and task.exchange.name == "reduce gradients"
        ]
        first, last = of.placement.stages_of(rank)
        assert done == [Action(stage, ActionKind.BACKWARD, MICROBATCHES - 1) for stage in (last, first)]


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_the_engine_takes_as_long_as_a_dry_run(pp: int) -> None:
    """Equal layers of one forward and two backward seconds each, and messages that take no time."""
    step = Step(2 * pp, Layout(pp=pp), There(), MICROBATCHES)
    fixed = Fixed(forward=1.0, backward=2.0)
    expected = dry_run(There().order(pp, MICROBATCHES)).finish
    assert step.seconds(fixed) == pytest.approx(expected)
    passes = [task for task in step.program.programs[0].tasks if isinstance(task, Compute) and task.action]
    assert len(passes) == 4 * MICROBATCHES
