"""How do summaries become a page? Their comparisons and error statistics, as plain table rows for the report."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from clustersim.cli.validation_table import (
    INTERVAL_COLUMNS,
    QUALITY_COLUMNS,
    RANKING_COLUMNS,
    TITLES,
    coverage_notes,
    interval_cells,
    macro_rows,
    quality_cells,
    ranking_cells,
    simulated_rows,
    simulated_source_label,
    source_subsets,
)
from clustersim.common.files import write_text_atomically
from clustersim.report.validation_page import TextTable, ValidationPoint, ValidationSection, validation_page
from clustersim.validation.comparison import CaseComparison, PredictionInterval
from clustersim.validation.error_statistics import IntervalCoverage
from clustersim.validation.layout_ranking import LayoutRanking
from clustersim.validation.summary import ValidationSummary

_UNITS: Final = {"memory": "B", "reliability": ""}


def write_page(summaries: Sequence[ValidationSummary], title: str, path: str) -> None:
    """Write the page; raise OutputError if it cannot be written."""
    rankings = [
        summary.layout_ranking
        for summary in summaries
        if summary.layout_ranking is not None and summary.layout_ranking.sets
    ]
    layouts = _ranking_lines(rankings[0]) if rankings else None
    write_text_atomically(path, validation_page(title, [_page_section(summary) for summary in summaries], layouts))


def _page_section(summary: ValidationSummary) -> ValidationSection:
    points = tuple(
        ValidationPoint(
            comparison.case_id,
            source,
            comparison.measured,
            comparison.predicted,
            dict(comparison.groupings),
            _interval_limits(comparison.interval),
        )
        for source, comparison in _comparisons_by_source(summary)
        if comparison.predicted is not None and comparison.error is not None and math.isfinite(comparison.error)
    )
    unit = _UNITS.get(summary.table_kind, "s")
    notes = tuple(f"{note[0].upper()}{note[1:]}." for note in coverage_notes(summary))
    title = TITLES[summary.table_kind].capitalize()
    return ValidationSection(
        title,
        unit,
        points,
        _source_lines(summary),
        summary.skip_reasons,
        notes,
        _interval_lines(summary.interval_coverage),
    )


def _comparisons_by_source(summary: ValidationSummary) -> Iterator[tuple[str, CaseComparison]]:
    """All comparisons with the displayed names of their sources."""
    yield from ((comparison.source, comparison) for comparison in summary.comparisons)
    yield from ((simulated_source_label(comparison.source), comparison) for comparison in summary.simulated_by_others)


def _interval_limits(interval: PredictionInterval | None) -> tuple[float, float] | None:
    return None if interval is None else (interval.low, interval.high)


def _interval_lines(coverages: Mapping[str, IntervalCoverage]) -> TextTable | None:
    rows = [(stratum, *interval_cells(stratum, coverage)) for stratum, coverage in coverages.items()]
    return TextTable(INTERVAL_COLUMNS, rows) if rows else None


def _source_lines(summary: ValidationSummary) -> TextTable:
    rows = []
    for source, quality in summary.statistics_by_source.items():
        rows.append((source or "not stated", *quality_cells(quality)))
        subsets = source_subsets(summary, source).items()
        rows += [(f"\N{EM SPACE}{name}", *quality_cells(subset_quality)) for name, subset_quality in subsets]
    extra_rows = (*macro_rows(summary), *simulated_rows(summary))
    total_rows = [("all cases", *quality_cells(summary.overall)), *((name, *cells) for name, cells in extra_rows)]
    return TextTable(("source", *QUALITY_COLUMNS), rows, total_rows)


def _ranking_lines(ranking: LayoutRanking) -> TextTable:
    rows = [(source, *ranking_cells(source_ranking)) for source, source_ranking in ranking.by_source().items()]
    return TextTable(RANKING_COLUMNS, rows, [("all sets", *ranking_cells(ranking))])
