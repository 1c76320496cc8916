"""What does a training step do to kernels that were timed alone?

Arithmetic is slower than in single kernels (the power limit under a mix of kernels on real values), and the whole job
keeps the pace of the slowest of its GPUs: `InStep.rate`. How much longer a kernel takes for it, the kernel model says,
which knows whether arithmetic or memory bounds it; what memory or launches bound takes what it took. Flash attention of
an older library takes some times as long. The same is done to what a model says and to what a record says, of whatever
origin: both are of kernels alone. But for a record that has measured a chain of kernels (`cost.in_situ`): what a step
does to the pace of one GPU is in its times already, under the load of a step, and only the slowest GPU is left, by the
spread of the record's own GPUs where it has measured two or more (assumed: the others were measured on a mean one).

Assumed: the rates that were fitted to published steps of this accelerator hold on this machine too. Nothing of that was
measured here, so what was measured alone is known that much worse within a step: the error grows by the part by which
it takes longer, and the band begins where the record alone would be.

References: `hardware.efficiency.InTraining`; "around 2x speedup" of FlashAttention-2 (arXiv:2307.08691, abstract).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, stdev
from typing import Final

from clustersim.cost.calibration_record import CalibrationRecord, GpuSample
from clustersim.cost.device_models import slowest_deviation
from clustersim.cost.roofline import Roofline
from clustersim.cost.timing import LOCALLY_MEASURED, KernelCost, KernelTiming, Provenance
from clustersim.hardware.efficiency import TrainingDerating
from clustersim.model.kernels import Kernel, KernelKind
from clustersim.model.training import AttentionBackend

FLASH1_SLOWDOWN: Final = 2.0
"""Times that FlashAttention takes relative to FlashAttention-2."""

_ATTENTION_KINDS: Final = (KernelKind.ATTENTION_FORWARD, KernelKind.ATTENTION_BACKWARD)


def unmeasured_effects(published: TrainingDerating, record: CalibrationRecord | None) -> TrainingDerating:
    """What a step does to the pace of kernels that is not in their times yet."""
    if record is None or not record.chain:
        return published
    return replace(
        published,
        sustained_ratio=1.0,
        low_precision_ratio=None,
        gpu_spread=_gpu_spread(record.gpus, published.gpu_spread),
    )


def _gpu_spread(gpus: Sequence[GpuSample], published: float) -> float:
    """Standard deviation of times from GPU to GPU, relative to their mean."""
    seconds = [sample.time.seconds for sample in gpus]
    return published if len(seconds) < 2 else stdev(seconds) / mean(seconds)


def job_rate(effects: TrainingDerating, gpus: int) -> float:
    """Arithmetic rate of a job's GPUs relative to that of single kernels on a mean one: the slowest sets it."""
    return effects.sustained_ratio / (1.0 + effects.gpu_spread * slowest_deviation(gpus))


def attention_ratio(
    effects: TrainingDerating, requested: AttentionBackend, measured: AttentionBackend = AttentionBackend.FLASH
) -> float:
    """How many times longer the flash attention takes that a training asks for than the one that was timed.

    At least 1: what was timed is not taken to be slower than this machine's libraries allow.
    """
    return max(1.0, _relative_attention_seconds(effects, requested) / _relative_attention_seconds(effects, measured))


def _relative_attention_seconds(effects: TrainingDerating, attention: AttentionBackend) -> float:
    """Relative to the fastest flash attention that there is for the accelerator."""
    match attention:
        case AttentionBackend.FLASH2:
            return effects.flash2_slowdown
        case AttentionBackend.FLASH1:
            return FLASH1_SLOWDOWN * effects.flash2_slowdown
    return 1.0


@dataclass(frozen=True, slots=True)
class SustainedKernels:
    """Kernels as they are within a step (a `KernelCost`).

    alone: times kernels by themselves; model, within: the kernel model of the same hardware, of kernels by themselves
    and at the rate of a step; attention: times that flash attention takes.
    """

    isolated: KernelCost
    isolated_model: Roofline
    in_step_model: Roofline
    attention_slowdown: float
    _cache: dict[Kernel, KernelTiming] = field(init=False, repr=False, compare=False, default_factory=dict)

    @classmethod
    def from_rate(
        cls,
        isolated: KernelCost,
        model: Roofline,
        *,
        rate: float,
        attention_slowdown: float,
        low_precision_factor: float = 1.0,
    ) -> "SustainedKernels":
        """Kernels of a step whose arithmetic runs at a `rate` relative to kernels alone.

        narrow: how many times that in formats with scales.
        """
        return cls(isolated, model, Roofline(model.accelerator, rate, low_precision_factor), attention_slowdown)

    def time_kernel(self, kernel: Kernel) -> KernelTiming:
        """Time one kernel."""
        cached = self._cache.get(kernel)
        if cached is None:
            cached = self._cache[kernel] = self._time_in_step(kernel)
        return cached

    def _time_in_step(self, kernel: Kernel) -> KernelTiming:
        timing = self._apply_rate(kernel, self.isolated.time_kernel(kernel))
        return (
            _older_attention_timing(timing, self.attention_slowdown)
            if kernel.kind in _ATTENTION_KINDS and self.attention_slowdown > 1.0
            else timing
        )

    def _apply_rate(self, kernel: Kernel, timing: KernelTiming) -> KernelTiming:
        isolated, in_step = self.isolated_model.time_kernel(kernel), self.in_step_model.time_kernel(kernel)
        if isolated.seconds == in_step.seconds:
            return timing
        slowdown = in_step.seconds / isolated.seconds
        return replace(
            timing,
            # alone times `longer`, so written that what the model says of a kernel alone gives what it says of it here
            seconds=in_step.seconds + (timing.seconds - isolated.seconds) * slowdown,
            bottleneck=in_step.bottleneck if timing.bottleneck is isolated.bottleneck else timing.bottleneck,
            error=None if timing.error is None else timing.error + abs(slowdown - 1.0),
            in_situ_slowdown=slowdown,
        )


def _older_attention_timing(timing: KernelTiming, slowdown: float) -> KernelTiming:
    """The flash attention of an older library: not what was measured, if anything was."""
    slowed = replace(timing, seconds=timing.seconds * slowdown)
    return (
        replace(slowed, provenance=Provenance.DERIVED, error=None) if timing.provenance in LOCALLY_MEASURED else slowed
    )
