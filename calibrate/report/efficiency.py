"""How much of what the accelerator could do did each kernel reach?

The roofline: a kernel takes no less than its FLOP at the peak of its format (all of eight bits have one), and no less
than its bytes at the memory's bandwidth. The longer of the two, over what was measured, is its efficiency; the one that
is longer bounds it. Peaks are the datasheet's; of a CPU, whose files are placeholders, and of formats that no datasheet
has, those of the record's fit.

Reference: Williams et al., "Roofline", CACM 52(4).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from calibrate.report.section import Section
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
from clustersim.model.kernels import AttentionShape, MatmulShape
from clustersim.report.export.span_descriptions import shape_words
from clustersim.report.figure import share_words


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What a device could do at most. datasheet: whether a datasheet says so; else it is fitted to its own rows."""

    flops: Mapping[DType, FlopPerSecond]
    bandwidth: BytesPerSecond
    datasheet: bool

    @property
    def words(self) -> str:
        """What shares are shares of."""
        return "datasheet" if self.datasheet else "rates that its own rows support (caches are faster)"


@dataclass(frozen=True, slots=True)
class Reached:
    """A kernel that was measured. rate: bytes/s where memory bounds it, else FLOP/s; share: of the device's."""

    row: KernelSample
    seconds: Seconds
    bound: Bottleneck
    rate: float
    share: float

    @property
    def rate_words(self) -> str:
        """The rate with its unit."""
        return format_bandwidth(self.rate) if self.bound is Bottleneck.MEMORY else format_flops(self.rate)


def ceiling(record: CalibrationRecord, accelerator: Accelerator | None) -> Ceiling | None:
    """Of the record's device; None where neither a file nor a fit says anything."""
    fit, is_cpu = record.kernel_fit, record.device.threads > 0
    if accelerator is not None and not (is_cpu and fit):
        fitted = {} if fit is None else fit.peak
        return Ceiling({**fitted, **accelerator.peak}, accelerator.memory_bandwidth, datasheet=not is_cpu)
    return None if fit is None else Ceiling(fit.peak, fit.memory_bandwidth, datasheet=False)


def reached(record: CalibrationRecord, most: Ceiling) -> list[Reached]:
    """What each measured kernel reached; those of a format without a peak are left out."""
    found = (_of(row, row.time.seconds, most) for row in record.kernels if row.time is not None)
    return [item for item in found if item is not None]


def _of(row: KernelSample, seconds: Seconds, most: Ceiling) -> Reached | None:
    memory = row.bytes / most.bandwidth
    multiplies = isinstance(row.shape, MatmulShape | AttentionShape)
    peak = row.dtype.peak_dtype
    if multiplies and peak not in most.flops:
        return None
    compute = row.flops / most.flops[peak] if multiplies else 0.0
    if memory >= compute:
        return Reached(row, seconds, Bottleneck.MEMORY, row.bytes / seconds, memory / seconds)
    return Reached(row, seconds, Bottleneck.COMPUTE, row.flops / seconds, compute / seconds)


def by_family(kernels: list[Reached]) -> dict[str, list[Reached]]:
    """Kernels by family, the most efficient first; families in the order of the time that their kernels take."""
    families: dict[str, list[Reached]] = {}
    for kernel in kernels:
        families.setdefault(family_of(kernel.row.signature), []).append(kernel)
    ordered = sorted(families.items(), key=lambda item: -sum(element.seconds for element in item[1]))
    return {name: sorted(found, key=lambda each: -each.share) for name, found in ordered}


def efficiency_section(record: CalibrationRecord, most: Ceiling) -> Section:
    """Best, median and worst shape of every family."""
    families = by_family(reached(record, most))
    rows = tuple(row for found in families.values() for row in _rows(found))
    return Section(
        key="efficiency",
        title="Efficiency by shape",
        heads=("kernels", "efficiency", "rate", "time", "shape"),
        rows=rows,
        content=[_content(name, found) for name, found in families.items()],
        lead=(
            f"Of the {most.words}: the time that a kernel's FLOP, or its bytes, would take at the peak, over what it "
            "took. Best, median and worst shape of each family; families that take longest come first."
        ),
        words=(4,),
    )


def family_words(row: KernelSample) -> str:
    """The family of a kernel, for people."""
    return family_of(row.signature).replace("_", " ")


def _chosen(found: list[Reached]) -> Iterator[tuple[str, Reached]]:
    """Those that stand for a family."""
    if len(found) == 1:
        yield "only", found[0]
        return
    yield "best", found[0]
    if len(found) > 2:
        yield "median", found[len(found) // 2]
    yield "worst", found[-1]


def _rows(found: list[Reached]) -> Iterator[tuple[str, ...]]:
    name = f"{family_words(found[0].row)} ({len(found):,})"
    for place, (which, item) in enumerate(_chosen(found)):
        share, shape = share_words(item.share), shape_words(item.row.shape)
        yield (name if place == 0 else "", f"{which} {share}", item.rate_words, format_seconds(item.seconds), shape)


def _content(name: str, found: list[Reached]) -> dict[str, object]:
    return {"family": name, "kernels": [_kernel(item) for item in found]}


def _kernel(each: Reached) -> dict[str, object]:
    flops = None if each.bound is Bottleneck.MEMORY else each.rate
    return {
        "name": each.row.name,
        "shape": shape_words(each.row.shape),
        "seconds": each.seconds,
        "bound": each.bound.value,
        "flop_per_s": flops,
        "bytes_per_s": each.rate if flops is None else None,
        "efficiency": each.share,
    }
