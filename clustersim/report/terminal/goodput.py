"""What does the terminal say of a run over weeks? How long it takes, where its time goes, and what would help."""

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
from clustersim.report.economics_labels import money, tokens_words
from clustersim.report.terminal.table import grid, text
from clustersim.results.goodput import DAY, Goodput

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

LOSSES: Final = {
    "checkpoints": ("checkpoints", "#E69F00"),
    "lost_work": ("work that was lost", "#D55E00"),
    "detection": ("until failures were noticed", "#CC79A7"),
    "restart": ("restarts", "#AA3377"),
    "waiting": ("waiting for nodes", "#6B7280"),
    "maintenance": ("maintenance", "#8D96A0"),
    "degraded": ("running slower than healthy", "#F0E442"),
    "spares": ("spare nodes", "#BFC6CD"),
}
"""What a loss is called, and its colour."""
_MOST: Final = 8  # kinds of failures that are listed
_LEAST: Final = 5e-5  # of the time: what is less is not told


def headline(found: Goodput) -> str:
    """How long the run takes, in one sentence."""
    if 2 * found.finished < len(found.runs):
        words = f"{tokens_words(found.tokens)} tokens are not reached"
        return f"{words}: after {found.days['p50']:.1f} days goodput is {found.goodput:.1%}"
    days = found.days
    low, middle, high = (days[name] for name in ("p10", "p50", "p90"))
    many = f"{low:.1f} to {high:.1f}" if f"{low:.1f}" != f"{high:.1f}" else f"{middle:.1f}"
    return f"{tokens_words(found.tokens)} tokens take {middle:.1f} days ({many} in eight of ten runs)"


def money_words(found: Goodput) -> str:
    """What the run costs; empty where no price is known."""
    cost = found.cost
    if cost is None:
        return ""
    return f"{money(cost['p50'], found.currency)} ({format_number(cost['p10'])} to {format_number(cost['p90'])})"


def facts(found: Goodput) -> list[tuple[str, str, str]]:
    """Name, value and meaning of what is told first."""
    mttf, energy, every = found.mttf, found.energy, found.checkpoint
    formulas = f"Young {format_seconds(every.young)}, Daly {format_seconds(every.daly)}"
    drain = f", is stored {format_seconds(every.drain)} later" if every.drain else ""
    written = f"blocks steps for {format_seconds(every.block)}{drain}, is loaded in {format_seconds(every.load)}"
    nodes = found.nodes + found.spare_nodes
    rows = [
        ("goodput", f"{found.goodput:.1%}", "of the time the job does, at full speed, work that counts"),
        ("ETTR", f"{found.ettr:.1%}", "of the time steps that count run, slower ones too"),
        ("without failures", f"{found.ideal / DAY:.1f} days", f"at {format_step_time(found.step_time)} a step"),
        (
            "breaks every",
            "never" if mttf is None else format_seconds(mttf),
            f"{found.interruptions:,.0f} unplanned ends, {sum(found.failures.values()):,.0f} failures",
        ),
        ("checkpoint every", format_seconds(every.interval), "nothing breaks" if isinf(every.young) else formulas),
        ("a checkpoint", format_bytes(every.size), written),
        ("spare nodes", f"{found.spare_nodes:,}", f"of {nodes:,}; goodput of all {found.paid:.1%}"),
    ]
    if found.cost is not None:
        rows.append(("cost", money_words(found), "of all GPUs, spares too: the median, and eight of ten runs"))
    if energy is not None:
        rows.append(("energy", format_energy(energy), "GPUs, nodes and facility, up and down"))
    if found.missing:
        rows.append(("not known", "", "; ".join(found.missing)))
    return rows


def losses(found: Goodput) -> list[tuple[str, Seconds, float]]:
    """What time goes into, with seconds of a run and their part of its wall time; what is nothing is left out."""
    wall = found.mean([run.wall for run in found.runs])
    each = ((name, seconds, seconds / wall) for name, seconds in found.loss.items())
    return [row for row in each if row[2] >= _LEAST]


def render_goodput(found: Goodput) -> "Group":
    """Something that rich prints: coloured on a terminal, plain elsewhere."""
    from rich.console import Group

    shown: list[RenderableType] = [] if found.complete else [text("stopped before the last run", "yellow")]
    shown += [text(headline(found), "bold"), text(subject(found), "dim"), text("")]
    shown += [grid(("", "", ""), facts(found), right=(1,)), text("")]
    work = "work that counts", found.mean([run.work for run in found.runs]), found.goodput
    rows = [work, *((LOSSES[name][0], seconds, part) for name, seconds, part in losses(found))]
    told = [(words, format_seconds(seconds), f"{part:.1%}") for words, seconds, part in rows]
    shown += [grid(("a run's time goes into", "", "of its time"), told, right=(1, 2)), text("")]
    broken = [(name, f"{many:,.1f}") for name, many in found.failures.items()]
    shown += [grid(("what breaks", "in a run"), broken[:_MOST], right=(1,))]
    if len(broken) > _MOST:
        shown.append(text(f"and {len(broken) - _MOST} kinds more", "dim"))
    if found.changes:
        shown += [text(""), grid(("what if", "days", "difference"), changes(found), right=(1, 2))]
    shown += [text(f"note: {warning}", "yellow") for warning in found.warnings]
    return Group(*shown)


def changes(found: Goodput) -> list[tuple[str, str, str]]:
    """What was changed, the days that it takes then, and how many more."""
    return [(change.words, f"{change.days:.1f}", f"{change.days - change.before:+.1f}") for change in found.changes]


def subject(found: Goodput) -> str:
    """On what, from what, and in how many runs."""
    return (
        f"{found.gpus:,} GPUs, {len(found.runs):,} runs, seed {found.seed}, failures as in preset {found.preset}, in "
        f"{format_seconds(found.wall)}"
    )
