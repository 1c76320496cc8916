"""How does a training step slow kernels that were timed in isolation?

Arithmetic is slower than in isolated kernels (power limit under a mix of kernels on real values), and the
whole job runs at the speed of its slowest GPU: `SustainedKernels.from_rate`. How much longer a kernel takes
is given by the kernel model, which knows whether it is compute or memory bound; memory-bound and
launch-bound kernels keep their times. Flash attention of an older library takes a fixed multiple. The same
is applied to modelled and to recorded times of whatever origin, since both are of isolated kernels.
Exception: for a record with in-situ factors (`cost.in_situ`), the sustained rate of one GPU under a step's
load is in its times already, and only the slowest GPU remains, by the spread of the record's own GPUs where
it has measured two or more (assumed: the measured GPU is an average one).

Assumed: rates that were fitted to published steps of this accelerator hold on this machine too. None of
this was measured here, so isolated measurements are that much less certain within a step: the error grows
by the relative slowdown, and the prediction interval begins where the record by itself would be.

References: `hardware.efficiency.TrainingDerating`; "around 2x speedup" of FlashAttention-2 (arXiv:2307.08691,
abstract).
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
"""Duration of FlashAttention relative to FlashAttention-2."""

_ATTENTION_KINDS: Final = (KernelKind.ATTENTION_FORWARD, KernelKind.ATTENTION_BACKWARD)


def unmeasured_effects(published: TrainingDerating, record: CalibrationRecord | None) -> TrainingDerating:
    """In-training effects on kernel rates that are not in the record's times already."""
    if record is None or not record.in_situ:
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
    """Arithmetic rate of a job relative to isolated kernels on an average GPU: the slowest of its GPUs sets it."""
    return effects.sustained_ratio / (1.0 + effects.gpu_spread * slowest_deviation(gpus))


def attention_ratio(
    effects: TrainingDerating, requested: AttentionBackend, measured: AttentionBackend = AttentionBackend.FLASH
) -> float:
    """Duration of the requested flash attention relative to the one that was measured.

    At least 1: the measured one is not assumed to be slower than this machine's libraries allow.
    """
    return max(1.0, _relative_attention_seconds(effects, requested) / _relative_attention_seconds(effects, measured))


def _relative_attention_seconds(effects: TrainingDerating, attention: AttentionBackend) -> float:
    """Duration relative to the fastest flash attention available for the accelerator."""
    match attention:
        case AttentionBackend.FLASH2:
            return effects.flash2_slowdown
        case AttentionBackend.FLASH1:
            return FLASH1_SLOWDOWN * effects.flash2_slowdown
    return 1.0


@dataclass(frozen=True, slots=True)
class SustainedKernels:
    """Kernels at their rate within a training step (a `KernelCost`).

    isolated: times isolated kernels; isolated_model, in_step_model: the kernel model of the same hardware, in
    isolation and at the rate of a step; attention_slowdown: factor on flash attention.
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
        """Kernels of a step whose arithmetic runs at `rate` relative to isolated kernels.

        low_precision_factor: further factor on the rate in block-scaled formats.
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
            # equals isolated seconds * slowdown; written so that a modelled time maps exactly to the in-step model's
            seconds=in_step.seconds + (timing.seconds - isolated.seconds) * slowdown,
            bottleneck=in_step.bottleneck if timing.bottleneck is isolated.bottleneck else timing.bottleneck,
            error=None if timing.error is None else timing.error + abs(slowdown - 1.0),
            in_situ_slowdown=slowdown,
        )


def _older_attention_timing(timing: KernelTiming, slowdown: float) -> KernelTiming:
    """Timing of an older library's flash attention: derived, even if the newer one was measured."""
    slowed = replace(timing, seconds=timing.seconds * slowdown)
    return (
        replace(slowed, provenance=Provenance.DERIVED, error=None) if timing.provenance in LOCALLY_MEASURED else slowed
    )
