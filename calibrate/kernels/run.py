"""What does a session of kernels measure, and in which order?

First the machine: copies, the launch interval, a matmul beside a copy. Then the kernels that were asked for and that
the record lacks, the longest first. At the end the models of kernels are fitted to all rows.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from calibrate.devices.device import TorchDevice
from calibrate.fit.record import fitted
from calibrate.kernels.beside import SIZES, beside_copy, typical_kernel, usual_kernel
from calibrate.kernels.copies import copies, launch_interval
from calibrate.kernels.progress import shown
from calibrate.kernels.rows import distinct, row
from calibrate.kernels.session import Parts, Session, measured
from calibrate.kernels.shapes import ROUGHLY, Pace, grid, of_presets, of_scenarios
from calibrate.kernels.timing import QUICK, Method
from clustersim.cost.record import COPY, Record
from clustersim.cost.roofline import Roofline
from clustersim.dtypes import DType
from clustersim.hardware.accelerator import Accelerator
from clustersim.units import Seconds
from clustersim.workload import streaming
from clustersim.workload.kernels import Kernel

_GPU: Final = (DType.BF16, DType.FP16, DType.TF32, DType.FP32, DType.FP8)  # formats of a grid, the most used first
_CPU: Final = (DType.FP32, DType.BF16)
_GRID_PART: Final = 1 / 2500  # of the budget that one run may take: some hundred kernels, some runs of each
_COPYING: Final = 0.2  # seconds for each copy


@dataclass(frozen=True, slots=True)
class Wishes:
    """What is asked for: scenarios' files with overrides, models, the grid; budget: for kernels."""

    scenarios: Sequence[str]
    overrides: Sequence[str]
    presets: Sequence[str]
    grid: bool
    budget: Seconds


def run(session: Session, device: TorchDevice, wishes: Wishes, method: Method, accelerator: Accelerator) -> Record:
    """Measure what the record lacks, and fit it; accelerator: from which the fit starts."""
    session.save()  # a file that cannot be written is known now, not after the measuring
    asked = kernels_for(wishes, device)
    measure_machine(session, device, method)
    missing = session.missing(asked)
    _say(session, f"has {len(asked) - len(missing)} of {len(asked)} kernels already", len(asked) - len(missing))
    roofline = Roofline(accelerator)
    rough = pace(device, typical_kernel(device).dtype)
    parts = Parts(wishes.budget, lambda kernel: max(roofline.kernel(kernel).seconds, rough.seconds(kernel)))
    with shown("kernels", len(missing)) as advance:
        for made in measured(missing, device, parts, method):
            session.add(made)
            advance(made.name)
    left = len(session.missing(asked))
    again = "the same command goes on with them, a larger --budget has room for long ones"
    _say(session, f"lacks {left} kernels that the budget had no time for; {again}", left)
    return session.finish(device.conditions(), lambda record: fitted(record, accelerator))


def kernels_for(wishes: Wishes, device: TorchDevice) -> list[Kernel]:
    """Everything that was asked for, each signature once."""
    kernels = [*of_scenarios(wishes.scenarios, wishes.overrides), *of_presets(wishes.presets)]
    if wishes.grid:
        formats = [dtype for dtype in (_CPU if _is_cpu(device) else _GPU) if device.supports(dtype)]
        kernels += grid(formats, pace(device, formats[0]), wishes.budget * _GRID_PART)
    return distinct(kernels)


def pace(device: TorchDevice, dtype: DType) -> Pace:
    """How fast the device is, by one product and one sum."""
    size = SIZES[device.torch.type]
    product = usual_kernel(dtype, size)
    total = streaming.GRADIENT_SUM.forward_kernel("pace.sum", dtype, streaming.GRADIENT_SUM.over(2 * size, 2 * size))
    flops, bandwidth = row(product, device, QUICK).time, row(total, device, QUICK).time
    return Pace(
        ROUGHLY.flops if flops is None else product.flops / flops.seconds,
        ROUGHLY.bandwidth if bandwidth is None else total.bytes / bandwidth.seconds,
    )


def measure_machine(session: Session, device: TorchDevice, method: Method) -> None:
    """Copies, the launch interval, a matmul beside a copy, each where the record has none yet."""
    known = session.record
    empty = Record(known.device, known.conditions)
    if known.launch_interval is None:
        session.extend(replace(empty, launch_interval=launch_interval(device)))
    for copied in copies(
        device, replace(method, seconds=_COPYING), {(each.route, each.bytes) for each in known.copies}
    ):
        session.extend(replace(empty, copies=(copied,)))
    if not any(each.beside == COPY for each in known.beside):
        found = beside_copy(typical_kernel(device), device, method)
        session.extend(replace(empty, beside=() if found is None else (found,)))
    session.save()


def _is_cpu(device: TorchDevice) -> bool:
    return device.torch.type == "cpu"


def _say(session: Session, what: str, many: int) -> None:
    if many:
        print(f"{session.path} {what}", file=sys.stderr)
