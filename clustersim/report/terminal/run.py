"""How is a run summarized on the terminal? Step time first, then key numbers, then the time breakdown."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from clustersim.common.units import (
    format_bytes,
    format_flops,
    format_number,
    format_probability,
    format_seconds,
    format_step_time,
)
from clustersim.report.economics_labels import cost_row, energy_row
from clustersim.report.figure import format_share
from clustersim.report.labels import (
    CRITICAL_PATH_NOTE,
    NATURAL_ROUTING_MEANING,
    PROVENANCE_LABELS,
    TIMING_SENSITIVITY_MEANING,
    describe_degradations,
    describe_gpus,
    describe_layout,
    describe_model,
    describe_software,
    format_dtype_shares,
    format_natural_range,
    format_natural_ratios,
    format_timing_sensitivity,
    peak_reference_suffix,
    stage_name,
)
from clustersim.report.placement_labels import describe_placement
from clustersim.report.result_labels import format_percentiles, nonzero_provenance
from clustersim.report.row_selection import select_ranks
from clustersim.report.step_breakdown import StepBreakdown, step_breakdown
from clustersim.report.straggler_labels import (
    describe_no_stragglers,
    describe_slowness,
    describe_straggler,
    has_straggler_content,
    wait_row_labels,
)
from clustersim.report.terminal.table import build_table, plain_text, warning_lines
from clustersim.report.terminal.what_helps import what_helps_lines
from clustersim.report.theme import TIME_CATEGORY_STYLES
from clustersim.results.site_traffic import site_traffic
from clustersim.results.utilization import bubble_fraction, exposed_fraction, shows_causal_mfu
from clustersim.uncertainty.memory_error import fits_surely

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from clustersim.results.co_scheduled_jobs import CoScheduledJobResult
    from clustersim.results.simulation_result import SimulationResult
    from clustersim.results.what_if import WhatIfReport

_BAR_WIDTH: Final = 20  # characters of the longest bar: the table fits into 80 columns
_MAX_STRAGGLERS: Final = 3


def render_run(result: "SimulationResult", what_ifs: "WhatIfReport | None" = None) -> "Group":
    """Rich renderable: coloured on a terminal, plain elsewhere. what_ifs: simulated changes."""
    from rich.console import Group

    breakdown = step_breakdown(result, select_ranks(result))
    key_numbers = build_table(("", "", ""), _key_number_rows(result), right_aligned=(1,))
    return Group(
        *_header_lines(result),
        plain_text(""),
        key_numbers,
        plain_text(""),
        breakdown_table(breakdown),
        plain_text(CRITICAL_PATH_NOTE, "dim"),
        plain_text(""),
        *(_straggler_lines(result) if has_straggler_content(result) else ()),
        *what_helps_lines(what_ifs),
        *_note_lines(result),
    )


def _header_lines(result: "SimulationResult") -> "Iterator[Text]":
    scenario = result.scenario
    line = plain_text(f"step time {format_step_time(result.step_time)}", "bold")
    capacity, probability = format_bytes(result.memory_capacity), format_probability(result.fit_probability)
    if result.fits_in_memory:
        fits, style = ("fits", "green") if fits_surely(result.fit_probability) else ("may fit", "yellow")
        line.append(f"  {fits} {capacity} (probability {probability})", style)
    else:
        line.append("  DOES NOT FIT", "bold red")
    yield line.append(f"  {scenario.name}", style="dim")
    gpus = f"{result.rank_count:,} × {describe_gpus(scenario)} ({scenario.cluster.name})"
    yield plain_text(f"{describe_model(scenario.model)} on {gpus}")
    yield plain_text(describe_layout(scenario), "dim")
    yield plain_text(describe_software(scenario), "dim")
    if placement := describe_placement(scenario.cluster):
        yield plain_text(f"placed on {placement}", "dim")
    if degradations := describe_degradations(scenario):
        yield plain_text(f"degraded: {degradations}", "yellow")
    yield from (
        plain_text(f"co-scheduled: {describe_co_scheduled_job(job)}", "yellow") for job in result.co_scheduled_jobs
    )
    if result.isolated_step_time is not None:
        slowdown_percent = 100 * (result.step_time / result.isolated_step_time - 1.0)
        yield plain_text(
            f"isolated {format_step_time(result.isolated_step_time)}, {slowdown_percent:+.1f} % with co-scheduled jobs",
            "yellow",
        )
    if scenario.steps > 1:
        yield plain_text(f"mean of {scenario.steps:,} steps: {format_percentiles(result.step_time_percentiles)}")
    if draws := len(result.drawn_step_times):
        yield plain_text(f"{draws:,} draws of documents: {format_percentiles(result.drawn_step_time_percentiles)}")
    if (ratio := result.image_imbalance) is not None:
        yield plain_text(f"images: ranks wait for {ratio:.2f} times the encoder's mean work")


def describe_co_scheduled_job(job: "CoScheduledJobResult") -> str:
    """Step times of a co-scheduled job, and its slowdown."""
    mean_step_time, isolated = float(job.step_times.mean()), format_step_time(float(job.isolated_step_times.mean()))
    steps = {0: "first step, which ends later, takes", 1: "step takes"}.get(
        job.ended_steps, f"{job.ended_steps:,} steps take"
    )
    summary = f"its {steps} {format_step_time(mean_step_time)} (isolated {isolated}, {100 * job.slowdown:+.1f} %)"
    return f"{job.name} on {job.rank_count:,} GPUs: {summary}"


def _note_lines(result: "SimulationResult") -> "Iterator[Text]":
    yield from warning_lines(result.scenario.warnings)
    yield from (plain_text(f"suggestion: {suggestion.description}", "cyan") for suggestion in result.oom_suggestions)
    yield plain_text(result.interval_description)
    if limitation_count := len(result.model_limitations):
        effects = "1 effect is" if limitation_count == 1 else f"{limitation_count} effects are"
        yield plain_text(f"{effects} not modelled, see --json or the page", "dim")


def _straggler_lines(result: "SimulationResult") -> "Iterator[Text]":
    """The slowest ranks, one line each."""
    stragglers, row_labels = result.stragglers, wait_row_labels(result)
    if not stragglers.slowest:
        yield plain_text(f"waiting: {describe_no_stragglers(result)}")
    for straggler in stragglers.slowest[:_MAX_STRAGGLERS]:
        yield plain_text(
            f"straggler: {describe_straggler(row_labels, straggler)}: {describe_slowness(straggler)} longer than the "
            "median of its stage"
        )
    omitted = stragglers.rank_count - sum(len(straggler.ranks) for straggler in stragglers.slowest[:_MAX_STRAGGLERS])
    if stragglers.slowest and omitted:
        yield plain_text(f"{omitted:,} more ranks are slow, see --json or the page")


def _key_number_rows(result: "SimulationResult") -> Iterator[tuple[str, str, str]]:
    """Name, value and meaning of the key numbers."""
    peak_reference = peak_reference_suffix(result.format_usage)
    leading, other = result.leading_mfu, _describe_other_mfu(result)
    flops = format_flops(leading.value * result.peak_flops)
    rate = f"{flops} per GPU, {leading.attention_label}{peak_reference}{other}"
    tokens = result.tokens_per_second
    yield "tokens/s", f"{tokens:,.0f}", f"{format_number(tokens / result.rank_count)} per GPU"
    yield "GPU hours", f"{result.gpu_hours_per_trillion_tokens:,.0f}", "per trillion tokens"
    yield cost_row(result.economics)
    yield energy_row(result.economics)
    yield "MFU", f"{leading.value:.1%}", rate
    yield "HFU", f"{result.leading_hfu:.1%}", f"with recomputation, {leading.attention_label}"
    yield "bubble", f"{bubble_fraction(result.breakdown):.1%}", "of the step"
    yield "exposed comm", f"{exposed_fraction(result.breakdown):.1%}", "of the step"
    for link in site_traffic(result):
        egress = f", egress {link.cost:,.2f} USD" if link.cost else ""
        label = f"a step from {link.source} to {link.target}, {link.busy:.1%} of what the link carries{egress}"
        yield "between sites", format_bytes(link.sent_bytes), label
    yield "peak memory", format_bytes(result.peak_memory), _peak_memory_location(result)
    if (host := result.host_memory) is not None:
        usage = f"{host.total_bytes / host.capacity:.0%} of {format_bytes(host.capacity)} of a node"
        yield "host memory", format_bytes(host.total_bytes), usage
    if (most_loaded := result.most_loaded_expert_rank) is not None:
        rank_note = f"{most_loaded.rank_ratio:.2f}x on rank {most_loaded.rank:,} over all its layers"
        yield (
            "experts",
            f"{most_loaded.layer_max_ratio:.2f}x",
            f"tokens of a layer's most loaded rank over the mean; {rank_note}",
        )
    if (natural := result.natural_routing) is not None:
        yield "routing", format_natural_range(natural), f"{NATURAL_ROUTING_MEANING}, {format_natural_ratios(natural)}"
    if (sensitivity := result.timing_sensitivity) is not None:
        yield "chaotic", format_timing_sensitivity(sensitivity), TIMING_SENSITIVITY_MEANING
    yield from _format_rows(result)
    plural = "" if result.simulated_rank_count == 1 else "s"
    yield (
        "simulated",
        f"{result.simulated_rank_count:,} rank{plural}",
        f"of {result.rank_count:,}; {result.operation_count:,} spans",
    )
    for index, (source, share) in enumerate(nonzero_provenance(result).items()):
        yield "durations" if index == 0 else "", format_share(share), PROVENANCE_LABELS[source]


def _describe_other_mfu(result: "SimulationResult") -> str:
    """The MFU that does not lead, as a clause; empty where both are about equal."""
    if not shows_causal_mfu(result.mfu, result.mfu_causal):
        return ""
    if result.leading_mfu.is_causal:
        return f"; {result.mfu:.1%} with attention as a full matrix"
    return f"; {result.mfu_causal:.1%} with causal attention"


def _format_rows(result: "SimulationResult") -> Iterator[tuple[str, str, str]]:
    """Low-precision MFU, cast time and matmul formats, if there are several formats."""
    if (formats := result.format_usage) is None:
        return
    high_precision = formats.high_precision.value
    yield (
        f"{high_precision} peaks",
        f"{formats.high_precision_ratio(result.mfu):.2f}x",
        f"model FLOP/s over {format_flops(formats.high_precision_flops)} {high_precision}, attention as a full matrix",
    )
    yield (
        "casts",
        format_seconds(formats.quantization_seconds),
        f"{formats.quantization_seconds / result.step_time:.1%} of the step",
    )
    yield "matmuls", format_dtype_shares(formats), "of their FLOP"


def _peak_memory_location(result: "SimulationResult") -> str:
    share = result.peak_memory / result.memory_capacity if result.memory_capacity else math.inf
    stage = stage_name(result.scenario, result.memory.most_loaded_pipeline_rank)
    location = f" on {stage}" if len(result.ledgers) > 1 else ""
    return f"{share:.0%} of {format_bytes(result.memory_capacity)}{location}"


def breakdown_table(breakdown: StepBreakdown) -> "Table":
    """Seconds of every time category, the mean over ranks and on the critical path."""
    max_seconds = float(breakdown.mean_seconds.max(initial=0.0)) or 1.0
    rows: list[Sequence[Text]] = []
    for category in breakdown.nonzero_categories:
        seconds, path_seconds = (
            float(breakdown.mean_seconds[category.index]),
            float(breakdown.critical_path_seconds[category.index]),
        )
        bar = plain_text(_format_bar(seconds / max_seconds), TIME_CATEGORY_STYLES[category].colour)
        share = plain_text(f"{format_share(seconds / breakdown.step_seconds):>6} ").append_text(bar)
        rows.append(
            (
                plain_text(category.value),
                plain_text(format_seconds(seconds)),
                plain_text(format_seconds(path_seconds)),
                share,
            )
        )
    totals = (
        "step",
        format_step_time(breakdown.step_seconds),
        format_step_time(float(breakdown.critical_path_seconds.sum())),
    )
    rows.append((*(plain_text(total, "bold") for total in totals), plain_text("100.0%")))
    return build_table(("", "mean", "critical path", "share of the mean"), rows, right_aligned=(1, 2))


def _format_bar(share: float) -> str:
    """Text bar in eighths of a character; empty for less than half an eighth."""
    full_blocks, eighths = divmod(round(8 * _BAR_WIDTH * share), 8)
    return "█" * full_blocks + " ▏▎▍▌▋▊▉"[eighths].strip()
