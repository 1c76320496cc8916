"""How long do kernels take in real layers?

A training step of one microbatch is repeated, as `calibrate.check` trains: forward, backward, clipping,
optimizer. Most steps run unprofiled, so that caches, clocks and power are those of a step; some of them run
under torch's profiler.

On a CPU everything within a label counts as its kernel, including Python and autograd between operators: a
CPU cannot run ahead, and its kernel samples include that. The profiler's overhead is subtracted
(`calibrate.in_situ.profiler_overhead`), and the remaining difference between profiled and unprofiled steps is
taken as a change of the machine's speed, equal for all kernels. On a GPU the kernels' own durations count,
which do not include the host's time.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from calibrate.check.operator_labels import OperatorLabel
from calibrate.check.phase_timer import PhaseTimer
from calibrate.check.profile_attribution import DeviceTimer, seconds_by_label
from calibrate.check.step_profile import warm_events
from calibrate.check.supported import build_trainer
from calibrate.check.trainer import Trainer, TrainingBatch, random_batch, training_step
from calibrate.devices.device import TorchDevice
from calibrate.in_situ.profiler_overhead import ProfilerOverhead, measure_profiler_overhead, median_kernel_gap, profiler
from clustersim.build import build_plan
from clustersim.common.units import Seconds
from clustersim.lowering.training_step import lower_step
from clustersim.model.kernels import Kernel
from clustersim.program.task import ComputeTask
from clustersim.scenario import Scenario

WARM_UP_STEPS: Final = 2  # steps: torch allocates optimizer states in the first
PROFILED_STEPS: Final = 2  # steps under the profiler at a time
_SETTLED: Final = 0.5  # seconds of steps before these on a GPU, after which its clock is that of steps
_MOST: Final = 50
_MIN_UNPROFILED_FRACTION: Final = 0.5  # minimum fraction of a profiled step that is not profiler overhead


class KernelChain(Protocol):
    """The kernels of a step, run one after the other."""

    @property
    def kernel_counts(self) -> Mapping[Kernel, int]:
        """Kernels of one step, with the number of times that each runs."""

    def run_steps(self, seconds: Seconds) -> Seconds:
        """Run steps for about `seconds`; returns the seconds of one step."""

    def profile_steps(self, step_seconds: Seconds) -> Mapping[OperatorLabel, Seconds]:
        """Kernel seconds of one step, by label; step_seconds: of an unprofiled step."""


@dataclass(slots=True)
class RealLayers:
    """A single-rank scenario, trained on a device."""

    scenario: Scenario
    device: TorchDevice
    trainer: Trainer = field(init=False)
    batch: TrainingBatch = field(init=False)
    _profiler_overhead: ProfilerOverhead | None = field(init=False)

    def __post_init__(self) -> None:
        self.trainer = build_trainer(self.scenario, self.device.torch)
        self.batch = random_batch(build_plan(self.scenario), self.device.torch)
        self.device.host_seconds(self._run_step, WARM_UP_STEPS)
        self._profiler_overhead = None if self.device.torch.type == "cuda" else measure_profiler_overhead()

    @property
    def kernel_counts(self) -> Mapping[Kernel, int]:
        """Kernels of one step, with the number of times that each runs."""
        return step_kernel_counts(self.scenario)

    def run_steps(self, seconds: Seconds) -> Seconds:
        """Run steps for about `seconds`; returns the mean seconds of a step, without the first, cold one."""
        first_seconds = self.device.host_seconds(self._run_step, 1)
        repeats = max(1, round((seconds - first_seconds) / first_seconds))
        return self.device.host_seconds(self._run_step, repeats) / repeats

    def profile_steps(self, step_seconds: Seconds) -> Mapping[OperatorLabel, Seconds]:
        """Kernel seconds of one step, by label."""
        if self._profiler_overhead is not None:
            times_by_label, speed_ratio = self._on_cpu(self._profiler_overhead, step_seconds)
        else:
            events = warm_events(self._run_step, min(_MOST, max(1, round(_SETTLED / step_seconds))), PROFILED_STEPS)
            times_by_label, speed_ratio = seconds_by_label(events, DeviceTimer(median_kernel_gap(events))), 1.0
        return {label: speed_ratio * label_seconds / PROFILED_STEPS for label, label_seconds in times_by_label.items()}

    def _on_cpu(self, writing: ProfilerOverhead, once: Seconds) -> tuple[Mapping[OperatorLabel, Seconds], float]:
        """Seconds by label, and by how much the same steps were faster (or slower) without the profiler."""
        with profiler(self.device.torch) as profile:
            spent = self.device.host_seconds(self._run_step, PROFILED_STEPS)
        events = profile.events()
        without = max(spent - writing.total_overhead(events), _MIN_UNPROFILED_FRACTION * spent)
        return seconds_by_label(events, writing.host_times), PROFILED_STEPS * once / without

    def _run_step(self) -> None:
        training_step(self.trainer, self.batch, PhaseTimer(self.device.torch))


def step_kernel_counts(scenario: Scenario) -> Mapping[Kernel, int]:
    """Kernels of the only rank's step, with the number of times that each runs."""
    plan = build_plan(scenario)
    (program,) = lower_step(plan, scenario.schedule.order(1, plan.microbatches)).programs
    segments = [task.segment for task in program.tasks if isinstance(task, ComputeTask)]
    return Counter(
        operation.kernel for segment in segments for operation in segment.operations if operation.kernel is not None
    )
