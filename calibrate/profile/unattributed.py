"""How long does a profiled step do what no operator of the plan does?

Once for each forward pass and once for each step: the calls that ran no operator, and the time for which the GPU
waited for its host beyond what the host model has. A trace that this program wrote has a drawn host, and waiting as
the host model has it.
"""

from collections.abc import Sequence
from typing import Final

from calibrate.profile.plan_kernels import PassKind, PlanPass
from calibrate.profile.samples import MatchedSteps
from calibrate.profile.step_calls import StepCalls
from clustersim.build import PreparedSimulation
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import KernelSample, TimeStatistics
from clustersim.model.kernels import Kernel
from clustersim.model.unattributed import PASS_OVERHEAD, STEP_OVERHEAD
from clustersim.program.action import ActionKind
from clustersim.program.task import ComputeTask
from clustersim.results.profiled_step import ProfiledStep

_LEAST: Final = 1e-9  # seconds: traces have no finer times
_PASSES: Final = (PassKind.FORWARD, PassKind.BACKWARD)


def unattributed_samples(
    matched: MatchedSteps, plan: Sequence[PlanPass], waiting: dict[PassKind, Seconds]
) -> tuple[KernelSample, ...]:
    """Samples of both kernels of `model.unattributed`. waiting: for the host, beyond the host model's, in a step."""
    passes = sum(1 for entry in plan if entry.kind is PassKind.FORWARD and entry.kernels)
    seconds = dict(waiting)
    for kind, call in matched.unmatched:
        seconds[kind] += call.seconds / matched.steps
    work: dict[Kernel, Seconds] = {
        PASS_OVERHEAD: sum(seconds[kind] for kind in _PASSES) / max(1, passes),
        STEP_OVERHEAD: seconds[PassKind.OPTIMIZER],
    }
    return tuple(
        KernelSample.of_kernel(kernel, TimeStatistics(value, value, value, 1))
        for kernel, value in work.items()
        if value > _LEAST
    )


def excess_waiting(
    matched: MatchedSteps, prepared: PreparedSimulation, step: ProfiledStep, steps: Sequence[StepCalls]
) -> dict[PassKind, Seconds]:
    """Seconds for which the GPU waits for the host in the representative step beyond what the host model has.

    Of passes where the trace tells them apart, else all of the step.
    """
    modelled = _modelled_stalls(prepared, step.ranks[0].rank)
    measured = {kind: seconds / max(1, matched.representative_steps) for kind, seconds in matched.stall.items()}
    measured[PassKind.OPTIMIZER] += _gap_between_steps(step, steps)
    if not any(entry.has_nodes for entry in steps):
        total = max(0.0, sum(measured.values()) - sum(modelled.values()))
        return dict.fromkeys(PassKind, 0.0) | {PassKind.OPTIMIZER: total}
    in_passes = max(0.0, sum(measured[kind] - modelled[kind] for kind in _PASSES))
    in_step = max(0.0, measured[PassKind.OPTIMIZER] - modelled[PassKind.OPTIMIZER])
    return {PassKind.FORWARD: in_passes, PassKind.BACKWARD: 0.0, PassKind.OPTIMIZER: in_step}


def _gap_between_steps(step: ProfiledStep, steps: Sequence[StepCalls]) -> Seconds:
    """Seconds from the last call of a step to the first of the next; of a single rank, which waits for no other."""
    used = next((entry for entry in steps if entry.number == step.step_number), None)
    if used is None or len(step.ranks) > 1 or not used.calls:
        return 0.0
    return max(0.0, step.step_time - (used.calls[-1].end - used.calls[0].start))


def _modelled_stalls(prepared: PreparedSimulation, rank: int) -> dict[PassKind, Seconds]:
    """Seconds for which the modelled GPU waits for its host, by the kind of pass."""
    program = prepared.program
    seconds = dict.fromkeys(PassKind, 0.0)
    for task in program.programs[int(program.program_index[rank])].tasks:
        if isinstance(task, ComputeTask):
            timing = prepared.cost.time_segment(rank, task.segment)
            kind = PassKind.OPTIMIZER
            if task.action is not None:
                kind = PassKind.FORWARD if task.action.kind is ActionKind.FORWARD else PassKind.BACKWARD
            seconds[kind] += float(timing.launch_stalls.sum())
    return seconds
