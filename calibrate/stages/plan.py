"""What will a calibration session do, and how long will it take?

Each stage gets its share of the budget, by its minutes of twenty. Stages that are unavailable here or already
done are listed with the reason, and their time goes to the kernels, if any are to be measured. A stage may
end before its time is up; time for building and compiling comes on top.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from calibrate.stages.burn_in_stage import BurnInStage
from calibrate.stages.holdout_stage import HoldoutStage
from calibrate.stages.host_stage import HostStage
from calibrate.stages.in_situ_stage import InSituStage
from calibrate.stages.kernel_stage import KernelStage
from calibrate.stages.stage import CalibrationContext, CalibrationStage
from clustersim.common.errors import InputError
from clustersim.common.units import Seconds, format_seconds

_MEASURING_STAGES: Final[tuple[CalibrationStage, ...]] = (KernelStage(), InSituStage(), HostStage(), HoldoutStage())
STAGES: Final[tuple[CalibrationStage, ...]] = (BurnInStage(dependent_stages=_MEASURING_STAGES), *_MEASURING_STAGES)
"""In order: each relies on the results of those before it."""


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A stage with its time and description; seconds: 0 where it does not run, and the description says why."""

    stage: CalibrationStage
    seconds: Seconds
    description: str


def plan_session(context: CalibrationContext, budget: Seconds) -> list[PlannedStage]:
    """The stages of a session with their times; raise InputError where the budget is too small for a stage."""
    reasons = {
        stage.name: stage.unavailable_reason(context) or "there already" * (not stage.has_work(context))
        for stage in STAGES
    }
    total_minutes = sum(stage.minutes for stage in STAGES)
    shares = {stage.name: 0.0 if reasons[stage.name] else stage.minutes / total_minutes for stage in STAGES}
    if shares[KernelStage.name]:
        shares[KernelStage.name] += 1.0 - sum(shares.values())
    _check_budget(budget, shares)
    return [
        PlannedStage(stage, budget * shares[stage.name], reasons[stage.name] or stage.describe(context))
        for stage in STAGES
    ]


def _check_budget(budget: Seconds, shares: dict[str, float]) -> None:
    for stage in STAGES:
        share = shares[stage.name]
        if share and budget * share < stage.min_seconds:
            min_budget = -(-stage.min_seconds // share)
            raise InputError(
                f"--budget: {format_seconds(budget)} is too little: {stage.name} takes {share:.0%} of it, and at least "
                f"{format_seconds(stage.min_seconds)}; give {min_budget:.0f}s or more"
            )


def format_plan(context: CalibrationContext, plan: Sequence[PlannedStage]) -> str:
    """The plan as text."""
    return "\n".join(_plan_lines(context, plan))


def _plan_lines(context: CalibrationContext, plan: Sequence[PlannedStage]) -> Iterator[str]:
    total_seconds, device, path = (
        sum(planned_stage.seconds for planned_stage in plan),
        context.current_record.device,
        context.session.path,
    )
    if not total_seconds:
        yield f"{path} has all that was asked for of {device.name} ({device.accelerator})"
        return
    action = "continues" if path.exists() else "writes"
    yield (
        f"measures {device.name} ({device.accelerator}) for about {format_seconds(total_seconds)}, and {action} {path}:"
    )
    for planned_stage in plan:
        time = format_seconds(round(planned_stage.seconds)) if planned_stage.seconds else "-"
        yield f"  {planned_stage.stage.name:<9} {time:>12}  {planned_stage.description}"
    yield "  what is done is kept: interrupted (Ctrl-C), the same command continues with the rest"
