"""How long does the host need for a launch, as a profile shows it?

The launches of a pass follow each other at the pace of Python and autograd, unless the host waits: for the device,
where a result is copied back, or for room in its queue of launches. Such intervals, many times the median, count as
one median. The rest, over the launches that the plan counts in the pass, is the host time of a launch. The profiler
itself is in these times: a step that the host bounds is shown slower than it is without a profiler.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from calibrate.profile.plan_kernels import PassKind, PlanPass
from calibrate.profile.step_calls import CallPass, StepCalls
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import HostLaunchSample
from clustersim.cost.record_kinds import LaunchMode

_WAIT: Final = 10.0  # medians beyond which an interval between launches is waiting


def host_samples(plans: Sequence[tuple[PlanPass, ...]], steps: Sequence[StepCalls]) -> tuple[HostLaunchSample, ...]:
    """The eager sample of some steps; empty where the trace does not have the passes or launches."""
    seconds: dict[PassKind, list[Seconds]] = {PassKind.FORWARD: [], PassKind.BACKWARD: []}
    launches = {PassKind.FORWARD: 0, PassKind.BACKWARD: 0}
    for plan, step in zip(plans, steps, strict=True):
        for kind, durations in seconds.items():
            calls = [matched_pass for matched_pass in step.passes if matched_pass.kind is kind]
            planned = [matched_pass for matched_pass in plan if matched_pass.kind is kind and matched_pass.kernels]
            if not step.has_nodes or not calls or len(calls) != len(planned):
                return ()
            count = sum(
                kernel.kernel.launches * kernel.repeats for matched_pass in planned for kernel in matched_pass.kernels
            )
            durations.append(sum(map(_host_seconds, calls)) / count)
            launches[kind] += count
    forward, backward = (float(np.mean(seconds[kind])) for kind in (PassKind.FORWARD, PassKind.BACKWARD))
    counts = launches[PassKind.FORWARD], launches[PassKind.BACKWARD]
    return (HostLaunchSample(LaunchMode.EAGER, forward, backward, counts),) if forward > 0.0 and backward > 0.0 else ()


def compute_host_samples(
    plans: Sequence[tuple[PlanPass, ...]], steps: Sequence[StepCalls]
) -> tuple[HostLaunchSample, ...]:
    """The eager sample of steps that the host computes itself: its time between kernels, over the plan's launches."""
    seconds: dict[PassKind, list[Seconds]] = {PassKind.FORWARD: [], PassKind.BACKWARD: []}
    launches = {PassKind.FORWARD: 0, PassKind.BACKWARD: 0}
    for plan, step in zip(plans, steps, strict=True):
        for kind, durations in seconds.items():
            calls = [call for each_pass in step.passes if each_pass.kind is kind for call in each_pass.calls]
            kernels = [kernel for each_pass in plan if each_pass.kind is kind for kernel in each_pass.kernels]
            count = sum(kernel.kernel.launches * kernel.repeats for kernel in kernels)
            if not count or not calls:
                return ()
            durations.append(sum(call.stall for call in calls) / count)
            launches[kind] += count
    forward, backward = (float(np.median(seconds[kind])) for kind in (PassKind.FORWARD, PassKind.BACKWARD))
    counts = launches[PassKind.FORWARD], launches[PassKind.BACKWARD]
    return (HostLaunchSample(LaunchMode.EAGER, forward, backward, counts),)


def _host_seconds(calls: CallPass) -> Seconds:
    """Seconds in which the host launches a pass."""
    times = np.sort([call.launch_start for call in calls.calls if np.isfinite(call.launch_start)])
    intervals = np.diff(times)
    if not len(intervals):
        return 0.0
    median = float(np.median(intervals))
    return float(np.where(intervals > _WAIT * median, median, intervals).sum())
