"""Number formats of a step: matmul FLOP by format, and the cost of quantization.

FLOP are those that matmuls execute on all ranks (a causal attention kernel skips the masked half, and
counts what it executes). Quantization kernels convert operands into formats with scales; their time is busy
time, hidden or not.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from clustersim.common.dtypes import DType
from clustersim.common.units import Flop, FlopPerSecond, Seconds
from clustersim.model.kernels import TENSOR_CORE_KINDS, Kernel, KernelKind
from clustersim.program.task import Segment
from clustersim.results.provenance import BusyTimeItem
from clustersim.results.trace_table import TraceTable
from clustersim.scenario import Scenario


@dataclass(frozen=True, slots=True)
class FormatUsage:
    """Number formats of one step.

    flops: of all ranks' matmuls by format, largest first; quantization_seconds: mean over ranks; peak_format:
    the format whose peak the MFU refers to; peak_flops: FLOP/s of a GPU in it; high_precision: the format of
    activations; high_precision_flops: FLOP/s of a GPU in that.
    """

    flops: Mapping[DType, Flop]
    quantization_seconds: Seconds
    peak_format: DType
    peak_flops: FlopPerSecond
    high_precision: DType
    high_precision_flops: FlopPerSecond

    @property
    def flop_shares(self) -> dict[DType, float]:
        """Fraction of all FLOP by format; they sum to 1."""
        total = sum(self.flops.values())
        return {dtype: flop / total for dtype, flop in self.flops.items()}

    def high_precision_ratio(self, mfu: float) -> float:
        """Model FLOP/s over `high_precision_flops`, from the MFU. No utilization: it may be above 1."""
        return mfu * self.peak_flops / self.high_precision_flops


def format_usage(
    scenario: Scenario,
    table: TraceTable,
    items: Iterable[BusyTimeItem],
    mean_peak_flops: Callable[[DType], FlopPerSecond],
) -> FormatUsage | None:
    """Number formats of a step; None where nothing is cast. mean_peak_flops: of a GPU in a format."""
    recipe = scenario.training.recipe
    if recipe.casts is None:
        return None
    rank_count = scenario.layout.world_size
    return FormatUsage(
        executed_flops_by_format(table, scenario.steps),
        mean_quantization_seconds(items, rank_count=rank_count, step_count=scenario.steps),
        recipe.compute,
        mean_peak_flops(recipe.compute),
        recipe.activations,
        mean_peak_flops(recipe.activations),
    )


def executed_flops_by_format(table: TraceTable, step_count: int) -> dict[DType, Flop]:
    """Matmul FLOP that all ranks execute per step, by format, largest first."""
    totals: dict[DType, Flop] = {}
    for count, segment in zip(table.segment_run_counts, table.segments, strict=True):
        for dtype, flops in _segment_flops(segment).items():
            totals[dtype] = totals.get(dtype, 0.0) + count * flops / step_count
    return dict(sorted(totals.items(), key=lambda format_flops: -format_flops[1]))


def mean_quantization_seconds(items: Iterable[BusyTimeItem], *, rank_count: int, step_count: int) -> Seconds:
    """Seconds per step of a rank's quantization kernels, averaged over ranks."""
    casts = (item.seconds for item in items if isinstance(item.body, Kernel) and item.body.kind is KernelKind.CAST)
    return sum(casts) / (rank_count * step_count)


def _segment_flops(segment: Segment) -> dict[DType, Flop]:
    """FLOP of a segment's matmuls by format."""
    totals: dict[DType, Flop] = {}
    for kernel in (operation.kernel for operation in segment.operations):
        if kernel is not None and kernel.kind in TENSOR_CORE_KINDS:
            totals[kernel.dtype] = totals.get(kernel.dtype, 0.0) + kernel.flops
    return totals
