"""How do summaries become a page? Their comparisons and qualities, as the plain rows that the report draws."""

import math
from collections.abc import Mapping, Sequence
from typing import Final

from clustersim.cli.validate_table import (
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
)
from clustersim.report.files import write_text_atomically
from clustersim.report.keys import Cells
from clustersim.report.validation import Lines, Part, Point, validation_page
from clustersim.validation.comparison import Band
from clustersim.validation.layouts import Ranking
from clustersim.validation.quality import Inside
from clustersim.validation.summary import Summary

_UNITS: Final = {"memory": "B", "reliability": ""}


def write_page(summaries: Sequence[Summary], title: str, path: str) -> None:
    """Write the page; raise OutputError if it cannot be written."""
    rankings = [each.layouts for each in summaries if each.layouts is not None and each.layouts.sets]
    layouts = _layouts(rankings[0]) if rankings else None
    write_text_atomically(path, validation_page(title, [_part(each) for each in summaries], layouts))


def _part(summary: Summary) -> Part:
    points = tuple(
        Point(each.case_id, each.source, each.measured, each.predicted, dict(each.factors), _ends(each.band))
        for each in summary.comparisons
        if each.predicted is not None and each.error is not None and math.isfinite(each.error)
    )
    unit = _UNITS.get(summary.kind, "s")
    notes = tuple(f"{note[0].upper()}{note[1:]}." for note in coverage_notes(summary))
    title = TITLES[summary.kind].capitalize()
    return Part(title, unit, points, _sources(summary), summary.reasons, notes, _bands(summary.bands))


def _ends(band: Band | None) -> tuple[float, float] | None:
    return None if band is None else (band.low, band.high)


def _bands(bands: Mapping[str, Inside]) -> Lines | None:
    rows = tuple(Cells((regime, *band_cells(regime, inside))) for regime, inside in bands.items())
    return Lines(BANDED, rows) if rows else None


def _sources(summary: Summary) -> Lines:
    rows: list[Cells] = []
    for source, quality in summary.sources.items():
        rows.append(Cells((source or "not stated", *quality_cells(quality))))
        parts = parts_of(summary, source).items()
        rows += [Cells((f"\N{EM SPACE}{name}", *quality_cells(part))) for name, part in parts]
    rows.append(Cells(("all cases", *quality_cells(summary.overall)), "sum"))
    rows += [Cells((name, *cells), "sum") for name, cells in macro_lines(summary)]
    return Lines(("source", *HEADS), tuple(rows))


def _layouts(ranking: Ranking) -> Lines:
    rows = [Cells((source, *ranking_cells(mine))) for source, mine in ranking.by_source().items()]
    return Lines(RANKED, (*rows, Cells(("all sets", *ranking_cells(ranking)), "sum")))
