"""How does a terminal show prediction errors? A table by source, one per factor, and what is not covered."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from rich.table import Table
from rich.text import Text

from clustersim.cli.presets import new_table
from clustersim.cli.terminal import new_console
from clustersim.common.units import format_bytes, format_number, format_step_time
from clustersim.uncertainty.model_file import load_uncertainty_model
from clustersim.validation.error_statistics import ErrorStatistics, IntervalCoverage, MacroAverage, statistics_by_source
from clustersim.validation.layout_ranking import LayoutRanking
from clustersim.validation.memory import MemoryFitVerdict
from clustersim.validation.speedup_pairs import SpeedupPair, SpeedupPairs
from clustersim.validation.summary import PredictionCoverage, ValidationSummary

QUALITY_COLUMNS: Final = ("cases", "skipped", "mean", "median", "bias", "worst")
TITLES: Final[Mapping[str, str]] = {
    "steps": "step time",
    "memory": "memory",
    "collectives": "collectives",
    "kernels": "kernels",
    "reliability": "reliability",
    "sites": "utilization over sites",
}


def format_percentage(value: float) -> str:
    """A number of percent."""
    return f"{value:.1f} %"


VALUE_FORMATS: Final[Mapping[str, Callable[[float], str]]] = {
    "memory": format_bytes,
    "reliability": format_number,
    "sites": format_percentage,
}
"""Formatters of a table's quantity, where that is not a time."""
INTERVAL_COLUMNS: Final = ("stratum", "cases", "sources", "inside", "left out")
PAIR_COLUMNS: Final = ("case", "with", "measured", "predicted", "error")
PAIR_TITLES: Final = {
    "formats": "speed-up over bf16, of the same case published in both",
    "experts": "speed-up of MoE models, of the same case published without",
}
"""Titles of tables of pairs, by what the two cases of a pair differ in."""
RANKING_COLUMNS: Final = ("source", "sets", "cases", "right", "regret", "random baseline", "tau")
_NO_VALUE: Final = "–"
_MAX_REASONS: Final = 12
_MAX_NAME_LENGTH: Final = 80
_MAX_LISTED_CASES: Final = 30  # up to this number cases are listed one by one
_LEGEND: Final = (
    "mean and median: of absolute errors; bias and worst: signed, negative where the prediction is too fast or too "
    "small; macro mean: equal weight for every source; right: sets whose fastest layout was predicted; regret: mean "
    "excess time of the layout predicted to be fastest over the fastest measured; random baseline: the same for a "
    "layout selected at random"
)


def print_summaries(summaries: Sequence[ValidationSummary]) -> None:
    """Print all tables and notes of each summary."""
    console = new_console()
    for summary in summaries:
        for element in _summary_elements(summary):
            console.print(element)
    console.print(Text(_LEGEND, style="dim"))


def _summary_elements(summary: ValidationSummary) -> Iterator[Table | Text]:
    yield _source_table(summary)
    yield Text()
    yield from map(Text, coverage_notes(summary))
    yield from _skip_reason_table(summary.skip_reasons)
    yield Text()
    if len(summary.comparisons) + len(summary.simulated_by_others) <= _MAX_LISTED_CASES:
        yield _case_table(summary)
        yield Text()
    for factor, values in summary.statistics_by_grouping.items():
        yield _quality_table(f"{TITLES[summary.table_kind]} by {factor}", factor, values)
        yield Text()
    if summary.layout_ranking is not None and summary.layout_ranking.sets:
        yield _ranking_table(summary.layout_ranking)
        yield Text()
    for kind, pairs in summary.speedup_pairs.items():
        if pairs.pairs:
            by_change = _quality_table(
                f"{PAIR_TITLES[kind]}: predicted over measured ratio", "with", pairs.statistics_by_change()
            )
            yield from (_pair_table(PAIR_TITLES[kind], pairs), Text(), by_change, Text())
    if summary.interval_coverage:
        yield _interval_table(summary.interval_coverage)
        yield Text()


def _source_table(summary: ValidationSummary) -> Table:
    table = _quality_table(f"{TITLES[summary.table_kind]}: predicted against measured", "source", {})
    for source, quality in summary.statistics_by_source.items():
        table.add_row(Text(source or "not stated"), *quality_cells(quality))
        for name, subset_quality in source_subsets(summary, source).items():
            table.add_row(Text(f"  {name}"), *quality_cells(subset_quality), style="dim")
    table.add_row(Text("all cases"), *quality_cells(summary.overall), style="bold")
    for name, cells in macro_rows(summary):
        table.add_row(Text(name), *cells, style="bold")
    for name, cells in simulated_rows(summary):
        table.add_row(Text(name), *cells, style="dim")
    return table


def _interval_table(coverages: Mapping[str, IntervalCoverage]) -> Table:
    table = new_table("coverage of the 90% prediction interval", *INTERVAL_COLUMNS)
    for stratum, coverage in coverages.items():
        table.add_row(Text(stratum), *interval_cells(stratum, coverage))
    return table


def interval_cells(stratum: str, coverage: IntervalCoverage) -> tuple[str, ...]:
    """The cells of INTERVAL_COLUMNS except the first."""
    published = load_uncertainty_model().coverage_by_stratum.get(stratum)
    holdout_coverage = None if published is None else published.covered_share
    return f"{coverage.n:,}", f"{coverage.sources:,}", format_percent(coverage.share), format_percent(holdout_coverage)


def _case_table(summary: ValidationSummary) -> Table:
    """One row per case, with the reason where it was skipped."""
    table = new_table("each case", "case", "measured", "predicted", "error", "")
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    formatter = VALUE_FORMATS.get(summary.table_kind, format_step_time)
    for note, comparisons in (("", summary.comparisons), ("simulated", summary.simulated_by_others)):
        for comparison in comparisons:
            measured = formatter(comparison.measured) if math.isfinite(comparison.measured) else _NO_VALUE
            cells = (
                (_NO_VALUE, _NO_VALUE)
                if comparison.error is None
                else (formatter(comparison.predicted or 0.0), f"{comparison.error:+.1%}")
            )
            table.add_row(
                Text(_truncate(comparison.case_id)),
                measured,
                *cells,
                Text(comparison.skip_reason or note, overflow="fold"),
            )
    return table


def _quality_table(title: str, name: str, values: Mapping[str, ErrorStatistics]) -> Table:
    table = new_table(title, name, *QUALITY_COLUMNS)
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    for column in table.columns[1:]:
        column.no_wrap = True
    for value, quality in values.items():
        table.add_row(Text(_truncate(value) or "not stated"), *quality_cells(quality))
    return table


def _truncate(name: str) -> str:
    """Shorten names, which in a user's table may be of any length."""
    return name if len(name) <= _MAX_NAME_LENGTH else f"{name[:_MAX_NAME_LENGTH]}..."


def source_subsets(summary: ValidationSummary, source: str) -> dict[str, ErrorStatistics]:
    """Error statistics of the subsets (kinds of runs) of one source, by name."""
    return {name: quality for name, quality in (summary.subsets or {}).items() if name.startswith(f"{source} ")}


def simulated_rows(summary: ValidationSummary) -> list[tuple[str, tuple[str, ...]]]:
    """Error statistics relative to results of other simulators: a label and the cells of QUALITY_COLUMNS."""
    quality_by_source = statistics_by_source(summary.simulated_by_others)
    return [(simulated_source_label(source), quality_cells(quality)) for source, quality in quality_by_source.items()]


def simulated_source_label(source: str) -> str:
    """The label of a source whose times were simulated, not measured."""
    return f"not measured: simulated, {source or 'not stated'}"


def quality_cells(quality: ErrorStatistics) -> tuple[str, ...]:
    """The cells of QUALITY_COLUMNS."""
    counts, sizes = (
        (f"{quality.n:,}", f"{quality.skipped:,}"),
        (format_percent(quality.mape), format_percent(quality.median_ape)),
    )
    return (*counts, *sizes, format_signed_percent(quality.bias), format_signed_percent(quality.worst))


def macro_rows(summary: ValidationSummary) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The macro-average over all sources, and over dense and MoE models where a table has both."""
    if summary.macro_average is not None:
        yield macro_row(summary.macro_average)
    for kind, means in summary.macro_by_model_type.items():
        name, cells = macro_row(means)
        yield f"{name}, {kind}", cells


def macro_row(means: MacroAverage) -> tuple[str, tuple[str, ...]]:
    """The name of the row and the cells of QUALITY_COLUMNS."""
    name = f"macro mean, {means.sources} {'source' if means.sources == 1 else 'sources'}"
    return name, ("", "", format_percent(means.mape), "", format_signed_percent(means.bias), "")


def format_percent(value: float | None) -> str:
    """A fraction in percent, a dash where there is none.

    >>> format_percent(0.0314), format_percent(None)
    ('3.1%', '–')
    """
    return _NO_VALUE if value is None else f"{value:.1%}"


def format_signed_percent(value: float | None) -> str:
    """A fraction in percent with its sign.

    >>> format_signed_percent(0.031), format_signed_percent(-0.2), format_signed_percent(None)
    ('+3.1%', '-20.0%', '–')
    """
    return _NO_VALUE if value is None else f"{value:+.1%}"


def coverage_notes(summary: ValidationSummary) -> Iterator[str]:
    """Sentences on how many expressible cases are predicted, and on whether runs fit in memory."""
    if summary.comparisons or not summary.simulated_by_others:
        yield _coverage_note("coverage", summary.coverage)
    for kind, kind_coverage in summary.coverage_by_category.items():
        if kind_coverage.expressible_count:
            yield _coverage_note(f"coverage of {kind}", kind_coverage)
    yield from summary.notes
    if summary.fit_verdicts:
        yield _memory_verdict_note(summary.fit_verdicts)
    judged_count = len(
        dict.fromkeys(comparison.case_id for comparison in summary.comparisons if comparison.fits_in_memory is not None)
    )
    if judged_count:
        unfit_text = f": {', '.join(map(_truncate, summary.measured_but_unfit))}" if summary.measured_but_unfit else ""
        yield (
            f"ran, but would not fit in memory as predicted: {len(summary.measured_but_unfit):,} of "
            f"{judged_count:,} runs{unfit_text}"
        )


def _memory_verdict_note(verdicts: Sequence[MemoryFitVerdict]) -> str:
    """For how many runs it is known whether they fit, and for which the prediction is wrong."""
    predicted_verdicts = [verdict for verdict in verdicts if verdict.predicted is not None]
    wrong = [verdict.case_id for verdict in predicted_verdicts if not verdict.is_correct]
    text = (
        f"fits or does not fit: right for {len(predicted_verdicts) - len(wrong):,} of {len(predicted_verdicts):,} runs"
    )
    skipped_text = (
        f", {len(verdicts) - len(predicted_verdicts):,} are skipped" if len(predicted_verdicts) < len(verdicts) else ""
    )
    return text + (f" (wrong for {', '.join(map(_truncate, wrong))})" if wrong else "") + skipped_text


def _coverage_note(name: str, coverage: PredictionCoverage) -> str:
    counts = f"{coverage.predicted_count:,} of {coverage.expressible_count:,}"
    return f"{name}: {counts} cases that should have a prediction have one ({format_percent(coverage.share)})"


def _skip_reason_table(reasons: Mapping[str, tuple[str, ...]]) -> Iterator[Table | Text]:
    """The most frequent skip reasons, one line each, with an example case."""
    if not reasons:
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for reason, cases in list(reasons.items())[:_MAX_REASONS]:
        first = f" ({cases[0]})" if len(cases) == 1 else f" (as {cases[0]})"
        table.add_row(f"{len(cases):,}", Text(reason).append(_truncate(first), style="dim"))
    other_reasons = list(reasons.values())[_MAX_REASONS:]
    if other_reasons:
        table.add_row(
            f"{sum(map(len, other_reasons)):,}",
            f"for {len(other_reasons):,} other reasons, which --json and --html list",
        )
    yield Text()
    yield Text("skipped cases and the reason")
    yield table


def _ranking_table(ranking: LayoutRanking) -> Table:
    table = new_table("which layout is fastest", *RANKING_COLUMNS)
    table.columns[0].no_wrap = False
    for source, source_ranking in ranking.by_source().items():
        table.add_row(Text(source or "not stated"), *ranking_cells(source_ranking))
    table.add_row(Text("all sets"), *ranking_cells(ranking), style="bold")
    return table


def _pair_table(title: str, pairs: SpeedupPairs) -> Table:
    table = new_table(title, *PAIR_COLUMNS)
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    for pair in pairs.pairs:
        table.add_row(Text(_truncate(pair.second)), *pair_cells(pair))
    return table


def pair_cells(pair: SpeedupPair) -> tuple[str, ...]:
    """The cells of PAIR_COLUMNS except the first."""
    return pair.change, f"{pair.measured:.2f}", f"{pair.predicted:.2f}", format_signed_percent(pair.error)


def ranking_cells(ranking: LayoutRanking) -> tuple[str, ...]:
    """The cells of RANKING_COLUMNS."""
    tau = _NO_VALUE if ranking.mean_kendall_tau is None else f"{ranking.mean_kendall_tau:.2f}"
    counts = (f"{count:,}" for count in (len(ranking.sets), ranking.case_count, ranking.correct_count))
    return *counts, format_percent(ranking.mean_regret), format_percent(ranking.mean_random_regret), tau
