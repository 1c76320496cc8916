"""How is a run of weeks summarized on the terminal? Duration, time losses, failures, and what would help."""

from math import isinf
from typing import TYPE_CHECKING, Final

from clustersim.common.units import (
    Seconds,
    format_bytes,
    format_energy,
    format_number,
    format_seconds,
    format_step_time,
)
from clustersim.report.economics_labels import format_money, format_tokens
from clustersim.report.terminal.table import build_table, plain_text
from clustersim.results.goodput import SECONDS_PER_DAY, GoodputResult

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

LOSS_LABELS: Final = {
    "checkpoints": ("checkpoints", "#E69F00"),
    "lost_work": ("lost work", "#D55E00"),
    "detection": ("failure detection", "#CC79A7"),
    "restart": ("restarts", "#AA3377"),
    "waiting": ("waiting for nodes", "#6B7280"),
    "maintenance": ("maintenance", "#8D96A0"),
    "degraded": ("running slower than healthy", "#F0E442"),
    "spares": ("spare nodes", "#BFC6CD"),
}
"""Label and colour of each time loss."""
_MAX_FAILURE_KINDS: Final = 8  # maximum number of failure kinds listed
_MIN_SHARE: Final = 5e-5  # relative to the wall time: smaller losses are omitted


def headline(result: GoodputResult) -> str:
    """Duration of the run in one sentence."""
    if 2 * result.finished_count < len(result.runs):
        sentence = f"{format_tokens(result.tokens)} tokens are not reached"
        return f"{sentence}: after {result.days['p50']:.1f} days goodput is {result.goodput:.1%}"
    days = result.days
    low, middle, high = (days[name] for name in ("p10", "p50", "p90"))
    range_label = f"{low:.1f} to {high:.1f}" if f"{low:.1f}" != f"{high:.1f}" else f"{middle:.1f}"
    return f"{format_tokens(result.tokens)} tokens take {middle:.1f} days (P10 to P90: {range_label})"


def format_cost(result: GoodputResult) -> str:
    """Cost of the run; empty if no price is known."""
    cost = result.cost
    if cost is None:
        return ""
    return (
        f"{format_money(cost['p50'], result.currency)} ({format_number(cost['p10'])} to {format_number(cost['p90'])})"
    )


def key_number_rows(result: GoodputResult) -> list[tuple[str, str, str]]:
    """Name, value and meaning of the key numbers."""
    mttf, energy, checkpoint = result.mttf, result.energy, result.checkpoint
    formulas = f"Young {format_seconds(checkpoint.young)}, Daly {format_seconds(checkpoint.daly)}"
    drain = f", is stored {format_seconds(checkpoint.drain)} later" if checkpoint.drain else ""
    checkpoint_costs = (
        f"blocks steps for {format_seconds(checkpoint.blocking)}{drain}, is loaded in {format_seconds(checkpoint.load)}"
    )
    nodes = result.nodes + result.spare_nodes
    rows = [
        ("goodput", f"{result.goodput:.1%}", "of the wall time is productive work at full speed"),
        ("ETTR", f"{result.ettr:.1%}", "of the wall time is productive steps, slower ones included"),
        (
            "without failures",
            f"{result.ideal_seconds / SECONDS_PER_DAY:.1f} days",
            f"at {format_step_time(result.step_time)} a step",
        ),
        (
            "MTTF",
            "never" if mttf is None else format_seconds(mttf),
            f"{result.interruption_count:,.0f} interruptions, {sum(result.failures.values()):,.0f} failures",
        ),
        (
            "checkpoint every",
            format_seconds(checkpoint.interval),
            "no failures" if isinf(checkpoint.young) else formulas,
        ),
        ("a checkpoint", format_bytes(checkpoint.size), checkpoint_costs),
        ("spare nodes", f"{result.spare_nodes:,}", f"of {nodes:,}; goodput of all {result.goodput_with_spares:.1%}"),
    ]
    if result.cost is not None:
        rows.append(("cost", format_cost(result), "of all GPUs including spares: median, P10 to P90"))
    if energy is not None:
        rows.append(("energy", format_energy(energy), "GPUs, nodes and facility, up and down"))
    if result.missing:
        rows.append(("unknown", "", "; ".join(result.missing)))
    return rows


def loss_shares(result: GoodputResult) -> list[tuple[str, Seconds, float]]:
    """Time losses with seconds of a run and their share of its wall time; negligible ones are omitted."""
    wall = result.mean_over_runs([run.wall for run in result.runs])
    shares = ((name, seconds, seconds / wall) for name, seconds in result.loss_seconds.items())
    return [loss for loss in shares if loss[2] >= _MIN_SHARE]


def render_goodput(result: GoodputResult) -> "Group":
    """Rich renderable: coloured on a terminal, plain elsewhere."""
    from rich.console import Group

    renderables: list[RenderableType] = [] if result.complete else [plain_text("stopped before the last run", "yellow")]
    renderables += [plain_text(headline(result), "bold"), plain_text(describe_subject(result), "dim"), plain_text("")]
    renderables += [build_table(("", "", ""), key_number_rows(result), right_aligned=(1,)), plain_text("")]
    productive = "productive work", result.mean_over_runs([run.work for run in result.runs]), result.goodput
    time_shares = [
        productive,
        *((LOSS_LABELS[name][0], seconds, share) for name, seconds, share in loss_shares(result)),
    ]
    share_rows = [(label, format_seconds(seconds), f"{share:.1%}") for label, seconds, share in time_shares]
    renderables += [
        build_table(("wall time of a run", "", "share"), share_rows, right_aligned=(1, 2)),
        plain_text(""),
    ]
    failure_rows = [(name, f"{mean_count:,.1f}") for name, mean_count in result.failures.items()]
    renderables += [build_table(("failure", "per run"), failure_rows[:_MAX_FAILURE_KINDS], right_aligned=(1,))]
    if len(failure_rows) > _MAX_FAILURE_KINDS:
        renderables.append(plain_text(f"and {len(failure_rows) - _MAX_FAILURE_KINDS} kinds more", "dim"))
    if result.changes:
        renderables += [
            plain_text(""),
            build_table(("what if", "days", "difference"), change_rows(result), right_aligned=(1, 2)),
        ]
    renderables += [plain_text(f"note: {warning}", "yellow") for warning in result.warnings]
    return Group(*renderables)


def change_rows(result: GoodputResult) -> list[tuple[str, str, str]]:
    """Changed setting, mean days with it, and the difference in days."""
    return [
        (change.description, f"{change.days:.1f}", f"{change.days - change.baseline_days:+.1f}")
        for change in result.changes
    ]


def describe_subject(result: GoodputResult) -> str:
    """GPU count, number of runs, seed and failure preset."""
    return (
        f"{result.gpus:,} GPUs, {len(result.runs):,} runs, seed {result.seed}, failures as in preset "
        f"{result.preset}, in "
        f"{format_seconds(result.wall_seconds)}"
    )
