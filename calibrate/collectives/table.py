"""How are measured collectives and their fits shown to people? A line each."""

from collections.abc import Sequence

from clustersim.cost.record import CollectiveFit, CollectiveRow
from clustersim.units import format_bandwidth, format_bytes, format_seconds


def row_line(row: CollectiveRow) -> str:
    """What was called, how long it took, and the payload over that time (nccl-tests' algbw)."""
    call, time = row.call, row.time
    rate = format_bandwidth(call.payload / time.seconds)
    times = f"{format_seconds(time.seconds):>9} ({format_seconds(time.p5)} to {format_seconds(time.p95)})"
    what = f"{call.collective.value:<15}{format_bytes(call.payload):>10}  {_shape(call.ranks, call.nodes)}"
    return f"{what}  {times}  {rate}"


def fit_table(fits: Sequence[CollectiveFit]) -> str:
    """A line for each fit; a sentence where there is none."""
    if not fits:
        return "no fit: alpha and beta take three payloads of one collective and group"
    lines = [f"{'collective':<15}{'group':<20}{'alpha':>10}{'beta':>12}{'rows':>6}{'error':>8}{'left out':>10}"]
    for fit in fits:
        shape, residual = _shape(fit.ranks, fit.nodes), fit.residual
        constants = f"{format_seconds(fit.alpha):>10}{format_bandwidth(fit.beta):>12}"
        errors = f"{residual.rows:>6}{residual.error:>8.1%}{residual.left_out:>10.1%}"
        lines.append(f"{fit.collective.value:<15}{shape:<20}{constants}{errors}")
    return "\n".join(lines)


def _shape(ranks: int, nodes: int) -> str:
    return f"{ranks} ranks, {nodes} node{'s' * (nodes > 1)}"
