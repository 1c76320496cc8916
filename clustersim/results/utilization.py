"""Hardware utilization and throughput of a step.

Model FLOP utilization (MFU) is the rate of useful FLOP over the peak; hardware FLOP utilization (HFU) also
counts recomputation. Both depend on conventions, so the convention is reported with them. Reference:
Chowdhery et al. 2022 (PaLM, arXiv:2204.02311), appendix B; Korthikanti et al. 2022 (arXiv:2205.05198),
section 6.3 and appendix A for hardware FLOP.
"""

from dataclasses import dataclass
from typing import Final, Self

from clustersim.common.units import Flop, FlopPerSecond, Seconds
from clustersim.model.attention import full_matrix_flops
from clustersim.model.kernels import TENSOR_CORE_KINDS, AttentionShape, Kernel
from clustersim.model.mixer import AttentionFlopConvention
from clustersim.program.task import Segment, WorkType
from clustersim.results.time_breakdown import TimeBreakdown
from clustersim.results.time_categories import BUBBLE_CATEGORIES, EXPOSED_CATEGORIES, TIME_CATEGORIES
from clustersim.results.trace_table import TraceTable

CONVENTION: Final = (
    "FLOP of the matmuls of forward and backward (PaLM, appendix B): the logits count, the embedding lookup "
    "does not, attention counts as a full matrix (causal factor 1) of as many keys as a window has, recomputation does "
    "not count for MFU and does for HFU; frozen weights have no gradient to count (four FLOP a token, not six); the "
    "peak is the accelerator's dense peak in the compute format. MFU with causal attention (mfu_causal) counts of "
    "attention what its causal mask leaves, about half; where the full matrix is a tenth more FLOP or beyond, it is "
    "the MFU that is shown first."
)

TRILLION_TOKENS: Final = 1e12
"""Number of tokens for which papers report GPU hours."""
_MIN_MFU_DIFFERENCE: Final = 0.01  # difference of MFU values
_MIN_LEADING_RATIO: Final = 1.1  # of MFU with full attention to MFU with causal attention


@dataclass(frozen=True, slots=True)
class LeadingMfu:
    """The MFU that is shown first, and how it counts attention.

    Papers count attention as a full matrix. Where that is a tenth more FLOP than a causal mask leaves, as for long
    sequences, it says little about how well the GPUs are used, and MFU with causal attention leads.
    """

    value: float
    attention: AttentionFlopConvention

    @classmethod
    def select(cls, mfu_full: float, mfu_causal: float) -> Self:
        """The one of the two that leads."""
        if mfu_full >= _MIN_LEADING_RATIO * mfu_causal:
            return cls(mfu_causal, AttentionFlopConvention.CAUSAL)
        return cls(mfu_full, AttentionFlopConvention.FULL)

    @property
    def is_causal(self) -> bool:
        """Whether attention counts as its causal mask leaves it."""
        return self.attention is AttentionFlopConvention.CAUSAL

    @property
    def name(self) -> str:
        """Name of the number."""
        return "MFU, causal" if self.is_causal else "MFU"

    @property
    def attention_label(self) -> str:
        """How attention counts, in words."""
        return "causal attention" if self.is_causal else "attention as a full matrix"


def mfu(model_flops: Flop, *, step_time: Seconds, gpu_count: int, peak: FlopPerSecond) -> float:
    """Model FLOP utilization: model FLOP of a full step divided by step time, GPU count and peak FLOP/s."""
    return model_flops / (step_time * gpu_count * peak)


def shows_causal_mfu(mfu_full: float, mfu_causal: float) -> bool:
    """Whether MFU by the convention and MFU with causal attention differ enough (0.01) for both to be shown."""
    return mfu_full - mfu_causal >= _MIN_MFU_DIFFERENCE


def hfu(model_flops: Flop, recomputed_flops: Flop, *, step_time: Seconds, gpu_count: int, peak: FlopPerSecond) -> float:
    """Hardware FLOP utilization: like MFU, including the FLOP recomputed on all ranks."""
    return mfu(model_flops + recomputed_flops, step_time=step_time, gpu_count=gpu_count, peak=peak)


def flop_convention_warnings(hfu_value: float, mfu_causal: float, sequence: int) -> tuple[str, ...]:
    """A warning where the usual FLOP convention is misleading (HFU above 1)."""
    if hfu_value < 1:
        return ()
    return (
        "HFU above 100 %: by convention attention counts as a full matrix, but causal kernels skip half of it, and "
        f"at {sequence:,} tokens attention is most of the work; counted so, MFU is {mfu_causal:.1%} (mfu_causal)",
    )


def achieved_flops_per_gpu(model_flops: Flop, *, step_time: Seconds, gpu_count: int) -> FlopPerSecond:
    """Achieved model FLOP per second and GPU."""
    return model_flops / (step_time * gpu_count)


def tokens_per_second(sequence_count: int, sequence_length: int, step_time: Seconds) -> float:
    """Tokens per second of a step of `sequence_count` sequences of `sequence_length` tokens."""
    return sequence_count * sequence_length / step_time


def gpu_hours_for_tokens(tokens_per_gpu_second: float, *, tokens: float = TRILLION_TOKENS) -> float:
    """GPU hours for a number of tokens. tokens_per_gpu_second: tokens per second and GPU.

    >>> round(gpu_hours_for_tokens(1543.0) / 1e3)
    180
    """
    return tokens / tokens_per_gpu_second / 3600.0


def recomputed_flops_total(
    table: TraceTable, convention: AttentionFlopConvention = AttentionFlopConvention.FULL
) -> Flop:
    """Matmul FLOP recomputed on all ranks, by the convention."""
    return float(
        sum(
            count * _segment_recomputed_flops(segment, convention)
            for count, segment in zip(table.segment_run_counts, table.segments, strict=True)
        )
    )


def bubble_fraction(breakdown: TimeBreakdown) -> float:
    """Pipeline bubble as a fraction of the step time (not of the ideal time), averaged over all ranks."""
    return _share_of_step(breakdown.category_total(*BUBBLE_CATEGORIES), breakdown)


def exposed_fraction(breakdown: TimeBreakdown) -> float:
    """Exposed communication as a fraction of the step time, averaged over all ranks; waiting is not included."""
    return _share_of_step(breakdown.category_total(*EXPOSED_CATEGORIES.values()), breakdown)


def _share_of_step(seconds: Seconds, breakdown: TimeBreakdown) -> float:
    step_time = breakdown.category_total(*TIME_CATEGORIES)
    return seconds / step_time if step_time > 0 else 0.0


def _segment_recomputed_flops(segment: Segment, convention: AttentionFlopConvention) -> Flop:
    kernels = (operation.kernel for operation in segment.operations if operation.work_type is WorkType.RECOMPUTE)
    return sum(
        _convention_flops(kernel, convention)
        for kernel in kernels
        if kernel is not None and kernel.kind in TENSOR_CORE_KINDS
    )


def _convention_flops(kernel: Kernel, convention: AttentionFlopConvention) -> Flop:
    """FLOP of a kernel; a causal attention kernel executes what its mask leaves."""
    if convention is AttentionFlopConvention.FULL and isinstance(kernel.shape, AttentionShape):
        return full_matrix_flops(kernel, kernel.shape)
    return kernel.flops
