"""Which fraction of the accelerator's peak did each kernel reach?

The roofline: a kernel takes no less than its FLOP at the peak of its format (all 8-bit formats share one),
and no less than its bytes at the memory bandwidth. The longer of the two over the measured time is its
efficiency; the longer one is its bottleneck. Peaks are the datasheet's; for a CPU, whose files are
placeholders, and for formats that no datasheet has, those of the record's fit.

Reference: Williams et al., "Roofline", CACM 52(4).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from calibrate.report.section import ReportSection
from clustersim.common.dtypes import DType
from clustersim.common.units import (
    BytesPerSecond,
    FlopPerSecond,
    Seconds,
    format_bandwidth,
    format_flops,
    format_seconds,
)
from clustersim.cost.calibration_record import CalibrationRecord, KernelSample, family_of
from clustersim.cost.timing import Bottleneck
from clustersim.hardware.accelerator import Accelerator
from clustersim.model.kernels import AttentionShape, MatmulShape, format_kernel_shape
from clustersim.report.figure import format_share


@dataclass(frozen=True, slots=True)
class RooflineLimits:
    """Peak rates of a device.

    flops: FLOP/s by format; bandwidth: bytes/s; is_from_datasheet: else they are fitted to its own samples.
    """

    flops: Mapping[DType, FlopPerSecond]
    bandwidth: BytesPerSecond
    is_from_datasheet: bool

    @property
    def description(self) -> str:
        """What efficiencies are relative to."""
        return "datasheet" if self.is_from_datasheet else "rates that its own rows support (caches are faster)"


@dataclass(frozen=True, slots=True)
class AchievedEfficiency:
    """A measured kernel. rate: bytes/s where memory-bound, else FLOP/s; efficiency: fraction of the roofline."""

    sample: KernelSample
    seconds: Seconds
    bound: Bottleneck
    rate: float
    efficiency: float

    @property
    def rate_label(self) -> str:
        """The rate with its unit."""
        return format_bandwidth(self.rate) if self.bound is Bottleneck.MEMORY else format_flops(self.rate)


def roofline_limits(record: CalibrationRecord, accelerator: Accelerator | None) -> RooflineLimits | None:
    """Peak rates of the record's device; None where neither a file nor a fit has any."""
    fit, is_cpu = record.kernel_fit, record.device.threads > 0
    if accelerator is not None and not (is_cpu and fit):
        fitted = {} if fit is None else fit.peak
        return RooflineLimits(
            {**fitted, **accelerator.peak}, accelerator.memory_bandwidth, is_from_datasheet=not is_cpu
        )
    return None if fit is None else RooflineLimits(fit.peak, fit.memory_bandwidth, is_from_datasheet=False)


def achieved_efficiencies(record: CalibrationRecord, limits: RooflineLimits) -> list[AchievedEfficiency]:
    """The efficiency of each measured kernel; those of a format without a peak are left out."""
    achieved = (
        _achieved_efficiency(sample, sample.time.seconds, limits)
        for sample in record.kernels
        if sample.time is not None and (sample.flops or sample.bytes)
    )
    return [efficiency for efficiency in achieved if efficiency is not None]


def _achieved_efficiency(sample: KernelSample, seconds: Seconds, limits: RooflineLimits) -> AchievedEfficiency | None:
    memory = sample.bytes / limits.bandwidth
    is_matmul_like = isinstance(sample.shape, MatmulShape | AttentionShape)
    peak = sample.dtype.peak_dtype
    if is_matmul_like and peak not in limits.flops:
        return None
    compute = sample.flops / limits.flops[peak] if is_matmul_like else 0.0
    if memory >= compute:
        return AchievedEfficiency(sample, seconds, Bottleneck.MEMORY, sample.bytes / seconds, memory / seconds)
    return AchievedEfficiency(sample, seconds, Bottleneck.COMPUTE, sample.flops / seconds, compute / seconds)


def group_by_family(kernels: list[AchievedEfficiency]) -> dict[str, list[AchievedEfficiency]]:
    """Kernels by family, the most efficient first; families ordered by the total time of their kernels."""
    families: dict[str, list[AchievedEfficiency]] = {}
    for achieved in kernels:
        families.setdefault(family_of(achieved.sample.signature), []).append(achieved)
    ordered = sorted(
        families.items(),
        key=lambda family_members: -sum(achieved_efficiency.seconds for achieved_efficiency in family_members[1]),
    )
    return {name: sorted(members, key=lambda achieved: -achieved.efficiency) for name, members in ordered}


def efficiency_section(record: CalibrationRecord, limits: RooflineLimits) -> ReportSection:
    """Best, median and worst shape of every family."""
    families = group_by_family(achieved_efficiencies(record, limits))
    table_rows = tuple(table_row for members in families.values() for table_row in _table_rows(members))
    return ReportSection(
        key="efficiency",
        title="Efficiency by shape",
        heads=("kernels", "efficiency", "rate", "time", "shape"),
        rows=table_rows,
        content=[_family_json(name, members) for name, members in families.items()],
        lead=(
            f"Of the {limits.description}: the time that a kernel's FLOP, or its bytes, would take at the peak, over "
            "what it "
            "took. Best, median and worst shape of each family; families that take longest come first."
        ),
        text_columns=(4,),
    )


def family_label(sample: KernelSample) -> str:
    """The displayed name of a kernel's family."""
    return family_of(sample.signature).replace("_", " ")


def _representatives(members: list[AchievedEfficiency]) -> Iterator[tuple[str, AchievedEfficiency]]:
    """The best, median and worst kernel of a family, with a label."""
    if len(members) == 1:
        yield "only", members[0]
        return
    yield "best", members[0]
    if len(members) > 2:
        yield "median", members[len(members) // 2]
    yield "worst", members[-1]


def _table_rows(members: list[AchievedEfficiency]) -> Iterator[tuple[str, ...]]:
    name = f"{family_label(members[0].sample)} ({len(members):,})"
    for index, (rank_label, achieved) in enumerate(_representatives(members)):
        share, shape = format_share(achieved.efficiency), format_kernel_shape(achieved.sample.shape)
        yield (
            name if index == 0 else "",
            f"{rank_label} {share}",
            achieved.rate_label,
            format_seconds(achieved.seconds),
            shape,
        )


def _family_json(name: str, members: list[AchievedEfficiency]) -> dict[str, object]:
    return {"family": name, "kernels": [_kernel_json(member) for member in members]}


def _kernel_json(achieved: AchievedEfficiency) -> dict[str, object]:
    flops = None if achieved.bound is Bottleneck.MEMORY else achieved.rate
    return {
        "name": achieved.sample.name,
        "shape": format_kernel_shape(achieved.sample.shape),
        "seconds": achieved.seconds,
        "bound": achieved.bound.value,
        "flop_per_s": flops,
        "bytes_per_s": achieved.rate if flops is None else None,
        "efficiency": achieved.efficiency,
    }
