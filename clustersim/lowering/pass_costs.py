"""Costs of a plan's passes, for schedules that optimize their order (zero-bubble).

As in the zero-bubble papers (Qi et al. 2023, arXiv:2401.10241, section 3.1), all stages count as equal:
costs are the sums over all stages. Kernels count with their isolated durations; communication of a pass
does not count.
"""

from clustersim.common.units import Seconds
from clustersim.cost.timing import KernelCost
from clustersim.lowering.units import UnitBuilder
from clustersim.memory.activations import Activations
from clustersim.parallel.plan import Plan
from clustersim.program.action import ActionKind
from clustersim.schedules.schedule import PassCosts, Schedule


def with_pass_costs(schedule: Schedule, plan: Plan, kernels: KernelCost) -> Schedule:
    """The schedule with the costs of a plan's passes, if its order depends on them."""
    return schedule.with_pass_costs(pass_costs(plan, kernels)) if schedule.takes_pass_costs else schedule


def pass_costs(plan: Plan, kernels: KernelCost) -> PassCosts:
    """Seconds of each pass through all stages, and the fraction of activations that is kept for weight gradients."""
    units, activations = UnitBuilder(plan), Activations(plan)
    return PassCosts(
        forward=_pass_seconds(units, kernels, ActionKind.FORWARD),
        input_gradient=_pass_seconds(units, kernels, ActionKind.INPUT_GRADIENT),
        weight_gradient=_pass_seconds(units, kernels, ActionKind.WEIGHT_GRADIENT),
        pending_memory_ratio=sum(map(activations.wgrad_bytes, plan.stages))
        / sum(map(activations.saved_bytes, plan.stages)),
    )


def _pass_seconds(units: UnitBuilder, kernels: KernelCost, kind: ActionKind) -> Seconds:
    operations = (operation for stage in units.plan.stages for operation in units.stage_operations(stage, kind))
    return sum(
        kernels.time_kernel(operation.kernel).seconds for operation in operations if operation.kernel is not None
    )
