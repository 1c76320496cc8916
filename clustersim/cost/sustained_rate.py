"""How does a training step slow kernels that were timed in isolation?

Arithmetic is slower than in isolated kernels (power limit under a mix of kernels on real values), and the
whole job runs at the speed of its slowest GPU: `SustainedKernels.from_rate`. How much longer a kernel takes
is given by the kernel model, which knows whether it is compute or memory bound; memory-bound and
launch-bound kernels keep their times. Flash attention of an older library than a record has timed takes as much
longer as the kernel model says of the two, each with its own constants (`KernelEfficiency.attention_libraries`).
The same is applied to modelled and to recorded times of whatever origin, since both are of isolated kernels.
Exception: for a record with in-situ factors (`cost.in_situ`), the sustained rate of one GPU under a step's
load is in its times already, and only the slowest GPU remains, by the spread of the record's own GPUs where
it has measured two or more (assumed: the measured GPU is an average one).

Assumed: rates that were fitted to published steps of this accelerator hold on this machine too. None of
this was measured here, so isolated measurements are that much less certain within a step: the error grows
by the relative slowdown, and the prediction interval begins where the record by itself would be.

Reference: `hardware.efficiency.TrainingDerating`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import TYPE_CHECKING

from clustersim.common.cached_method import cached_method
from clustersim.cost.device_models import slowest_deviation
from clustersim.cost.roofline import Roofline
from clustersim.cost.timing import LOCALLY_MEASURED, KernelCost, KernelTiming, Provenance
from clustersim.hardware.accelerator import Accelerator
from clustersim.hardware.efficiency import TrainingDerating
from clustersim.model.kernels import ATTENTION_KINDS, Kernel
from clustersim.model.training import AttentionBackend

if TYPE_CHECKING:
    from clustersim.cost.calibration_record import CalibrationRecord, GpuSample


def unmeasured_effects(published: TrainingDerating, record: "CalibrationRecord | None") -> TrainingDerating:
    """In-training effects on kernel rates that are not in the record's times already."""
    if record is None or not record.is_in_step:
        return published
    return replace(
        published,
        sustained_ratio=1.0,
        low_precision_ratio=None,
        attention_ratio=None,
        gpu_spread=_gpu_spread(record.gpus, published.gpu_spread),
    )


def _gpu_spread(gpus: "Sequence[GpuSample]", published: float) -> float:
    """Standard deviation of times from GPU to GPU, relative to their mean."""
    seconds = [sample.time.seconds for sample in gpus]
    return published if len(seconds) < 2 else stdev(seconds) / mean(seconds)


def job_rate(effects: TrainingDerating, gpus: int) -> float:
    """Arithmetic rate of a job relative to isolated kernels on an average GPU: the slowest of its GPUs sets it."""
    return effects.sustained_ratio / (1.0 + effects.gpu_spread * slowest_deviation(gpus))


@dataclass(frozen=True, slots=True)
class AttentionLibraries:
    """The library of flash attention that a step runs, and the one that a record timed.

    accelerator: as packaged, since the constants of a record's fit are those of the library that it timed; factor: on
    the rate of matmuls within a step (`Roofline.attention_factor`).
    """

    accelerator: Accelerator
    requested: AttentionBackend
    timed: AttentionBackend
    factor: float | None = None


@dataclass(frozen=True, slots=True)
class _OtherAttention:
    """Kernel models of the timed library and of the requested one, isolated, and of that at the rate of a step."""

    timed: Roofline
    requested: Roofline
    in_step: Roofline

    @classmethod
    def from_libraries(cls, libraries: AttentionLibraries, rate: float) -> "_OtherAttention | None":
        """None where the step runs what was timed, or no flash attention."""
        accelerator, requested = libraries.accelerator, libraries.requested
        if requested in (AttentionBackend.STANDARD, libraries.timed):
            return None
        return cls(
            Roofline(accelerator, attention=libraries.timed),
            Roofline(accelerator, attention=requested),
            Roofline(accelerator, rate, attention=requested, attention_factor=libraries.factor),
        )

    def slowdown(self, kernel: Kernel) -> float:
        """Duration by the requested library relative to the timed one."""
        return self.requested.time_kernel(kernel).seconds / self.timed.time_kernel(kernel).seconds


@dataclass(frozen=True)
class SustainedKernels:
    """Kernels at their rate within a training step (a `KernelCost`).

    isolated: times isolated kernels; isolated_model, in_step_model: the kernel model of the same hardware, in
    isolation and at the rate of a step; other_attention: where the step runs another library than was timed.
    """

    isolated: KernelCost
    isolated_model: Roofline
    in_step_model: Roofline
    other_attention: _OtherAttention | None = None

    @classmethod
    def from_rate(
        cls,
        isolated: KernelCost,
        model: Roofline,
        *,
        rate: float,
        low_precision_factor: float = 1.0,
        attention_factor: float | None = None,
        attention: AttentionLibraries | None = None,
    ) -> "SustainedKernels":
        """Kernels of a step whose arithmetic runs at `rate` relative to isolated kernels.

        low_precision_factor: further factor on the rate in block-scaled formats; attention_factor: of flash attention,
        None: by the power that it draws; attention: None: what was timed, or the model's.
        """
        in_step_model = Roofline(model.accelerator, rate, low_precision_factor, model.attention, attention_factor)
        other_attention = None if attention is None else _OtherAttention.from_libraries(attention, rate)
        return cls(isolated, model, in_step_model, other_attention)

    @cached_method
    def time_kernel(self, kernel: Kernel) -> KernelTiming:
        """The timed kernel; flash attention of a slower library as much longer, of a faster one as it was timed.

        The timed library is not assumed to be slower than this machine's libraries allow.
        """
        timing, other = self.isolated.time_kernel(kernel), self.other_attention
        if other is not None and kernel.kind in ATTENTION_KINDS and (slowdown := other.slowdown(kernel)) > 1.0:
            slower = _slower_attention_timing(timing, slowdown)
            return _apply_rate(slower, other.requested.time_kernel(kernel), other.in_step.time_kernel(kernel))
        return _apply_rate(timing, self.isolated_model.time_kernel(kernel), self.in_step_model.time_kernel(kernel))


def _apply_rate(timing: KernelTiming, isolated: KernelTiming, in_step: KernelTiming) -> KernelTiming:
    """A timing in isolation as it is in a step. isolated, in_step: by the kernel model."""
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


def _slower_attention_timing(timing: KernelTiming, slowdown: float) -> KernelTiming:
    """Timing of a slower library's flash attention: derived, even if the other one was measured."""
    slowed = replace(timing, seconds=timing.seconds * slowdown)
    return (
        replace(slowed, provenance=Provenance.DERIVED, error=None) if timing.provenance in LOCALLY_MEASURED else slowed
    )
