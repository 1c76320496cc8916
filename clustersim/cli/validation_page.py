"""How do summaries become a page? Their comparisons and qualities, as the plain rows that the report draws."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from clustersim.cli.validation_table import (
    BANDED,
    HEADS,
    RANKED,
    TITLES,
    band_cells,
    coverage_notes,
    macro_lines,
    parts_of,
    quality_cells,
    ranking_cells,
    simulated_lines,
    simulated_name,
)
from clustersim.common.files import write_text_atomically
from clustersim.report.validation_page import Lines, Part, Point, validation_page
from clustersim.validation.comparison import Band, Comparison
from clustersim.validation.error_statistics import Inside
from clustersim.validation.layout_ranking import Ranking
from clustersim.validation.summary import Summary

_UNITS: Final = {"memory": "B", "reliability": ""}


def write_page(summaries: Sequence[Summary], title: str, path: str) -> None:
    """Write the page; raise OutputError if it cannot be written."""
    rankings = [summary.layouts for summary in summaries if summary.layouts is not None and summary.layouts.sets]
    layouts = _layouts(rankings[0]) if rankings else None
    write_text_atomically(path, validation_page(title, [_part(item) for item in summaries], layouts))


def _part(summary: Summary) -> Part:
    points = tuple(
        Point(
            comparison.case_id,
            source,
            comparison.measured,
            comparison.predicted,
            dict(comparison.factors),
            _ends(comparison.band),
        )
        for source, comparison in _named(summary)
        if comparison.predicted is not None and comparison.error is not None and math.isfinite(comparison.error)
    )
    unit = _UNITS.get(summary.kind, "s")
    notes = tuple(f"{note[0].upper()}{note[1:]}." for note in coverage_notes(summary))
    title = TITLES[summary.kind].capitalize()
    return Part(title, unit, points, _sources(summary), summary.reasons, notes, _bands(summary.bands))


def _named(summary: Summary) -> Iterator[tuple[str, Comparison]]:
    """All cases, with what their sources are called."""
    yield from ((comparison.source, comparison) for comparison in summary.comparisons)
    yield from ((simulated_name(item.source), item) for item in summary.simulated)


def _ends(band: Band | None) -> tuple[float, float] | None:
    return None if band is None else (band.low, band.high)


def _bands(bands: Mapping[str, Inside]) -> Lines | None:
    rows = [(regime, *band_cells(regime, inside)) for regime, inside in bands.items()]
    return Lines(BANDED, rows) if rows else None


def _sources(summary: Summary) -> Lines:
    rows = []
    for source, quality in summary.sources.items():
        rows.append((source or "not stated", *quality_cells(quality)))
        parts = parts_of(summary, source).items()
        rows += [(f"\N{EM SPACE}{name}", *quality_cells(part)) for name, part in parts]
    further = (*macro_lines(summary), *simulated_lines(summary))
    sums = [("all cases", *quality_cells(summary.overall)), *((name, *cells) for name, cells in further)]
    return Lines(("source", *HEADS), rows, sums)


def _layouts(ranking: Ranking) -> Lines:
    rows = [(source, *ranking_cells(mine)) for source, mine in ranking.by_source().items()]
    return Lines(RANKED, rows, [("all sets", *ranking_cells(ranking))])
