"""What do a plan's passes take and keep, for a schedule that orders them by it?

As the zero-bubble schedules' authors do (Qi et al. 2023, arXiv:2401.10241, section 3.1), all stages count as equal: the
costs are those of all stages together. Kernels count as they take alone; what a pass communicates does not.
"""

from dataclasses import replace

from clustersim.common.units import Seconds
from clustersim.cost.timing import KernelCost
from clustersim.lowering.units import UnitBuilder
from clustersim.memory.activations import Activations
from clustersim.parallel.plan import Plan
from clustersim.program.action import ActionKind
from clustersim.schedules.schedule import Schedule
from clustersim.schedules.zero_bubble import PassCosts, ZeroBubble


def with_pass_costs(schedule: Schedule, plan: Plan, kernels: KernelCost) -> Schedule:
    """The schedule with the costs of a plan's passes, if its order depends on them."""
    return replace(schedule, costs=pass_costs(plan, kernels)) if isinstance(schedule, ZeroBubble) else schedule


def pass_costs(plan: Plan, kernels: KernelCost) -> PassCosts:
    """Seconds of each pass through all stages, and the part of activations that waits for weight gradients."""
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
    return sum(kernels.time_kernel(item.kernel).seconds for item in operations if item.kernel is not None)
