"""What a pipeline rank holds, in few words."""

from clustersim.memory.activations import Activations
from clustersim.memory.footprint import Category, Footprint
from clustersim.memory.ledger import Ledger, in_turns, ordered_ledger
from clustersim.model.framework import Framework
from clustersim.parallel.plan import Plan
from clustersim.schedules.schedule import Schedule
from tests.strategies import usual

BARE = Framework(fragmentation=1.0, communicator=0.0)
"""A framework that holds nothing beside tensors."""


def resident(plan: Plan, rank: int = 0, framework: Framework = BARE) -> dict[Category, float]:
    return Footprint(plan, framework, context=0.0).resident(rank)


def ledger_of(plan: Plan, rank: int = 0, order: Schedule | None = None, framework: Framework = BARE) -> Ledger:
    """Of a rank that works through the plan's usual order, one pass after the other."""
    chosen = order or usual(plan.placement.max_chunks)
    actions = chosen.order(plan.layout.pp, plan.microbatches)[rank]
    return ordered_ledger(Footprint(plan, framework, 0.0), Activations(plan), rank, in_turns(actions))
