"""Memory of a pipeline rank, in short helpers."""

from clustersim.memory.activations import Activations
from clustersim.memory.footprint import Footprint, MemoryCategory
from clustersim.memory.ledger import MemoryLedger, ledger_from_order, pass_order
from clustersim.model.framework import Framework
from clustersim.parallel.plan import Plan
from clustersim.schedules.schedule import Schedule
from tests.strategies import default_schedule

BARE = Framework(fragmentation=1.0, communicator_bytes=0.0)
"""A framework that allocates nothing besides tensors."""


def resident_bytes(plan: Plan, rank: int = 0, framework: Framework = BARE) -> dict[MemoryCategory, float]:
    return Footprint(plan, framework, context_bytes=0.0).resident_bytes(rank)


def rank_ledger(plan: Plan, rank: int = 0, order: Schedule | None = None, framework: Framework = BARE) -> MemoryLedger:
    """Ledger of a rank that runs the plan's usual order, one pass after the other."""
    schedule = order or default_schedule(plan.placement.max_chunks)
    actions = schedule.order(plan.layout.pp, plan.microbatches)[rank]
    return ledger_from_order(Footprint(plan, framework, 0.0), Activations(plan), rank, pass_order(actions))
