"""How does a terminal show how far predictions are off? A table by source, one for each factor, and what is missing."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from clustersim.cli.presets import table_of
from clustersim.common.units import format_bytes, format_number, format_step_time
from clustersim.uncertainty.model_file import load_uncertainty_model
from clustersim.validation.error_statistics import Inside, Macro, Quality, by_source
from clustersim.validation.layout_ranking import Ranking
from clustersim.validation.memory import Verdict
from clustersim.validation.speedup_pairs import Pair, Pairs
from clustersim.validation.summary import Coverage, Summary

HEADS: Final = ("cases", "skipped", "mean", "median", "bias", "worst")
TITLES: Final[Mapping[str, str]] = {
    "steps": "step time",
    "memory": "memory",
    "collectives": "collectives",
    "kernels": "kernels",
    "reliability": "reliability",
}
WORDS: Final[Mapping[str, Callable[[float], str]]] = {"memory": format_bytes, "reliability": format_number}
"""How a quantity of a table is told, where it is no time."""
BANDED: Final = ("regime", "cases", "sources", "inside", "published, left out")
PAIRED: Final = ("case", "with", "measured", "predicted", "error")
PAIRED_IN: Final = {
    "formats": "speed-up over bf16, of the same case published in both",
    "experts": "speed-up of mixtures, of the same case published without",
}
"""What tables of pairs are called, by what the pairs differ in."""
RANKED: Final = ("source", "sets", "cases", "right", "regret", "by chance", "tau")
_NOTHING: Final = "–"
_MOST_REASONS: Final = 12
_MOST_LETTERS: Final = 80
_MOST_CASES: Final = 30  # of a table whose cases are listed one by one
_SIGNS: Final = (
    "mean and median: of absolute errors; bias and worst: with their sign, below zero where the prediction is too "
    "fast or too small; macro mean: every source counts once; right: sets whose fastest layout was predicted; "
    "regret: what is chosen by prediction takes longer than the fastest measured, on average; by chance: the same of a "
    "blind choice"
)


def print_summaries(summaries: Sequence[Summary]) -> None:
    """Print all that is known of each table."""
    console = Console()
    for summary in summaries:
        for part in _parts(summary):
            console.print(part)
    console.print(Text(_SIGNS, style="dim"))


def _parts(summary: Summary) -> Iterator[Table | Text]:
    yield _sources(summary)
    yield Text()
    yield from map(Text, coverage_notes(summary))
    yield from _reasons(summary.reasons)
    yield Text()
    if len(summary.comparisons) + len(summary.simulated) <= _MOST_CASES:
        yield _cases(summary)
        yield Text()
    for factor, values in summary.factors.items():
        yield _table(f"{TITLES[summary.kind]} by {factor}", factor, values)
        yield Text()
    if summary.layouts is not None and summary.layouts.sets:
        yield _layouts(summary.layouts)
        yield Text()
    for kind, pairs in summary.pairs.items():
        if pairs.pairs:
            by_change = _table(f"{PAIRED_IN[kind]}: predicted over measured ratio", "with", pairs.by_change())
            yield from (_pairs(PAIRED_IN[kind], pairs), Text(), by_change, Text())
    if summary.bands:
        yield _bands(summary.bands)
        yield Text()


def _sources(summary: Summary) -> Table:
    table = _table(f"{TITLES[summary.kind]}: predicted against measured", "source", {})
    for source, quality in summary.sources.items():
        table.add_row(Text(source or "not stated"), *quality_cells(quality))
        for name, part in parts_of(summary, source).items():
            table.add_row(Text(f"  {name}"), *quality_cells(part), style="dim")
    table.add_row(Text("all cases"), *quality_cells(summary.overall), style="bold")
    for name, cells in macro_lines(summary):
        table.add_row(Text(name), *cells, style="bold")
    for name, cells in simulated_lines(summary):
        table.add_row(Text(name), *cells, style="dim")
    return table


def _bands(bands: Mapping[str, Inside]) -> Table:
    table = table_of("measured inside the expected band", *BANDED)
    for regime, inside in bands.items():
        table.add_row(Text(regime), *band_cells(regime, inside))
    return table


def band_cells(regime: str, inside: Inside) -> tuple[str, ...]:
    """The cells below BANDED, but for the first."""
    published = load_uncertainty_model().coverage_by_stratum.get(regime)
    unseen = None if published is None else published.covered_share
    return f"{inside.n:,}", f"{inside.sources:,}", percent(inside.share), percent(unseen)


def _cases(summary: Summary) -> Table:
    """Every case, with why it was skipped."""
    table = table_of("each case", "case", "measured", "predicted", "error", "")
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    words = WORDS.get(summary.kind, format_step_time)
    for said, comparisons in (("", summary.comparisons), ("simulated", summary.simulated)):
        for comparison in comparisons:
            measured = words(comparison.measured) if math.isfinite(comparison.measured) else _NOTHING
            found = (
                (_NOTHING, _NOTHING)
                if comparison.error is None
                else (words(comparison.predicted or 0.0), f"{comparison.error:+.1%}")
            )
            table.add_row(
                Text(_cut(comparison.case_id)), measured, *found, Text(comparison.skipped or said, overflow="fold")
            )
    return table


def _table(title: str, name: str, values: Mapping[str, Quality]) -> Table:
    table = table_of(title, name, *HEADS)
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    for column in table.columns[1:]:
        column.no_wrap = True
    for value, quality in values.items():
        table.add_row(Text(_cut(value) or "not stated"), *quality_cells(quality))
    return table


def _cut(words: str) -> str:
    """Names of a table that a user brings may be of any length."""
    return words if len(words) <= _MOST_LETTERS else f"{words[:_MOST_LETTERS]}..."


def parts_of(summary: Summary, source: str) -> dict[str, Quality]:
    """The kinds of runs that a source mixes, by name."""
    return {name: part for name, part in (summary.subsets or {}).items() if name.startswith(f"{source} ")}


def simulated_lines(summary: Summary) -> list[tuple[str, tuple[str, ...]]]:
    """What predictions are beside those of other simulators, with the cells below HEADS."""
    found = by_source(summary.simulated)
    return [(simulated_name(source), quality_cells(quality)) for source, quality in found.items()]


def simulated_name(source: str) -> str:
    """What cases of a source are called whose times somebody simulated."""
    return f"not measured: simulated, {source or 'not stated'}"


def quality_cells(quality: Quality) -> tuple[str, ...]:
    """The cells below HEADS."""
    counts, sizes = (f"{quality.n:,}", f"{quality.skipped:,}"), (percent(quality.mape), percent(quality.median_ape))
    return (*counts, *sizes, signed(quality.bias), signed(quality.worst))


def macro_lines(summary: Summary) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The line of all sources, and those of dense models and of mixtures where a table has both."""
    if summary.macro is not None:
        yield macro_words(summary.macro)
    for kind, means in summary.macros.items():
        name, cells = macro_words(means)
        yield f"{name}, {kind}", cells


def macro_words(means: Macro) -> tuple[str, tuple[str, ...]]:
    """The name of the line and the cells below HEADS."""
    name = f"macro mean, {means.sources} {'source' if means.sources == 1 else 'sources'}"
    return name, ("", "", percent(means.mape), "", signed(means.bias), "")


def percent(value: float | None) -> str:
    """A fraction in percent, a dash where there is none.

    >>> percent(0.0314), percent(None)
    ('3.1%', '–')
    """
    return _NOTHING if value is None else f"{value:.1%}"


def signed(value: float | None) -> str:
    """A fraction in percent with its sign.

    >>> signed(0.031), signed(-0.2), signed(None)
    ('+3.1%', '-20.0%', '–')
    """
    return _NOTHING if value is None else f"{value:+.1%}"


def coverage_notes(summary: Summary) -> Iterator[str]:
    """How many cases are predicted of those that should be, and whether runs fit, in sentences."""
    if summary.comparisons or not summary.simulated:
        yield _coverage("coverage", summary.coverage)
    for kind, covered in summary.covered.items():
        if covered.expressible:
            yield _coverage(f"coverage of {kind}", covered)
    yield from summary.notes
    if summary.fits:
        yield _fits(summary.fits)
    judged = len(dict.fromkeys(comparison.case_id for comparison in summary.comparisons if comparison.fits is not None))
    if judged:
        named = f": {', '.join(map(_cut, summary.unfit))}" if summary.unfit else ""
        yield f"ran, but would not fit in memory as predicted: {len(summary.unfit):,} of {judged:,} runs{named}"


def _fits(verdicts: Sequence[Verdict]) -> str:
    """Of how many runs it is known whether they fit, and of which it is wrong."""
    judged = [verdict for verdict in verdicts if verdict.predicted is not None]
    wrong = [item.case_id for item in judged if not item.right]
    known = f"fits or does not fit: right for {len(judged) - len(wrong):,} of {len(judged):,} runs"
    skipped = f", {len(verdicts) - len(judged):,} are skipped" if len(judged) < len(verdicts) else ""
    return known + (f" (wrong for {', '.join(map(_cut, wrong))})" if wrong else "") + skipped


def _coverage(name: str, coverage: Coverage) -> str:
    known = f"{coverage.predicted:,} of {coverage.expressible:,}"
    return f"{name}: {known} cases that should have a prediction have one ({percent(coverage.share)})"


def _reasons(reasons: Mapping[str, tuple[str, ...]]) -> Iterator[Table | Text]:
    """The reasons of most cases, a line each, with one of the cases."""
    if not reasons:
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for reason, cases in list(reasons.items())[:_MOST_REASONS]:
        first = f" ({cases[0]})" if len(cases) == 1 else f" (as {cases[0]})"
        table.add_row(f"{len(cases):,}", Text(reason).append(_cut(first), style="dim"))
    rest = list(reasons.values())[_MOST_REASONS:]
    if rest:
        table.add_row(f"{sum(map(len, rest)):,}", f"for {len(rest):,} other reasons, which --json and --html list")
    yield Text()
    yield Text("skipped cases and the reason")
    yield table


def _layouts(ranking: Ranking) -> Table:
    table = table_of("which layout is fastest", *RANKED)
    table.columns[0].no_wrap = False
    for source, mine in ranking.by_source().items():
        table.add_row(Text(source or "not stated"), *ranking_cells(mine))
    table.add_row(Text("all sets"), *ranking_cells(ranking), style="bold")
    return table


def _pairs(title: str, pairs: Pairs) -> Table:
    table = table_of(title, *PAIRED)
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    for pair in pairs.pairs:
        table.add_row(Text(_cut(pair.second)), *pair_cells(pair))
    return table


def pair_cells(pair: Pair) -> tuple[str, ...]:
    """The cells below PAIRED, but for the first."""
    return pair.change, f"{pair.measured:.2f}", f"{pair.predicted:.2f}", signed(pair.error)


def ranking_cells(ranking: Ranking) -> tuple[str, ...]:
    """The cells below RANKED."""
    tau = _NOTHING if ranking.tau is None else f"{ranking.tau:.2f}"
    counts = (f"{count:,}" for count in (len(ranking.sets), ranking.cases, ranking.right))
    return *counts, percent(ranking.regret), percent(ranking.by_chance), tau
