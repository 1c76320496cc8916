"""Selection of the kernels to measure, and measurements of the device itself.

Of the device: copies, the launch interval, a matmul overlapped with a copy, and the variation between the
GPUs of the node. Kernels are those of scenarios, of models, or of a grid that is limited to what the device
can do in the time; a format that the device lacks has one sample, which says so.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Final

from calibrate.devices.device import TorchDevice
from calibrate.devices.gpu_variation import measure_gpu_variation
from calibrate.kernels.copy_benchmark import measure_copies, measure_launch_interval
from calibrate.kernels.copy_interference import MATMUL_SIZES, measure_copy_interference, square_matmul, typical_kernel
from calibrate.kernels.kernel_grid import (
    DEFAULT_RATES,
    DeviceRates,
    grid_kernels,
    kernel_format,
    preset_kernels,
    probe_matmul,
    scenario_kernels,
)
from calibrate.kernels.measure import distinct_kernels, measure_kernel
from calibrate.kernels.session import KernelSession
from calibrate.kernels.timing import QUICK, MeasurementMethod
from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import COPY, CalibrationRecord, KernelSignature, signature_of
from clustersim.cost.record_kinds import MeasurementOutcome
from clustersim.model import memory_bound
from clustersim.model.kernels import Kernel
from clustersim.scenario import Scenario

_GPU_FORMATS: Final = (
    DType.BF16,
    DType.FP16,
    DType.TF32,
    DType.FP32,
    *LOW_PRECISION_DTYPES,
)  # formats of the grid, the most used first
_CPU_FORMATS: Final = (DType.FP32, DType.BF16)
_MAX_BUDGET_FRACTION: Final = 1 / 2500  # of the budget, for one run: some hundred kernels with some runs each
_COPY_SECONDS: Final = 0.2  # seconds per copy size


@dataclass(frozen=True, slots=True)
class KernelRequest:
    """Requested scenarios, models and grid; budget: seconds for kernels; formats: of the grid, empty: defaults."""

    scenarios: Sequence[Scenario]
    presets: Sequence[str]
    include_grid: bool
    budget: Seconds
    formats: tuple[DType, ...] = ()


def requested_kernels(request: KernelRequest, device: TorchDevice) -> list[Kernel]:
    """All requested kernels, each signature once."""
    kernels = [*scenario_kernels(request.scenarios), *preset_kernels(request.presets)]
    if request.include_grid:
        kernels += _grid_kernels(request, device)
    return distinct_kernels(kernels)


def _grid_kernels(request: KernelRequest, device: TorchDevice) -> list[Kernel]:
    """The grid in the requested formats, and one matmul of each format that the device lacks."""
    defaults = _CPU_FORMATS if _is_cpu(device) else _GPU_FORMATS
    requested = request.formats or defaults
    supported = [dtype for dtype in dict.fromkeys((*defaults, *requested)) if device.supports(dtype)]
    kernels = grid_kernels(supported, measure_rough_rates(device, supported[0]), request.budget * _MAX_BUDGET_FRACTION)
    unsupported = (probe_matmul(dtype) for dtype in requested if dtype not in supported)
    return [*(kernel for kernel in kernels if not request.formats or kernel_format(kernel) in requested), *unsupported]


def failed_signatures(record: CalibrationRecord) -> frozenset[KernelSignature]:
    """Signatures of kernels after which the device was lost; they are not run again."""
    return frozenset(sample.signature for sample in record.kernels if sample.outcome is MeasurementOutcome.FAILED)


def measure_rough_rates(
    device: TorchDevice, dtype: DType, failed_signatures: Container[KernelSignature | None] = ()
) -> DeviceRates:
    """Approximate FLOP/s and bandwidth, by one matmul and one reduction; defaults if one has failed."""
    size = MATMUL_SIZES[device.torch.type]
    matmul = square_matmul(dtype, size)
    reduction = memory_bound.GRADIENT_SUM.forward_kernel(
        "pace.sum", dtype, memory_bound.GRADIENT_SUM.shape_for(2 * size, 2 * size)
    )
    flops, bandwidth = (
        None if signature_of(kernel) in failed_signatures else measure_kernel(kernel, device, QUICK).time
        for kernel in (matmul, reduction)
    )
    return DeviceRates(
        DEFAULT_RATES.flops if flops is None else matmul.flops / flops.seconds,
        DEFAULT_RATES.bandwidth if bandwidth is None else reduction.bytes / bandwidth.seconds,
    )


def measure_device(session: KernelSession, device: TorchDevice, method: MeasurementMethod, seconds: Seconds) -> None:
    """Measure the launch interval, copy interference, the node's GPUs, and copies for some seconds; each once."""
    record = session.merged_record()
    empty = CalibrationRecord(record.device, record.conditions)
    if record.launch_interval is None:
        session.extend(replace(empty, launch_interval=measure_launch_interval(device)))
    kernel = typical_kernel(device)
    if not any(
        interference_sample.overlapped_with == COPY for interference_sample in record.interference
    ) and signature_of(kernel) not in failed_signatures(record):
        interference = measure_copy_interference(kernel, device, method)
        session.extend(replace(empty, interference=() if interference is None else (interference,)))
    if not (record.gpus or _is_cpu(device)):
        session.extend(replace(empty, gpus=measure_gpu_variation(device)))
    measured_copies, started = {(copy.route, copy.bytes) for copy in record.copies}, monotonic()
    for copy_sample in measure_copies(device, replace(method, max_seconds=_COPY_SECONDS), measured_copies):
        session.extend(replace(empty, copies=(copy_sample,)))
        if monotonic() - started > seconds:
            break
    session.save()


def has_device_samples(record: CalibrationRecord, device: TorchDevice) -> bool:
    """Whether a record has what `measure_device` measures."""
    failed = signature_of(typical_kernel(device)) in failed_signatures(record)
    has_interference = failed or any(
        interference_sample.overlapped_with == COPY for interference_sample in record.interference
    )
    return bool(record.launch_interval and record.copies and has_interference and (record.gpus or _is_cpu(device)))


def _is_cpu(device: TorchDevice) -> bool:
    return device.torch.type == "cpu"
