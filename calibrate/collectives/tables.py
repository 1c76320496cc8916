"""How are measured collectives, their fits, and interference with kernels printed? One line each."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from clustersim.common.dtypes import DType
from clustersim.common.units import format_bandwidth, format_bytes, format_seconds
from clustersim.cost.calibration_record import (
    CollectiveCall,
    CollectiveFit,
    CollectiveSample,
    InterferenceSample,
    comm_slowdowns,
    kernel_slowdowns,
)
from clustersim.cost.interference import KernelClass

_STALL_SLOWDOWN: Final = 10.0
"""Slowdown from which on the kernel or collective counts as stalled, and a percentage says nothing more."""


def format_collective_sample(sample: CollectiveSample) -> str:
    """The call, its time, and payload over time (nccl-tests' algbw)."""
    call, time = sample.call, sample.time
    rate = format_bandwidth(call.payload / time.seconds)
    times = f"{format_seconds(time.seconds):>9} ({format_seconds(time.p5)} to {format_seconds(time.p95)})"
    imbalance_text = f", {call.max_share:.2f} x an even part at most" if call.shares else ""
    label = f"{_collective_label(call):<20}{format_bytes(call.payload):>10}  {_group_label(call.ranks, call.nodes)}"
    return f"{label}  {times}  {rate}{imbalance_text}"


def fit_table(fits: Sequence[CollectiveFit]) -> str:
    """One line per fit; a sentence where there is none."""
    if not fits:
        return "no fit: alpha and beta take three payloads of one collective and group"
    lines = [f"{'collective':<20}{'group':<20}{'alpha':>10}{'beta':>12}{'samples':>9}{'error':>8}{'LOO':>10}"]
    for fit in fits:
        shape, residual = _group_label(fit.ranks, fit.nodes), fit.residual
        constants = f"{format_seconds(fit.alpha):>10}{format_bandwidth(fit.beta):>12}"
        errors = f"{residual.samples:>9}{residual.error:>8.1%}{residual.leave_one_out_error:>10.1%}"
        lines.append(f"{_collective_label(fit):<20}{shape:<20}{constants}{errors}")
    return "\n".join(lines)


def imbalance_table(samples: Sequence[CollectiveSample]) -> str:
    """Slowdown of all-to-alls with imbalanced shards; empty without any."""
    times = {sample.call: sample.time.seconds for sample in samples}
    lines = [f"{'imbalanced shares':<20}{'payload':>10}  {'group':<20}{'max/mean':>10}{'slowdown':>10}"]
    for call, seconds in times.items():
        balanced = times.get(replace(call, shares=()))
        if call.shares and balanced is not None:
            label = (
                f"{_collective_label(call):<20}{format_bytes(call.payload):>10}  "
                f"{_group_label(call.ranks, call.nodes):<20}"
            )
            lines.append(f"{label}{call.max_share:>8.2f} x{seconds / balanced - 1.0:>+10.0%}")
    return "\n".join(lines) if len(lines) > 1 else ""


def format_interference_sample(sample: InterferenceSample) -> str:
    """The overlapped kernel and collective, and the slowdown of each."""
    comm_text = (
        "" if sample.overlapped_call_time is None else f", the collective {_format_slowdown(sample.comm_slowdown)}"
    )
    size = "" if sample.call is None else format_bytes(sample.call.payload)
    return (
        f"{sample.overlapped_with:<15}{size:>10}  overlapped with {sample.kernel.name}: slowdown "
        f"{_format_slowdown(sample.kernel_slowdown)}{comm_text}"
    )


def interference_table(samples: Sequence[InterferenceSample]) -> str:
    """Slowdowns of kernels of each class and of collectives when they overlap; empty without any."""
    kernels, calls = kernel_slowdowns(samples), comm_slowdowns(samples)
    if not kernels:
        return ""
    lines = [f"{'overlapped':<19}" + "".join(f"{kernel_class.value + ' kernels':>23}" for kernel_class in KernelClass)]
    for kind in dict.fromkeys(kind for kind, _ in kernels):
        cells = (
            _slowdown_cell(kernels.get((kind, kernel_class)), calls.get((kind, kernel_class)))
            for kernel_class in KernelClass
        )
        lines.append(f"{kind.value:<19}" + "".join(f"{cell:>23}" for cell in cells))
    return "\n".join([*lines, "slowdown of kernels, and (in brackets) of the collective, where it was measured"])


def _slowdown_cell(kernel_slowdown: float | None, comm_slowdown: float | None) -> str:
    return (
        "-"
        if kernel_slowdown is None
        else _format_slowdown(kernel_slowdown)
        + ("" if comm_slowdown is None else f" ({_format_slowdown(comm_slowdown)})")
    )


def _format_slowdown(slowdown: float) -> str:
    return f"+{slowdown:.0%}" if slowdown < _STALL_SLOWDOWN else "stalls"


def _collective_label(call: CollectiveCall | CollectiveFit) -> str:
    suffix = "" if call.dtype is DType.FP32 else f" {call.dtype.value}"
    return f"{call.collective.value}{suffix}"


def _group_label(ranks: int, nodes: int) -> str:
    return f"{ranks} ranks, {nodes} node{'s' * (nodes > 1)}"
