"""What does the terminal say? The step time first, then the figures that people compare, then where the time goes."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from clustersim.common.units import format_bytes, format_flops, format_number, format_seconds, format_step_time
from clustersim.report.economics_labels import cost_line, energy_line
from clustersim.report.figure import share_words
from clustersim.report.labels import (
    CRITICAL_PATH,
    PROVENANCE_NAMES,
    disturbed_line,
    formats_words,
    gpu_line,
    layout_line,
    mfu_words,
    narrow_peak_words,
    stage_name,
)
from clustersim.report.panels.step_times import spread_words
from clustersim.report.panels.stragglers import is_told, names_of, nobody_slow, slowness, straggler_words
from clustersim.report.panels.verdict import provenance_of
from clustersim.report.placement_labels import placement_line
from clustersim.report.row_selection import shown_ranks
from clustersim.report.step_breakdown import Times, times_of
from clustersim.report.terminal.table import grid, text
from clustersim.report.theme import PART_LOOKS
from clustersim.results.utilization import bubble_fraction, exposed_fraction

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from clustersim.results.co_located_jobs import Neighbour
    from clustersim.results.simulation_result import SimulationResult

_BAR: Final = 20  # characters of the longest bar: lines of 80 hold it
_MOST_STRAGGLERS: Final = 3


def render_run(result: "SimulationResult") -> "Group":
    """Something that rich prints: coloured on a terminal, plain elsewhere."""
    from rich.console import Group

    times = times_of(result, shown_ranks(result))
    numbers = grid(("", "", ""), _rows(result), right=(1,))
    return Group(
        *_head(result), text(""), numbers, text(""), breakdown_table(times), text(CRITICAL_PATH, "dim"), text(""),
        *(_stragglers(result) if is_told(result) else ()), *_notes(result),
    )  # fmt: skip


def _head(result: "SimulationResult") -> "Iterator[Text]":
    scenario = result.scenario
    line = text(f"step time {format_step_time(result.step_time)}", "bold")
    fits = f"fits {format_bytes(result.memory_capacity)}" if result.fits_in_memory else "DOES NOT FIT"
    line.append(f"  {fits}", style="green" if result.fits_in_memory else "bold red")
    yield line.append(f"  {scenario.name}", style="dim")
    yield text(f"{scenario.model.name} on {result.rank_count:,} × {gpu_line(scenario)} ({scenario.cluster.name})")
    yield text(layout_line(scenario), "dim")
    if placement := placement_line(scenario.cluster):
        yield text(f"placed on {placement}", "dim")
    if disturbed := disturbed_line(scenario):
        yield text(f"disturbed: {disturbed}", "yellow")
    yield from (
        text(f"beside {neighbour_words(co_located_job)}", "yellow") for co_located_job in result.co_located_jobs
    )
    if result.isolated_step_time is not None:
        longer = 100 * (result.step_time / result.isolated_step_time - 1.0)
        yield text(f"alone {format_step_time(result.isolated_step_time)}, {longer:+.1f} % beside other jobs", "yellow")
    if scenario.steps > 1:
        yield text(f"mean of {scenario.steps:,} steps: {spread_words(result.step_time_percentiles)}")


def neighbour_words(job: "Neighbour") -> str:
    """How another job's steps went."""
    times, alone = float(job.step_times.mean()), format_step_time(float(job.alone.mean()))
    steps = {0: "first step, which ends later, takes", 1: "step takes"}.get(job.ended, f"{job.ended:,} steps take")
    took = f"its {steps} {format_step_time(times)} (alone {alone}, {100 * job.longer:+.1f} %)"
    return f"{job.name} on {job.ranks:,} GPUs: {took}"


def _notes(result: "SimulationResult") -> "Iterator[Text]":
    yield from (text(f"warning: {warning}", "yellow") for warning in result.scenario.warnings)
    yield from (text(f"suggestion: {suggestion}", "cyan") for suggestion in result.oom_suggestions)
    yield text(f"trust: {result.interval_description}")
    if missing := len(result.model_limitations):
        effects = "1 effect is" if missing == 1 else f"{missing} effects are"
        yield text(f"{effects} not modelled, see --json or the page", "dim")


def _stragglers(result: "SimulationResult") -> "Iterator[Text]":
    """The slowest ranks, a line each."""
    found, names = result.stragglers, names_of(result)
    if not found.slowest:
        yield text(f"waiting: {nobody_slow(result)}")
    for straggler in found.slowest[:_MOST_STRAGGLERS]:
        yield text(f"straggler: {straggler_words(names, straggler)}: {slowness(straggler)} longer than is usual there")
    more = found.ranks - sum(len(item.ranks) for item in found.slowest[:_MOST_STRAGGLERS])
    if found.slowest and more:
        yield text(f"{more:,} more ranks are slow, see --json or the page")


def _rows(result: "SimulationResult") -> Iterator[tuple[str, str, str]]:
    """Name, value and meaning of what people compare."""
    peak = narrow_peak_words(result.format_usage)
    rate = f"{format_flops(result.achieved_flops_per_gpu)} per GPU, attention as a full matrix{peak}"
    tokens = result.tokens_per_second
    yield "tokens/s", f"{tokens:,.0f}", f"{format_number(tokens / result.rank_count)} per GPU"
    yield "GPU hours", f"{result.gpu_hours_per_trillion_tokens:,.0f}", "per trillion tokens"
    yield cost_line(result.economics)
    yield energy_line(result.economics)
    yield "MFU", mfu_words(result.mfu(), result.mfu_causal()), rate
    yield "HFU", f"{result.hfu():.1%}", "with recomputation"
    yield "bubble", f"{bubble_fraction(result.breakdown):.1%}", "of the step"
    yield "exposed comm", f"{exposed_fraction(result.breakdown):.1%}", "of the step"
    yield "peak memory", format_bytes(result.peak_memory), _where(result)
    if (host := result.host_memory) is not None:
        of = f"{host.total_bytes / host.capacity:.0%} of {format_bytes(host.capacity)} of a node"
        yield "host memory", format_bytes(host.total_bytes), of
    if (fullest := result.most_loaded_expert_rank) is not None:
        over = f"{fullest.rows:.2f}x on rank {fullest.rank:,}, over its layers"
        yield "experts", f"{fullest.layer:.2f}x", f"the mean's rows on a layer's fullest rank; {over}"
    yield from _formats(result)
    plural = "" if result.simulated_rank_count == 1 else "s"
    yield (
        "simulated",
        f"{result.simulated_rank_count:,} rank{plural}",
        f"of {result.rank_count:,}; {result.operation_count:,} spans",
    )
    for number, (source, share) in enumerate(provenance_of(result).items()):
        yield "durations" if number == 0 else "", share_words(share), PROVENANCE_NAMES[source]


def _formats(result: "SimulationResult") -> Iterator[tuple[str, str, str]]:
    """Of products, and what casts cost, where there are several."""
    if (found := result.format_usage) is None:
        return
    wide = found.wide.value
    yield f"MFU, {wide}", f"{found.of_wide(result.mfu()):.1%}", f"of {format_flops(found.wide_flops)} {wide}"
    yield "casts", format_seconds(found.casts), f"{found.casts / result.step_time:.1%} of the step"
    yield "products", formats_words(found), "of their FLOP"


def _where(result: "SimulationResult") -> str:
    share = result.peak_memory / result.memory_capacity if result.memory_capacity else math.inf
    place = f" on {stage_name(result.scenario, result.peak_memory_pipeline_rank)}" if len(result.ledgers) > 1 else ""
    return f"{share:.0%} of {format_bytes(result.memory_capacity)}{place}"


def breakdown_table(times: Times) -> "Table":
    """Where the time goes: seconds of every part, the mean over ranks and on the critical path."""
    most = float(times.step.max(initial=0.0)) or 1.0
    rows: list[Sequence[Text]] = []
    for part in times.present:
        seconds, path = float(times.step[part.place]), float(times.path[part.place])
        bar = text(_bar(seconds / most), PART_LOOKS[part].colour)
        share = text(f"{share_words(seconds / times.whole):>6} ").append_text(bar)
        rows.append((text(part.value), text(format_seconds(seconds)), text(format_seconds(path)), share))
    sums = "step", format_step_time(times.whole), format_step_time(float(times.path.sum()))
    rows.append((*(text(item, "bold") for item in sums), text("100.0%")))
    return grid(("", "mean", "critical path", "share of the mean"), rows, right=(1, 2))


def _bar(share: float) -> str:
    """A bar in eighths of a character; empty for less than half of one."""
    whole, eighths = divmod(round(8 * _BAR * share), 8)
    return "█" * whole + " ▏▎▍▌▋▊▉"[eighths].strip()
