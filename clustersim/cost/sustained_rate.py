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

from clustersim.cost.calibration_record import GpuRow, Record
from clustersim.cost.device_models import slowest
from clustersim.cost.roofline import Roofline
from clustersim.cost.timing import MEASURED_HERE, KernelCost, Provenance, Timing
from clustersim.hardware.efficiency import InTraining
from clustersim.model.kernels import Kernel, KernelKind
from clustersim.model.training import Attention

FLASH1: Final = 2.0
"""Times that FlashAttention takes relative to FlashAttention-2."""

_ATTENTION: Final = (KernelKind.ATTENTION_FORWARD, KernelKind.ATTENTION_BACKWARD)


def pace_of(published: InTraining, record: Record | None) -> InTraining:
    """What a step does to the pace of kernels that is not in their times yet."""
    if record is None or not record.chain:
        return published
    return replace(published, sustained=1.0, narrow=None, spread=_spread(record.gpus, published.spread))


def _spread(gpus: Sequence[GpuRow], published: float) -> float:
    """Standard deviation of times from GPU to GPU, relative to their mean."""
    seconds = [gpu_row.time.seconds for gpu_row in gpus]
    return published if len(seconds) < 2 else stdev(seconds) / mean(seconds)


def job_rate(pace: InTraining, gpus: int) -> float:
    """Arithmetic rate of a job's GPUs relative to that of single kernels on a mean one: the slowest sets it."""
    return pace.sustained / (1.0 + pace.spread * slowest(gpus))


def older_attention(pace: InTraining, asked: Attention, timed: Attention = Attention.FLASH) -> float:
    """How many times longer the flash attention takes that a training asks for than the one that was timed.

    At least 1: what was timed is not taken to be slower than this machine's libraries allow.
    """
    return max(1.0, _times(pace, asked) / _times(pace, timed))


def _times(pace: InTraining, attention: Attention) -> float:
    """Relative to the fastest flash attention that there is for the accelerator."""
    match attention:
        case Attention.FLASH2:
            return pace.flash2
        case Attention.FLASH1:
            return FLASH1 * pace.flash2
    return 1.0


@dataclass(frozen=True, slots=True)
class InStep:
    """Kernels as they are within a step (a `KernelCost`).

    alone: times kernels by themselves; model, within: the kernel model of the same hardware, of kernels by themselves
    and at the rate of a step; attention: times that flash attention takes.
    """

    alone: KernelCost
    model: Roofline
    within: Roofline
    attention: float
    _known: dict[Kernel, Timing] = field(init=False, repr=False, compare=False, default_factory=dict)

    @classmethod
    def of(cls, alone: KernelCost, model: Roofline, *, rate: float, attention: float, narrow: float = 1.0) -> "InStep":
        """Kernels of a step whose arithmetic runs at a `rate` relative to kernels alone.

        narrow: how many times that in formats with scales.
        """
        return cls(alone, model, Roofline(model.accelerator, rate, narrow), attention)

    def kernel(self, kernel: Kernel) -> Timing:
        """Time one kernel."""
        known = self._known.get(kernel)
        if known is None:
            known = self._known[kernel] = self._timed(kernel)
        return known

    def _timed(self, kernel: Kernel) -> Timing:
        timing = self._paced(kernel, self.alone.kernel(kernel))
        return _older(timing, self.attention) if kernel.kind in _ATTENTION and self.attention > 1.0 else timing

    def _paced(self, kernel: Kernel, timing: Timing) -> Timing:
        modelled, within = self.model.kernel(kernel), self.within.kernel(kernel)
        if modelled.seconds == within.seconds:
            return timing
        longer = within.seconds / modelled.seconds
        return replace(
            timing,
            # alone times `longer`, so written that what the model says of a kernel alone gives what it says of it here
            seconds=within.seconds + (timing.seconds - modelled.seconds) * longer,
            bound=within.bound if timing.bound is modelled.bound else timing.bound,
            error=None if timing.error is None else timing.error + abs(longer - 1.0),
            longer=longer,
        )


def _older(timing: Timing, times: float) -> Timing:
    """The flash attention of an older library: not what was measured, if anything was."""
    older = replace(timing, seconds=timing.seconds * times)
    return replace(older, provenance=Provenance.DERIVED, error=None) if timing.provenance in MEASURED_HERE else older
