"""What does the terminal say? The step time first, then the figures that people compare, then where the time goes."""

import math
from typing import TYPE_CHECKING, Final

from clustersim.report.economics import cost_line, energy_line
from clustersim.report.figure import share_words
from clustersim.report.steps import spread_words
from clustersim.report.view import Breakdown, Steps, Subject, TableView, Trust, Verdict, Waiting
from clustersim.report.waiting import slowness, straggler_words
from clustersim.report.wording import (
    CRITICAL_PATH,
    PROVENANCE_NAMES,
    formats_words,
    mfu_words,
    narrow_peak_words,
)
from clustersim.units import format_bytes, format_flops, format_number, format_seconds, format_step_time

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

_BAR: Final = 20  # characters of the longest bar: lines of 80 hold it
_MOST_STRAGGLERS: Final = 3


def render_table(view: TableView) -> "Group":
    """Something that rich prints: coloured on a terminal, plain elsewhere."""
    from rich.console import Group
    from rich.text import Text

    subject, verdict, trust = view.subject, view.verdict, view.trust
    return Group(
        _headline(subject, verdict),
        Text(f"{subject.model} on {trust.ranks:,} × {subject.gpu} ({subject.cluster})"),
        Text(subject.layout, style="dim"),
        *([Text(f"placed on {subject.placement}", style="dim")] if subject.placement else []),
        *([Text(f"disturbed: {subject.disturbed}", style="yellow")] if subject.disturbed else []),
        *([Text(_steps(verdict.steps))] if verdict.steps else []),
        Text(),
        _numbers(verdict, trust),
        Text(),
        breakdown_table(view.breakdown),
        Text(CRITICAL_PATH, style="dim"),
        Text(),
        *([Text(line) for line in _stragglers(view.waiting)] if view.waiting else []),
        *_notes(trust),
    )


def _notes(trust: Trust) -> "list[Text]":
    from rich.text import Text

    notes = [Text(f"warning: {warning}", style="yellow") for warning in trust.warnings]
    notes += [Text(f"suggestion: {suggestion}", style="cyan") for suggestion in trust.suggestions]
    notes += [Text(f"trust: {trust.experience}")] if trust.experience else []
    if missing := len(trust.not_modelled):
        effects = "1 effect is" if missing == 1 else f"{missing} effects are"
        notes.append(Text(f"{effects} not modelled, see --json or the page", style="dim"))
    return notes


def _steps(steps: Steps) -> str:
    return f"mean of {len(steps.times):,} steps: {spread_words(steps.spread)}"


def _stragglers(waiting: Waiting) -> list[str]:
    """The slowest ranks, a line each."""
    found = waiting.stragglers
    if not found.slowest:
        return [f"waiting: {waiting.otherwise}"]
    lines = [
        f"straggler: {straggler_words(waiting, each)}: {slowness(each)} longer than is usual there"
        for each in found.slowest[:_MOST_STRAGGLERS]
    ]
    more = found.ranks - sum(len(each.ranks) for each in found.slowest[:_MOST_STRAGGLERS])
    return [*lines, *([f"{more:,} more ranks are slow, see --json or the page"] if more else [])]


def _headline(subject: Subject, verdict: Verdict) -> "Text":
    from rich.text import Text

    fits = f"fits {format_bytes(verdict.memory_capacity)}" if verdict.fits else "DOES NOT FIT"
    line = Text(f"step time {format_step_time(verdict.step_time)}", style="bold")
    line.append(f"  {fits}", style="green" if verdict.fits else "bold red")
    return line.append(f"  {subject.title}", style="dim")


def _numbers(verdict: Verdict, trust: Trust) -> "Table":
    table = _grid()
    peak = narrow_peak_words(verdict.formats)
    rate = f"{format_flops(verdict.model_flops_per_gpu)} per GPU, attention as a full matrix{peak}"
    for name, value, meaning in (
        ("tokens/s", f"{verdict.tokens_per_s:,.0f}", f"{format_number(verdict.tokens_per_s_per_gpu)} per GPU"),
        ("GPU hours", f"{verdict.gpu_hours:,.0f}", "per trillion tokens"),
        *([cost_line(verdict.economics), energy_line(verdict.economics)] if verdict.economics else []),
        ("MFU", mfu_words(verdict.mfu, verdict.mfu_causal), rate),
        ("HFU", f"{verdict.hfu:.1%}", "with recomputation"),
        ("bubble", f"{verdict.bubble_fraction:.1%}", "of the step"),
        ("exposed comm", f"{verdict.exposed_communication_fraction:.1%}", "of the step"),
        ("peak memory", format_bytes(verdict.peak_memory), _where(verdict)),
        *_host(verdict),
        *_experts(verdict),
        *_formats(verdict),
        (
            "simulated",
            f"{trust.simulated_ranks:,} rank{'' if trust.simulated_ranks == 1 else 's'}",
            f"of {trust.ranks:,}; {trust.spans:,} spans",
        ),
    ):
        table.add_row(name, value, meaning)
    for number, (source, share) in enumerate(trust.provenance.items()):
        table.add_row("durations" if number == 0 else "", share_words(share), PROVENANCE_NAMES[source])
    return table


def _formats(verdict: Verdict) -> list[tuple[str, str, str]]:
    """Of products, and what casts cost, where there are several."""
    found = verdict.formats
    if found is None:
        return []
    return [
        (
            f"MFU, {found.wide.value}",
            f"{found.of_wide(verdict.mfu):.1%}",
            f"of {format_flops(found.wide_flops)} {found.wide.value}",
        ),
        ("casts", format_seconds(found.casts), f"{found.casts / verdict.step_time:.1%} of the step"),
        ("products", formats_words(found), "of their FLOP"),
    ]


def _experts(verdict: Verdict) -> list[tuple[str, str, str]]:
    """Of the fullest ranks, if loads are uneven."""
    fullest = verdict.experts
    if fullest is None:
        return []
    over = f"the mean's rows on a layer's fullest rank; {fullest.rows:.2f}x on rank {fullest.rank:,}, over its layers"
    return [("experts", f"{fullest.layer:.2f}x", over)]


def _host(verdict: Verdict) -> list[tuple[str, str, str]]:
    """What the fullest host holds, if anything is offloaded."""
    if verdict.host is None:
        return []
    held, capacity = verdict.host
    return [("host memory", format_bytes(held), f"{held / capacity:.0%} of {format_bytes(capacity)} of a node")]


def _where(verdict: Verdict) -> str:
    share = verdict.peak_memory / verdict.memory_capacity if verdict.memory_capacity else math.inf
    place = f" on {verdict.worst_stage}" if verdict.worst_stage else ""
    return f"{share:.0%} of {format_bytes(verdict.memory_capacity)}{place}"


def breakdown_table(breakdown: Breakdown) -> "Table":
    """Where the time goes: seconds of every part, the mean over ranks and on the critical path."""
    from rich.text import Text

    table = _grid(numbers=2)
    total = float(breakdown.step.sum())
    most = float(breakdown.step.max(initial=0.0)) or 1.0
    table.add_row("", *(Text(head, style="dim") for head in ("mean", "critical path", "share of the mean")))
    for part in breakdown.present.tolist():
        seconds, path = float(breakdown.step[part]), float(breakdown.path[part])
        bar = Text(_bar(seconds / most), style=breakdown.categories[part].colour)
        share = Text(f"{share_words(seconds / total):>6} ").append_text(bar)
        table.add_row(Text(breakdown.labels[part]), format_seconds(seconds), format_seconds(path), share)
    sums = (format_step_time(total), format_step_time(float(breakdown.path.sum())))
    table.add_row(Text("step", style="bold"), *(Text(each, style="bold") for each in sums), "100.0%")
    return table


def _bar(share: float) -> str:
    """A bar in eighths of a character; empty for less than half of one."""
    whole, eighths = divmod(round(8 * _BAR * share), 8)
    return "█" * whole + " ▏▎▍▌▋▊▉"[eighths].strip()


def _grid(numbers: int = 1) -> "Table":
    """Names, so many columns of numbers, and the rest of the line."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column()
    for _ in range(numbers):
        table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    return table
