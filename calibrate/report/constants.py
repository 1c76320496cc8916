"""How does this device differ from what clustersim ships for its kind?

Each constant of the kernel model as the accelerator's file has it (fitted to published measurements, or taken from a
datasheet), beside the same constant as the record's rows have it. Rates are compared as what they come to: a share of
a peak says nothing where the peaks differ. *Sustained* is the arithmetic rate in a step relative to single kernels:
of the record, what its products take alone over what they take in a layer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import Final

from calibrate.report.section import Section
from clustersim.common.dtypes import DType
from clustersim.common.units import format_bandwidth, format_flops, format_seconds
from clustersim.cost.calibration_record import CalibrationRecord, KernelFit, KernelSample, kernel_slowdowns
from clustersim.cost.matmul_tiles import matmul_rate
from clustersim.hardware.accelerator import Accelerator
from clustersim.model.kernels import KernelKind

_ATTENTION: Final = (KernelKind.ATTENTION_FORWARD, KernelKind.ATTENTION_BACKWARD)


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant and how it is said. shipped: in the accelerator's file; here: of the record, None: it does not say."""

    key: str
    name: str
    words: Callable[[float], str]
    shipped: float
    here: float | None

    @property
    def ratio(self) -> float | None:
        """What the record has, over what is shipped."""
        return None if self.here is None or not self.shipped else self.here / self.shipped


def constants(record: CalibrationRecord, shipped: Accelerator) -> list[Constant]:
    """Of the record's device, beside those that are shipped."""
    found = [*_sustained(record, shipped)]
    if record.kernel_fit is not None:
        found = [*_fitted(record, record.kernel_fit, shipped), *found]
    return found


def _fitted(record: CalibrationRecord, fit: KernelFit, shipped: Accelerator) -> Iterator[Constant]:
    """Constants of the kernel model; of formats that were measured."""
    here = replace(
        shipped,
        peak=fit.peak,
        memory_bandwidth=fit.memory_bandwidth,
        compute_units=fit.compute_units,
        efficiency=fit.efficiency,
    )
    measured = [row for row in record.kernels if row.time is not None]
    for dtype in _formats(measured, KernelKind.MATMUL, shipped, here):
        rates = (matmul_rate(accelerator, dtype) for accelerator in (shipped, here))
        yield Constant(f"matmul_{dtype.value}", f"matmul {dtype.value}, largest tile", format_flops, *rates)
    for kind in _ATTENTION:
        for dtype in _formats(measured, kind, shipped, here):
            rates = (item.peak_flops(dtype) * _share(item, kind) for item in (shipped, here))
            name = f"{kind.value.replace('_', ' ')} {dtype.value}, main loop"
            yield Constant(f"{kind.value}_{dtype.value}", name, format_flops, *rates)
    moved = (element.memory_bandwidth * element.efficiency.memory for element in (shipped, here))
    yield Constant("memory", "memory, streaming kernels", format_bandwidth, *moved)
    latencies = (entry.efficiency.kernel_latency for entry in (shipped, here))
    yield Constant("kernel_latency", "latency of a kernel", format_seconds, *latencies)


def _formats(rows: list[KernelSample], kind: KernelKind, *both: Accelerator) -> list[DType]:
    """Formats of which kernels of a kind were measured, and both know a rate."""
    found = dict.fromkeys(row.dtype for row in rows if row.kind is kind)
    return [dtype for dtype in found if all(dtype in accelerator.formats for accelerator in both)]


def _share(accelerator: Accelerator, kind: KernelKind) -> float:
    efficiency = accelerator.efficiency
    forward = kind is KernelKind.ATTENTION_FORWARD
    return (efficiency.attention_forward if forward else efficiency.attention_backward).share


def _sustained(record: CalibrationRecord, shipped: Accelerator) -> Iterator[Constant]:
    """What holds for kernels within a step, and on several GPUs."""
    interval = record.launch_interval
    yield Constant("launch_interval", "launch interval", format_seconds, shipped.efficiency.launch_interval, interval)
    products = [row for row in record.chain if row.family.startswith(KernelKind.MATMUL.value)]
    pace = sum(row.isolated for row in products) / sum(row.in_chain for row in products) if products else None
    yield Constant(
        "sustained", "products in a step, pace relative to alone", _ratio, shipped.derating.sustained_ratio, pace
    )
    parts = kernel_slowdowns(record.beside).values()
    slowing = fmean(parts) if parts else None
    yield Constant("interference", "kernels beside collectives, longer by", _percent, shipped.interference, slowing)
    times = [row.time.seconds for row in record.gpus]
    spread = pstdev(times) / fmean(times) if len(times) > 1 else None
    yield Constant("spread", "GPU to GPU, standard deviation", _percent, shipped.derating.gpu_spread, spread)


def _ratio(value: float) -> str:
    return f"{value:.3f}"


def _percent(value: float) -> str:
    return f"{value:.1%}"


def constants_section(record: CalibrationRecord, shipped: Accelerator) -> Section:
    """The constants that the record says something of, with ratios."""
    known = [constant for constant in constants(record, shipped) if constant.here is not None]
    source = "fitted to published measurements" if shipped.efficiency.published else "from datasheets and siblings"
    return Section(
        key="constants",
        title="Beside the shipped constants",
        heads=("constant", f"shipped for {shipped.name}", "this record", "ratio"),
        rows=tuple(_row(item) for item in known),
        content=[
            {"constant": element.key, "shipped": element.shipped, "record": element.here, "ratio": element.ratio}
            for element in known
        ],
        lead=f"The shipped ones are {source}. A ratio of 1: this device is as predictions without a record assume.",
    )


def _row(each: Constant) -> tuple[str, ...]:
    here = "" if each.here is None else each.words(each.here)
    ratio = "" if each.ratio is None else f"{each.ratio:.2f}"
    return (each.name, each.words(each.shipped), here, ratio)
