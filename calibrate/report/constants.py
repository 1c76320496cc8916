"""How does this device differ from the constants that clustersim has for its accelerator?

Each constant of the kernel model as in the accelerator's file (fitted to published measurements, or from a
datasheet), next to the same constant fitted to the record's samples. Rates are compared as absolute rates: a
fraction of a peak says nothing where the peaks differ. *Sustained* is the arithmetic rate in a step relative
to single kernels: from the record, the isolated over the in-situ time of its matmuls.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import Final

from calibrate.report.section import ReportSection
from clustersim.common.dtypes import DType
from clustersim.common.units import format_bandwidth, format_flops, format_seconds
from clustersim.cost.calibration_record import CalibrationRecord, KernelFit, KernelSample, kernel_slowdowns
from clustersim.cost.matmul_tiles import matmul_rate
from clustersim.hardware.accelerator import Accelerator
from clustersim.model.kernels import KernelKind

_ATTENTION_KINDS: Final = (KernelKind.ATTENTION_FORWARD, KernelKind.ATTENTION_BACKWARD)


@dataclass(frozen=True, slots=True)
class ComparedConstant:
    """A constant and its formatter.

    reference: in the accelerator's file; measured: of the record, None: not measured.
    """

    key: str
    name: str
    format_value: Callable[[float], str]
    reference: float
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """The measured value over the reference."""
        return None if self.measured is None or not self.reference else self.measured / self.reference


def compare_constants(record: CalibrationRecord, reference: Accelerator) -> list[ComparedConstant]:
    """Constants of the record's device and of the reference."""
    compared = [*_step_constants(record, reference)]
    if record.kernel_fit is not None:
        compared = [*_kernel_model_constants(record, record.kernel_fit, reference), *compared]
    return compared


def _kernel_model_constants(
    record: CalibrationRecord, fit: KernelFit, reference: Accelerator
) -> Iterator[ComparedConstant]:
    """Constants of the kernel model, for formats that were measured."""
    fitted_accelerator = replace(
        reference,
        peak=fit.peak,
        memory_bandwidth=fit.memory_bandwidth,
        compute_units=fit.compute_units,
        efficiency=fit.efficiency,
    )
    samples = [sample for sample in record.kernels if sample.time is not None]
    for dtype in _measured_dtypes(samples, KernelKind.MATMUL, reference, fitted_accelerator):
        rates = (matmul_rate(accelerator, dtype) for accelerator in (reference, fitted_accelerator))
        yield ComparedConstant(f"matmul_{dtype.value}", f"matmul {dtype.value}, largest tile", format_flops, *rates)
    for kind in _ATTENTION_KINDS:
        for dtype in _measured_dtypes(samples, kind, reference, fitted_accelerator):
            rates = (
                accelerator.peak_flops(dtype) * _attention_share(accelerator, kind)
                for accelerator in (reference, fitted_accelerator)
            )
            name = f"{kind.value.replace('_', ' ')} {dtype.value}, main loop"
            yield ComparedConstant(f"{kind.value}_{dtype.value}", name, format_flops, *rates)
    bandwidths = (
        accelerator.efficiency.operator_bandwidth(accelerator.memory_bandwidth)
        for accelerator in (reference, fitted_accelerator)
    )
    yield ComparedConstant("memory", "memory, memory-bound kernels", format_bandwidth, *bandwidths)
    latencies = (accelerator.efficiency.kernel_latency for accelerator in (reference, fitted_accelerator))
    yield ComparedConstant("kernel_latency", "latency of a kernel", format_seconds, *latencies)


def _measured_dtypes(samples: list[KernelSample], kind: KernelKind, *accelerators: Accelerator) -> list[DType]:
    """Formats with measured kernels of a kind, for which both accelerators have a rate."""
    dtypes = dict.fromkeys(sample.dtype for sample in samples if sample.kind is kind)
    return [dtype for dtype in dtypes if all(dtype in accelerator.formats for accelerator in accelerators)]


def _attention_share(accelerator: Accelerator, kind: KernelKind) -> float:
    efficiency = accelerator.efficiency
    forward = kind is KernelKind.ATTENTION_FORWARD
    return (efficiency.attention_forward if forward else efficiency.attention_backward).peak_fraction


def _step_constants(record: CalibrationRecord, reference: Accelerator) -> Iterator[ComparedConstant]:
    """Constants of kernels within a step, and across GPUs."""
    interval = record.launch_interval
    yield ComparedConstant(
        "launch_interval", "launch interval", format_seconds, reference.efficiency.launch_interval, interval
    )
    matmul_samples = [sample for sample in record.in_situ if sample.family.startswith(KernelKind.MATMUL.value)]
    sustained_ratio = (
        sum(sample.isolated for sample in matmul_samples) / sum(sample.in_situ for sample in matmul_samples)
        if matmul_samples
        else None
    )
    yield ComparedConstant(
        "sustained_ratio",
        "matmuls in a step, rate relative to isolated ones",
        _format_ratio,
        reference.derating.sustained_ratio,
        sustained_ratio,
    )
    slowdowns = kernel_slowdowns(record.interference).values()
    mean_slowdown = fmean(slowdowns) if slowdowns else None
    yield ComparedConstant(
        "interference",
        "slowdown of kernels by concurrent collectives",
        _format_percent,
        reference.interference,
        mean_slowdown,
    )
    times = [sample.time.seconds for sample in record.gpus]
    relative_std = pstdev(times) / fmean(times) if len(times) > 1 else None
    yield ComparedConstant(
        "gpu_spread", "GPU to GPU, standard deviation", _format_percent, reference.derating.gpu_spread, relative_std
    )


def _format_ratio(value: float) -> str:
    return f"{value:.3f}"


def _format_percent(value: float) -> str:
    return f"{value:.1%}"


def constants_section(record: CalibrationRecord, reference: Accelerator) -> ReportSection:
    """The measured constants, with ratios."""
    measured_constants = [
        constant for constant in compare_constants(record, reference) if constant.measured is not None
    ]
    source = (
        "fitted to published measurements"
        if reference.efficiency.published
        else "from datasheets and accelerators of the same architecture"
    )
    return ReportSection(
        key="constants",
        title="Compared with the packaged constants",
        heads=("constant", f"packaged for {reference.name}", "this record", "ratio"),
        rows=tuple(_constant_row(constant) for constant in measured_constants),
        content=[
            {
                "constant": constant.key,
                "packaged": constant.reference,
                "record": constant.measured,
                "ratio": constant.ratio,
            }
            for constant in measured_constants
        ],
        lead=f"The packaged ones are {source}. A ratio of 1: this device is as predictions without a record assume.",
    )


def _constant_row(constant: ComparedConstant) -> tuple[str, ...]:
    measured_text = "" if constant.measured is None else constant.format_value(constant.measured)
    ratio_text = "" if constant.ratio is None else f"{constant.ratio:.2f}"
    return (constant.name, constant.format_value(constant.reference), measured_text, ratio_text)
