"""How long do kernels take in real layers?

A training step of one microbatch, again and again, as `calibrate.check` trains: forward, backward, clipping, optimizer.
Most steps run as they are, so that caches, clocks and power are those of a step; some of them under torch's profiler.

On a CPU everything that a label holds is its kernel's, also what Python and autograd do between operators: it cannot
run ahead, and rows of a CPU include it. What the profiler takes is taken off (`calibrate.in_situ.profiler_overhead`), and what is
then left between a step with it and one without is assumed to be the machine's pace, the same for all kernels. On a GPU
kernels' own durations count, so what the host takes, with a profiler more, is in none of them.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from calibrate.check.operator_labels import Label
from calibrate.check.phase_timer import Timeline
from calibrate.check.profile_attribution import OnDevice, folded
from calibrate.check.step_profile import warm_events
from calibrate.check.supported import trainer_of
from calibrate.check.trainer import Batch, Trainer, random_batch, step
from calibrate.devices.device import TorchDevice
from calibrate.in_situ.profiler_overhead import Writing, host_writing, profiler, turnover
from clustersim.build import build_plan
from clustersim.common.units import Seconds
from clustersim.lowering.training_step import lower
from clustersim.model.kernels import Kernel
from clustersim.program.task import ComputeTask
from clustersim.scenario import Scenario

WARM_UP: Final = 2  # steps: torch makes optimizer states in the first
PROFILED: Final = 2  # steps under the profiler at a time
_SETTLED: Final = 0.5  # seconds of steps before these on a GPU, after which its clock is that of steps
_MOST: Final = 50
_CREDIBLE: Final = 0.5  # part of a step under the profiler that is the step's own, at least


class Chain(Protocol):
    """Kernels that follow each other in a step."""

    @property
    def kernels(self) -> Mapping[Kernel, int]:
        """Those of one step, and how often each runs."""

    def run(self, seconds: Seconds) -> Seconds:
        """Run steps for so long; seconds of one of them."""

    def profile(self, once: Seconds) -> Mapping[Label, Seconds]:
        """Seconds of the kernels of one step, by label; once: of a step without a profiler."""


@dataclass(slots=True)
class RealLayers:
    """A scenario of one rank, trained on a device."""

    scenario: Scenario
    device: TorchDevice
    trainer: Trainer = field(init=False)
    batch: Batch = field(init=False)
    _writing: Writing | None = field(init=False)

    def __post_init__(self) -> None:
        self.trainer = trainer_of(self.scenario, self.device.torch)
        self.batch = random_batch(build_plan(self.scenario), self.device.torch)
        self.device.host_seconds(self._step, WARM_UP)
        self._writing = None if self.device.torch.type == "cuda" else host_writing()

    @property
    def kernels(self) -> Mapping[Kernel, int]:
        """Those of one step, and how often each runs."""
        return kernels_of(self.scenario)

    def run(self, seconds: Seconds) -> Seconds:
        """Run steps for so long; seconds of one of them, the first aside, which finds caches and allocator empty."""
        first = self.device.host_seconds(self._step, 1)
        repeats = max(1, round((seconds - first) / first))
        return self.device.host_seconds(self._step, repeats) / repeats

    def profile(self, once: Seconds) -> Mapping[Label, Seconds]:
        """Seconds of the kernels of one step, by label."""
        if self._writing is not None:
            seconds, pace = self._on_cpu(self._writing, once)
        else:
            events = warm_events(self._step, min(_MOST, max(1, round(_SETTLED / once))), PROFILED)
            seconds, pace = folded(events, OnDevice(turnover(events))), 1.0
        return {label: pace * item / PROFILED for label, item in seconds.items()}

    def _on_cpu(self, writing: Writing, once: Seconds) -> tuple[Mapping[Label, Seconds], float]:
        """Seconds by label, and by how much the same steps were faster (or slower) without the profiler."""
        with profiler(self.device.torch) as found:
            spent = self.device.host_seconds(self._step, PROFILED)
        events = found.events()
        without = max(spent - writing.of(events), _CREDIBLE * spent)
        return folded(events, writing.times), PROFILED * once / without

    def _step(self) -> None:
        step(self.trainer, self.batch, Timeline(self.device.torch))


def kernels_of(scenario: Scenario) -> Mapping[Kernel, int]:
    """The kernels of the only rank's step, and how often each runs."""
    plan = build_plan(scenario)
    (program,) = lower(plan, scenario.schedule.order(1, plan.microbatches)).programs
    blocks = [task.segment for task in program.tasks if isinstance(task, ComputeTask)]
    return Counter(
        operation.kernel for block in blocks for operation in block.operations if operation.kernel is not None
    )
