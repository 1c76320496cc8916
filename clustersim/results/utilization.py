"""How well is the machine used, and what does a step achieve?

Model FLOP utilization (MFU) is the rate of useful FLOP over the peak; hardware FLOP utilization (HFU) also counts
what is computed a second time. Both depend on conventions, so the convention is part of the answer.
Reference: Chowdhery et al. 2022 (PaLM, arXiv:2204.02311), appendix B; Korthikanti et al. 2022 (arXiv:2205.05198),
section 6.3 and appendix A for hardware FLOP.
"""

from typing import Final

from clustersim.common.units import Flop, FlopPerSecond, Seconds
from clustersim.model.attention import full_matrix_flops
from clustersim.model.kernels import TENSOR_CORE_KINDS, AttentionShape, Kernel
from clustersim.program.task import Segment, WorkType
from clustersim.results.time_breakdown import Breakdown
from clustersim.results.time_categories import BUBBLES, EXPOSED, PARTS
from clustersim.results.trace_table import Rows

CONVENTION: Final = (
    "FLOP of the matrix products of forward and backward (PaLM, appendix B): the logits count, the embedding lookup "
    "does not, attention counts as a full matrix (causal factor 1) of as many keys as a window has, recomputation does "
    "not count for MFU and does for HFU; frozen weights have no gradient to count (four FLOP a token, not six); the "
    "peak is the accelerator's dense peak in the compute format. MFU with causal attention (mfu_causal) counts of "
    "attention what its causal mask leaves, about half."
)

TRILLION: Final = 1e12
"""Tokens, of which papers say how many GPU hours they took."""
_APART: Final = 0.01  # of MFU


def mfu(model_flops: Flop, *, seconds: Seconds, ranks: int, peak: FlopPerSecond) -> float:
    """Model FLOP utilization: model FLOP of the whole step over what all ranks could do at their peak meanwhile."""
    return model_flops / (seconds * ranks * peak)


def masked(convention: float, causal: float) -> bool:
    """Whether MFU by the convention and with causal attention part so far that both are to be shown: by a point."""
    return convention - causal >= _APART


def hfu(model_flops: Flop, recomputed_flops: Flop, *, seconds: Seconds, ranks: int, peak: FlopPerSecond) -> float:
    """Hardware FLOP utilization: like MFU, with what is recomputed on all ranks added."""
    return mfu(model_flops + recomputed_flops, seconds=seconds, ranks=ranks, peak=peak)


def model_flops_per_rank(model_flops: Flop, *, seconds: Seconds, ranks: int) -> FlopPerSecond:
    """Model FLOP per second that each rank achieves."""
    return model_flops / (seconds * ranks)


def tokens_per_second(sequences: int, sequence: int, seconds: Seconds) -> float:
    """Tokens per second of a step of `sequences` sequences of `sequence` tokens."""
    return sequences * sequence / seconds


def gpu_hours(rate: float, *, tokens: float = TRILLION) -> float:
    """Hours of all GPUs together for so many tokens. rate: tokens per second and GPU.

    >>> round(gpu_hours(1543.0) / 1e3)
    180
    """
    return tokens / rate / 3600.0


def recomputed_flops(rows: Rows) -> Flop:
    """FLOP of matrix products that all ranks together computed a second time, by the convention."""
    return float(sum(count * _recomputed(block) for count, block in zip(rows.runs, rows.blocks, strict=True)))


def bubble_fraction(parts: Breakdown) -> float:
    """Pipeline bubble as a share of the step time, the mean over all ranks (not of the ideal time)."""
    return _fraction(parts.total(*BUBBLES), parts)


def exposed_fraction(parts: Breakdown) -> float:
    """Communication that no kernel hides as a share of the step time, the mean over all ranks; waiting not included."""
    return _fraction(parts.total(*EXPOSED.values()), parts)


def _fraction(seconds: Seconds, parts: Breakdown) -> float:
    whole = parts.total(*PARTS)
    return seconds / whole if whole > 0 else 0.0


def _recomputed(block: Segment) -> Flop:
    kernels = (operation.kernel for operation in block.operations if operation.work_type is WorkType.RECOMPUTE)
    return sum(_full_matrix(kernel) for kernel in kernels if kernel is not None and kernel.kind in TENSOR_CORE_KINDS)


def _full_matrix(kernel: Kernel) -> Flop:
    return full_matrix_flops(kernel, kernel.shape) if isinstance(kernel.shape, AttentionShape) else kernel.flops
