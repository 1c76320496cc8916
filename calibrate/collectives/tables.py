"""How are measured collectives, their fits, and what they do to kernels shown to people? A line each."""

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

_STILL: Final = 10.0
"""Part from which one waits for the other, and a percentage says nothing more."""


def row_line(row: CollectiveSample) -> str:
    """What was called, how long it took, and the payload over that time (nccl-tests' algbw)."""
    call, time = row.call, row.time
    rate = format_bandwidth(call.payload / time.seconds)
    times = f"{format_seconds(time.seconds):>9} ({format_seconds(time.p5)} to {format_seconds(time.p95)})"
    shares = f", {call.max_share:.2f} x an even part at most" if call.shares else ""
    what = f"{_named(call):<20}{format_bytes(call.payload):>10}  {_shape(call.ranks, call.nodes)}"
    return f"{what}  {times}  {rate}{shares}"


def fit_table(fits: Sequence[CollectiveFit]) -> str:
    """A line for each fit; a sentence where there is none."""
    if not fits:
        return "no fit: alpha and beta take three payloads of one collective and group"
    lines = [f"{'collective':<20}{'group':<20}{'alpha':>10}{'beta':>12}{'rows':>6}{'error':>8}{'left out':>10}"]
    for fit in fits:
        shape, residual = _shape(fit.ranks, fit.nodes), fit.residual
        constants = f"{format_seconds(fit.alpha):>10}{format_bandwidth(fit.beta):>12}"
        errors = f"{residual.rows:>6}{residual.error:>8.1%}{residual.left_out:>10.1%}"
        lines.append(f"{_named(fit):<20}{shape:<20}{constants}{errors}")
    return "\n".join(lines)


def uneven_table(rows: Sequence[CollectiveSample]) -> str:
    """By which part all-to-alls take longer where their parts are uneven; empty without any."""
    times = {row.call: row.time.seconds for row in rows}
    lines = [f"{'uneven parts':<20}{'payload':>10}  {'group':<20}{'largest':>10}{'longer':>10}"]
    for call, seconds in times.items():
        even = times.get(replace(call, shares=()))
        if call.shares and even is not None:
            what = f"{_named(call):<20}{format_bytes(call.payload):>10}  {_shape(call.ranks, call.nodes):<20}"
            lines.append(f"{what}{call.max_share:>8.2f} x{seconds / even - 1.0:>+10.0%}")
    return "\n".join(lines) if len(lines) > 1 else ""


def beside_line(row: InterferenceSample) -> str:
    """What was beside what, and by which part the kernel, and the collective, took longer."""
    call = "" if row.call_together is None else f", the collective {_longer(row.comm_slowdown)}"
    size = "" if row.call is None else format_bytes(row.call.payload)
    return f"{row.beside:<15}{size:>10}  beside {row.kernel.name}: it takes {_longer(row.kernel_slowdown)}{call}"


def beside_table(rows: Sequence[InterferenceSample]) -> str:
    """By which part kernels of each class, and collectives, take longer beside each other; empty without any."""
    kernels, calls = kernel_slowdowns(rows), comm_slowdowns(rows)
    if not kernels:
        return ""
    lines = [
        f"{'beside each other':<19}" + "".join(f"{kernel_class.value + ' kernels':>23}" for kernel_class in KernelClass)
    ]
    for kind in dict.fromkeys(kind for kind, _ in kernels):
        cells = (_both(kernels.get((kind, item)), calls.get((kind, item))) for item in KernelClass)
        lines.append(f"{kind.value:<19}" + "".join(f"{cell:>23}" for cell in cells))
    return "\n".join([*lines, "kernels take so much longer, and (in brackets) the collective, where it was measured"])


def _both(kernel: float | None, call: float | None) -> str:
    return "-" if kernel is None else _longer(kernel) + ("" if call is None else f" ({_longer(call)})")


def _longer(part: float) -> str:
    return f"+{part:.0%}" if part < _STILL else "stand still"


def _named(what: CollectiveCall | CollectiveFit) -> str:
    form = "" if what.format is DType.FP32 else f" {what.format.value}"
    return f"{what.collective.value}{form}"


def _shape(ranks: int, nodes: int) -> str:
    return f"{ranks} ranks, {nodes} node{'s' * (nodes > 1)}"
