"""What is measured of the device by itself, and which kernels are asked for?

Of the device: copies, the launch interval, a matmul beside a copy, how far the GPUs of the node differ. Kernels are
those of scenarios, of models, or of a grid that is cut to what the device can do; a format that it lacks has one row,
which says so.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Final

from calibrate.devices.device import TorchDevice
from calibrate.devices.gpu_variation import gpu_rows
from calibrate.kernels.copy_benchmark import copies, launch_interval
from calibrate.kernels.copy_interference import SIZES, beside_copy, typical_kernel, usual_kernel
from calibrate.kernels.kernel_grid import ROUGHLY, Pace, grid, in_format, of_presets, of_scenarios, one_of
from calibrate.kernels.measure import distinct, row
from calibrate.kernels.progress import Advance
from calibrate.kernels.session import Parts, Session, measured
from calibrate.kernels.timing import QUICK, Method
from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import (
    COPY,
    CalibrationRecord,
    KernelSample,
    KernelSignature,
    MeasurementOutcome,
    signature_of,
)
from clustersim.model import memory_bound
from clustersim.model.kernels import Kernel
from clustersim.scenario import Scenario

_GPU: Final = (
    DType.BF16,
    DType.FP16,
    DType.TF32,
    DType.FP32,
    *LOW_PRECISION_DTYPES,
)  # formats of a grid, the most used first
_CPU: Final = (DType.FP32, DType.BF16)
_GRID_PART: Final = 1 / 2500  # of the budget that one run may take: some hundred kernels, some runs of each
_COPYING: Final = 0.2  # seconds for each copy


@dataclass(frozen=True, slots=True)
class Wishes:
    """What is asked for: scenarios, models, the grid; budget: for kernels; formats: of the grid, none: all usual."""

    scenarios: Sequence[Scenario]
    presets: Sequence[str]
    grid: bool
    budget: Seconds
    formats: tuple[DType, ...] = ()


def measure(
    kernels: Sequence[Kernel],
    device: TorchDevice,
    *,
    method: Method | None = None,
    budget: Seconds | None = None,
    advance: Advance | None = None,
) -> list[KernelSample]:
    """Measure kernels, each signature once; rows in the order of the kernels.

    method: `timing.Method()` if none is given, `timing.QUICK` for a comparison within one run; budget: seconds for all
    of them (none: as long as the method takes); advance: is called after each with the name of the kernel.
    """
    rows = {}
    for made in measured(kernels, device, Parts(budget, ROUGHLY.seconds), method or Method()):
        rows[made.signature] = made
        if advance is not None:
            advance(made.name)
    return [rows[known] for known in dict.fromkeys(map(signature_of, kernels)) if known in rows]


def kernels_for(wishes: Wishes, device: TorchDevice) -> list[Kernel]:
    """Everything that was asked for, each signature once."""
    kernels = [*of_scenarios(wishes.scenarios), *of_presets(wishes.presets)]
    if wishes.grid:
        kernels += _grid(wishes, device)
    return distinct(kernels)


def _grid(wishes: Wishes, device: TorchDevice) -> list[Kernel]:
    """The grid in the formats that are wished for, and a product of each that the device lacks."""
    usual = _CPU if _is_cpu(device) else _GPU
    wanted = wishes.formats or usual
    there = [dtype for dtype in dict.fromkeys((*usual, *wanted)) if device.supports(dtype)]
    found = grid(there, pace(device, there[0]), wishes.budget * _GRID_PART)
    lacking = (one_of(dtype) for dtype in wanted if dtype not in there)
    return [*(kernel for kernel in found if not wishes.formats or in_format(kernel) in wanted), *lacking]


def failing(record: CalibrationRecord) -> frozenset[KernelSignature]:
    """Kernels after which the device was lost; they are not run again."""
    return frozenset(row.signature for row in record.kernels if row.outcome is MeasurementOutcome.FAILED)


def pace(device: TorchDevice, dtype: DType, failed: Container[KernelSignature | None] = ()) -> Pace:
    """How fast the device is, by one product and one sum; roughly, where one of them has failed."""
    size = SIZES[device.torch.type]
    product = usual_kernel(dtype, size)
    total = memory_bound.GRADIENT_SUM.forward_kernel(
        "pace.sum", dtype, memory_bound.GRADIENT_SUM.shape_for(2 * size, 2 * size)
    )
    flops, bandwidth = (
        None if signature_of(kernel) in failed else row(kernel, device, QUICK).time for kernel in (product, total)
    )
    return Pace(
        ROUGHLY.flops if flops is None else product.flops / flops.seconds,
        ROUGHLY.bandwidth if bandwidth is None else total.bytes / bandwidth.seconds,
    )


def measure_machine(session: Session, device: TorchDevice, method: Method, seconds: Seconds) -> None:
    """The launch interval, a matmul beside a copy, the node's GPUs, and copies for so many seconds; each once."""
    known = session.gathered()
    empty = CalibrationRecord(known.device, known.conditions)
    if known.launch_interval is None:
        session.extend(replace(empty, launch_interval=launch_interval(device)))
    typical = typical_kernel(device)
    if not any(interference_sample.beside == COPY for interference_sample in known.beside) and signature_of(
        typical
    ) not in failing(known):
        found = beside_copy(typical, device, method)
        session.extend(replace(empty, beside=() if found is None else (found,)))
    if not (known.gpus or _is_cpu(device)):
        session.extend(replace(empty, gpus=gpu_rows(device)))
    there, began = {(copy.route, copy.bytes) for copy in known.copies}, monotonic()
    for copied in copies(device, replace(method, seconds=_COPYING), there):
        session.extend(replace(empty, copies=(copied,)))
        if monotonic() - began > seconds:
            break
    session.save()


def has_machine(record: CalibrationRecord, device: TorchDevice) -> bool:
    """Whether a record has what `measure_machine` measures."""
    failed = signature_of(typical_kernel(device)) in failing(record)
    beside = failed or any(interference_sample.beside == COPY for interference_sample in record.beside)
    return bool(record.launch_interval and record.copies and beside and (record.gpus or _is_cpu(device)))


def _is_cpu(device: TorchDevice) -> bool:
    return device.torch.type == "cpu"
