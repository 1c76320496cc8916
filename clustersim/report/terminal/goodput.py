"""How is a run of weeks summarized on the terminal? Duration, time losses, failures, and what would help."""

from collections.abc import Callable, Mapping
from math import isinf
from typing import TYPE_CHECKING, Final

from clustersim.common.units import Seconds, format_bytes, format_energy, format_seconds, format_step_time
from clustersim.hardware.prices import PriceKind, PriceQuote
from clustersim.report.economics_labels import format_money, format_rounded_amount, format_tokens
from clustersim.report.terminal.table import build_table, plain_text
from clustersim.results.goodput import INTERVAL, SECONDS_PER_DAY, GoodputResult

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
    return f"{format_tokens(result.tokens)} tokens take {result.days['p50']:.1f} days, {describe_days(result)}"


def describe_days(result: GoodputResult) -> str:
    """The 90 % intervals of the duration."""
    return _describe_intervals(result.days, result.days_with_step_error, _format_days)


def _describe_intervals(
    failures_alone: Mapping[str, float], with_step_error: Mapping[str, float], format_value: Callable[[float], str]
) -> str:
    total, failures = (
        " to ".join(format_value(values[name]) for name in INTERVAL) for values in (with_step_error, failures_alone)
    )
    return f"{total} with the step's uncertainty; {failures} from failures alone"


def _format_days(days: float) -> str:
    return f"{days:.1f}"


def cost_rows(result: GoodputResult) -> list[tuple[str, str, str]]:
    """Which price it is, the median cost of the run at it, and its intervals; a row for each price that is known."""
    return [_cost_row(result, quote) for quote in result.price_quotes]


def _cost_row(result: GoodputResult, quote: PriceQuote) -> tuple[str, str, str]:
    cost, with_step_error = (result.cost_of(days, quote) for days in (result.days, result.days_with_step_error))
    intervals = _describe_intervals(cost, with_step_error, format_rounded_amount)
    return (
        f"cost, {quote.kind.value} price",
        f"{format_rounded_amount(cost['p50'])} {quote.price.currency}",
        f"{intervals}; {format_money(quote.price.amount, quote.price.currency)}/GPU h of all GPUs and spares: "
        f"{quote.source}",
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
    rows += cost_rows(result)
    if result.price_quotes and all(quote.kind is PriceKind.LIST for quote in result.price_quotes):
        rows.append(("cost, contract price", "", "set economics.price_per_gpu_hour to yours, e.g. '2.49 USD'"))
    if energy is not None:
        rows.append(("energy", format_energy(energy), "GPUs, nodes and facility, while running and while down"))
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

    renderables: list[RenderableType] = [] if result.complete else [plain_text("stopped before the end", "yellow")]
    renderables += [
        plain_text(headline(result), "bold"),
        plain_text(f"{describe_subject(result)}, in {format_seconds(result.wall_seconds)}", "dim"),
        plain_text(""),
    ]
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
            plain_text(describe_changes(result), "dim"),
        ]
    renderables += [plain_text(f"note: {warning}", "yellow") for warning in result.warnings]
    return Group(*renderables)


def change_rows(result: GoodputResult) -> list[tuple[str, str, str]]:
    """Changed setting, median days with it, and the difference in days."""
    median = result.days["p50"]
    return [
        (
            change.description,
            _format_days(median + change.days),
            f"{change.days:+.1f}" if round(change.days, 1) else "0.0",
        )
        for change in result.changes
    ]


def describe_changes(result: GoodputResult) -> str:
    """What the days of the changes are compared with."""
    runs = min(change.runs for change in result.changes)
    which = "these runs" if runs == len(result.runs) else f"the first {runs:,} of these runs"
    return f"{which} again, with the same failures: median difference from their {result.days['p50']:.1f} days"


def describe_subject(result: GoodputResult) -> str:
    """GPU count, number of runs, which intervals these are, seed and failure preset."""
    return (
        f"{result.gpus:,} GPUs, median and 90% intervals of {len(result.runs):,} runs, seed {result.seed}, failures "
        "as in preset "
        f"{result.preset}"
    )
