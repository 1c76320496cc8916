"""What does a record hold that nobody measured, but somebody's function computes?

A row for each kernel that has a shape, by which records know kernels again. What the function leaves to the model
(None), and what has no shape, the record does not have.
"""

from collections.abc import Callable, Iterable
from math import isfinite

from clustersim.common.errors import InputError, shown
from clustersim.common.plugins import refusing
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import (
    Conditions,
    Device,
    KernelRow,
    Origin,
    Record,
    Signature,
    Spread,
    signature,
)
from clustersim.model.kernels import Kernel


def computed(
    seconds: Callable[[Kernel], Seconds | None], kernels: Iterable[Kernel], *, accelerator: str, words: str
) -> Record:
    """The record of an accelerator whose kernels take what a function says alone; words: what the function is.

    Raises InputError where the function raises, or gives what is no time above zero.
    """
    rows: dict[Signature, KernelRow] = {}
    for kernel in kernels:
        sought = signature(kernel)
        if sought is not None and sought not in rows and (taken := _taken(seconds, kernel)) is not None:
            rows[sought] = _row(kernel, sought, taken)
    device, conditions = Device(accelerator, words), Conditions(date="", command="", method="computed")
    return Record(device, conditions, tuple(rows.values()), origin=Origin.DERIVED, derivation=words)


def _taken(seconds: Callable[[Kernel], Seconds | None], kernel: Kernel) -> Seconds | None:
    """What the function says of a kernel."""
    with refusing(f"{getattr(seconds, '__name__', 'the function')}({kernel.name})"):
        taken = seconds(kernel)
        if taken is None:
            return None
        if not (isfinite(taken) and taken > 0.0):
            raise InputError(f"{shown(taken)} is no time above zero, in seconds; None leaves the kernel to the model")
        return float(taken)


def _row(kernel: Kernel, named: Signature, taken: Seconds) -> KernelRow:
    return KernelRow(
        kernel.name,
        *(named.kind, named.dtype, named.shape),
        *(kernel.flops, kernel.bytes, kernel.launches),
        time=Spread(taken, taken, taken, repetitions=1),
    )
