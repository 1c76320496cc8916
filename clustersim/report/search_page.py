"""How is a search looked at? The layout to take, the best ones, what they trade, how degrees matter, why, and how sure.

Times are those of simulations; where a cell or a line was not simulated it says so.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import combinations
from pathlib import Path
from typing import Final

import numpy as np
from markupsafe import Markup

from clustersim.analysis.parts import PARTS
from clustersim.analysis.search import Bounded, Found, Layout
from clustersim.report.document import Card, card, document, drawn, prose
from clustersim.report.draw.bars import Drawn, chart, lines, points, words_in
from clustersim.report.figure import Figure, Traces, axis, layout, legend, time_scale
from clustersim.report.keys import Cells, stacked, table
from clustersim.report.parts.difference import part_changes
from clustersim.report.printed.search import (
    band_words,
    bare,
    command,
    counted,
    differences,
    headline,
    keys_of,
    pair_words,
    run_words,
    short,
)
from clustersim.units import format_bytes, format_energy, format_number, format_step_time

_ASKED: Final = (
    "layout.tp", "layout.pp", "schedule", "layout.data", "training.microbatch", "layout.ep", "layout.cp",
    "training.recompute",
)  # fmt: skip
_HEADS: Final = ("step", "expected", "tokens/s/GPU", "MFU", "memory", "cost of 1T tokens", "energy of 1T tokens")
_MOST_AXES: Final = 6  # of which pairs are drawn
_SHADES: Final = ("#00415F", "#0072B2", "#4A9CCB", "#8FC1DE", "#C3CCD4", "#DDE2E6")  # of lines, fastest first
_MOST_LINES: Final = 400
_MOST_REASONS: Final = 40


def search_page(found: Found, file: Path) -> str:
    """The page as HTML text."""
    cards = [_verdict_card(found, file)]
    if found.simulated:
        cards += [_best_card(found, file), *_jobs_card(found), *_drawn(found), *_why_cards(found), *_sure_card(found)]
    return document(f"Best layouts of {file.name}", [*cards, _aside_card(found)])


def _verdict_card(found: Found, file: Path) -> Card:
    content: list[Markup] = []
    if found.simulated:
        told = run_words(found.choice)
        content += [Markup('<p class="subject">{}</p>').format(told)] * bool(told)
        content.append(Markup("<p><code>{}</code></p>").format(command(found, found.choice, file)))
    notes = [] if found.complete else ["The search was stopped before its end: a better layout may be left."]
    tied = sum(each.tied for each in found.simulated)
    if tied > 1:
        notes.append(
            f"{tied} layouts are as good, as far as runs of one and the same differ; of these the plainest is taken."
        )
    answer = headline(found) if found.simulated else "nothing was simulated yet"
    return drawn(
        "answer.html", label="best layout", answer=answer, subject=counted(found), content=content, notes=notes
    )


def _best_card(found: Found, file: Path) -> Card:
    heads = ("layout", *_HEADS, "to run it")
    rows = [_row(each, command(found, each, file), taken=each is found.choice) for each in found.best]
    if found.first is not None:
        rows.append(_row(found.first, command(found, found.first, file)))
    return card("The best layouts", table(heads, rows, words=(1 + len(_HEADS),)))


def _row(each: Layout, again: str, *, taken: bool = False) -> Cells:
    name = short(each) or "the file's own"
    run = Markup("<details><summary>command</summary><code>{}</code></details>").format(again)
    return Cells((name, *_numbers(each), run), "sum" if taken else "")


def _numbers(each: Layout) -> tuple[str, ...]:
    return (
        format_step_time(each.step_time),
        band_words(each),
        format_number(each.tokens_per_gpu),
        f"{each.mfu:.1%}",
        format_bytes(each.peak_memory),
        "–" if each.cost is None else f"{format_number(each.cost)} {each.currency}",
        "–" if each.energy is None else format_energy(each.energy),
    )


def _jobs_card(found: Found) -> Iterable[Card]:
    if len(found.of_jobs) < 2:
        return
    heads = ("cluster", "GPUs", *_HEADS, "layout")
    rows = (Cells((each.cluster, f"{each.gpus:,}", *_numbers(each), short(each))) for each in found.of_jobs)
    yield card("The best on each", table(heads, rows, words=(2 + len(_HEADS),)))


def _drawn(found: Found) -> Iterable[Card]:
    yield card("Time against memory", pareto_figure(found), lead=prose("pareto"))
    every: list[Layout | Bounded] = [*found.simulated, *found.bounded]
    here = [each for each in every if each.job == found.choice.job]
    axes = _axes(here)
    if len(axes) > 1:
        yield card("Which values are fast", heat_figure(found, axes), lead=prose("values"))
    shown = found.simulated[:_MOST_LINES]
    axes = _axes(shown)
    if len(axes) > 1:
        yield card("All that was simulated", lines_figure(shown, axes), lead=prose("simulated"))


def _axes(layouts: Sequence[Layout | Bounded]) -> dict[str, list[str]]:
    """Keys in which layouts differ, with their values in order; first those that people ask for first."""
    values: dict[str, set[str]] = {}
    for each in layouts:
        for key, value in keys_of(each.overrides).items():
            values.setdefault(key, set()).add(value)
    asked = [*(key for key in _ASKED if key in values), *sorted(values.keys() - {*_ASKED})]
    return {key: sorted(values[key], key=_order) for key in asked if len(values[key]) > 1}


def _order(value: str) -> tuple[int, float, str]:
    """Numbers first, as numbers."""
    return (0, float(value), "") if value.isdecimal() else (1, 0.0, value)


def pareto_figure(found: Found) -> Figure:
    """Step time against memory that is left, a trace for each number of GPUs, and the line of what nothing beats."""
    scale = time_scale(max(each.step_time for each in found.simulated))
    jobs = sorted({(each.gpus, each.cluster) for each in found.simulated})
    traces: Traces = []
    for place, (gpus, cluster) in enumerate(jobs):
        there = [each for each in found.simulated if (each.gpus, each.cluster) == (gpus, cluster)]
        traces.append(_dots(there, f"{gpus:,} GPUs of {cluster}", _COLOURS[place % len(_COLOURS)], scale.size))
        front = [each for each in found.pareto if (each.gpus, each.cluster) == (gpus, cluster)]
        traces.append(lines(*_places(front, scale.size), {"color": "@muted", "width": 1, "dash": "dot"}))
    taken = _dots([found.choice], "to take", "@ink", scale.size)
    taken["marker"] |= {"symbol": "star", "size": 14}
    return Figure(
        name="pareto",
        traces=[*traces, taken],
        layout=layout(
            showlegend=True,
            legend=legend(),
            xaxis=axis(f"step time [{scale.unit}]"),
            yaxis=axis("memory left on the fullest GPU [GiB]", rangemode="tozero"),
        ),
        height=380,
        narrow={"legend": {"font": {"size": 9}}},
    )


_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8D96A0")


def _dots(layouts: Sequence[Layout], name: str, colour: str, size: float) -> Drawn:
    return points(
        name, *_places(layouts, size), {"color": colour, "size": 8, "opacity": 0.75},
        customdata=[[escape(short(each)), format_step_time(each.step_time)] for each in layouts],
        hovertemplate="<b>%{customdata[1]}</b>, %{y:.1f} GiB left<br>%{customdata[0]}<extra></extra>",
    )  # fmt: skip


def _places(layouts: Sequence[Layout], size: float) -> tuple[list[float], list[float]]:
    """Step times and what is left of the memory."""
    return [each.step_time / size for each in layouts], [each.headroom / 2**30 for each in layouts]


def heat_figure(found: Found, axes: Mapping[str, list[str]]) -> Figure:
    """The fastest step for each pair of values of two keys; a choice for each pair of keys."""
    keys = [*axes][:_MOST_AXES]
    choices = tuple((f"{_word(one)} and {_word(two)}", [_heat(found, one, two)]) for one, two in combinations(keys, 2))
    most = max(len(axes[key]) for key in keys)
    return Figure(
        name="heat",
        traces=[],
        layout=layout(
            xaxis=axis("", type="category", fixedrange=True),
            yaxis=axis("", type="category", fixedrange=True, ticksuffix="  "),
            dragmode=False,
        ),
        height=110 + 34 * most,
        narrow={"font": {"size": 9}},
        choices=choices,
    )


def _heat(found: Found, one: str, two: str) -> Drawn:
    """Of the job of the layout to take."""
    times: dict[tuple[str, str], float] = {}
    bounds: dict[tuple[str, str], float] = {}
    for each in found.simulated:
        _least(times, keys_of(each.overrides), (one, two), each.score, here=each.job == found.choice.job)
    for bounded in found.bounded:
        _least(bounds, keys_of(bounded.overrides), (one, two), bounded.bound, here=bounded.job == found.choice.job)
    rows, columns = (sorted({pair[place] for pair in (*times, *bounds)}, key=_order) for place in (0, 1))
    scores = [[times.get((row, column), bounds.get((row, column))) for column in columns] for row in rows]
    words = [[_cell(times.get((row, column)), bounds.get((row, column)), found) for column in columns] for row in rows]
    return {
        "type": "heatmap", "x": [pair_words(two, column) for column in columns],
        "y": [pair_words(one, row) for row in rows], "z": scores, "text": words,
        "texttemplate": "%{text}", "hovertemplate": "%{y}, %{x}: %{text}<extra></extra>",
        "colorscale": [[0, "#8FC1DE"], [1, "#EEF3F8"]], "showscale": False, "xgap": 2, "ygap": 2,
    }  # fmt: skip


def _least(
    found: dict[tuple[str, str], float], keys: Mapping[str, str], pair: tuple[str, str], score: float, *, here: bool
) -> None:
    if here and all(key in keys for key in pair):
        one, two = (keys[key] for key in pair)
        found[one, two] = min(found.get((one, two), float("inf")), score)


def _cell(time: float | None, bound: float | None, found: Found) -> str:
    """A score in words."""
    if time is not None:
        return found.score_words(time)
    return "" if bound is None else f"≥ {found.score_words(bound)}"


def _word(key: str) -> str:
    return key.rpartition(".")[2].replace("_", " ")


def lines_figure(layouts: Sequence[Layout], axes: Mapping[str, list[str]]) -> Figure:
    """Parallel coordinates: a place for each key, a line for each layout through its values, the darker the faster."""
    keys, scores = [*axes], [each.score for each in layouts]
    groups: dict[int, list[Layout]] = {}
    low, span = min(scores), max(scores) - min(scores)
    for each in layouts:
        shade = int((each.score - low) / span * (len(_SHADES) - 1)) if span else 0
        groups.setdefault(shade, []).append(each)
    traces = [_lines(groups[shade], shade, axes) for shade in sorted(groups, reverse=True)]
    return Figure(
        name="lines",
        traces=[*traces, _values(axes)],
        layout=layout(
            xaxis=axis("", tickvals=[*range(len(keys))], ticktext=[_word(key) for key in keys], fixedrange=True,
                       range=[-0.3, len(keys) - 0.5]),
            yaxis=axis("", visible=False, fixedrange=True, range=[-0.08, 1.08]),
            dragmode=False,
        ),
        height=160 + 44 * max(map(len, axes.values())),
        narrow={"font": {"size": 9}},
    )  # fmt: skip


def _height(key: str, value: str, axes: Mapping[str, list[str]]) -> float:
    return axes[key].index(value) / (len(axes[key]) - 1)


def _lines(layouts: Sequence[Layout], shade: int, axes: Mapping[str, list[str]]) -> Drawn:
    """Layouts of one shade, with gaps between them and where one has no value of a key."""
    places: list[float | None] = []
    heights: list[float | None] = []
    words: list[list[str]] = []
    for each in layouts:
        keys = keys_of(each.overrides)
        places += [*range(len(axes)), None]
        heights += [_height(key, keys[key], axes) if key in keys else None for key in axes] + [None]
        words += [[format_step_time(each.step_time), escape(short(each))]] * (len(axes) + 1)
    return {
        "type": "scatter", "mode": "lines+markers", "x": places, "y": heights, "customdata": words,
        "hovertemplate": "<b>%{customdata[0]}</b><br>%{customdata[1]}<extra></extra>",
        "line": {"color": _SHADES[shade], "width": 1 if shade else 2.5}, "marker": {"size": 6},
    }  # fmt: skip


def _values(axes: Mapping[str, list[str]]) -> Drawn:
    """The values beside their places."""
    every = [(place, _height(key, value, axes), value) for place, key in enumerate(axes) for value in axes[key]]
    x, y, values = zip(*every, strict=True)
    words = [f" {escape(bare(value))}" for value in values]
    return words_in(list(x), list(y), words, textfont={"color": "@ink", "size": 11}, textposition="top right")


def _why_cards(found: Found) -> Iterable[Card]:
    rivals = [("the next", found.runner_up), ("the file's own layout", found.first)]
    there = [(name, other) for name, other in rivals if other is not None]
    if not there:
        return
    words = Markup("").join(
        Markup("<li><b>{}</b> ({}): {}</li>").format(name, short(other) or "as it is", differences(found, other))
        for name, other in there
    )
    told = Markup("<ul>{}</ul>").format(words)
    yield card("Why this and not that", why_figure(found, there), told, lead=prose("why"))


def why_figure(found: Found, others: Sequence[tuple[str, Layout]]) -> Figure:
    """For each other layout a bar for every part that differs."""
    whys = [found.why(other) for _, other in others]
    changes = np.array([[why.get(part.value, 0.0) for part in PARTS] for why in whys])
    scale = time_scale(float(np.abs(changes).max(initial=0.0)))
    return chart(
        "why",
        part_changes([name for name, _ in others], changes, scale),
        axis(f"longer by [{scale.unit}]", zeroline=True),
        height=110 + 50 * len(others),
        narrow={"legend": {"font": {"size": 9}}},
        stacked="relative",
        bargap=0.3,
    )


def _sure_card(found: Found) -> Iterable[Card]:
    if not found.changes or len(found.rivals) < 2:
        return
    heads = ("changed", *(stacked((f"layout {place}", short(each))) for place, each in enumerate(found.rivals, 1)))
    rows = [Cells(("as it is", *(f"{found.score_words(each.score)}" for each in found.rivals)))]
    rows += [Cells((each.words, *_scores(each.scores, each.best, found))) for each in found.changes]
    lost = found.overtaken
    words = f"Another is better with {', '.join(lost)}." if lost else "No other is better with any of these changes."
    if any(each.best for each in found.changes if each.words not in lost):
        words += " Where another is bold, both are as good, as far as runs of one and the same differ."
    yield card("Does it stay the best?", table(heads, rows), lead=prose("sure"), caption=words)


def _scores(scores: Sequence[float | None], best: int | None, found: Found) -> Iterable[str]:
    for place, score in enumerate(scores):
        words = "–" if score is None else found.score_words(score)
        yield Markup("<b>{}</b>").format(words) if place == best else words


def _aside_card(found: Found) -> Card:
    reasons = [*found.pruned.items()][:_MOST_REASONS]
    rows = [Cells((reason, f"{each.count:,}", each.example.partition(": ")[2])) for reason, each in reasons]
    rows.append(Cells(("a bound above the best ones", f"{len(found.bounded):,}", "")))
    rows.append(Cells(("simulated", f"{len(found.simulated):,}", "")))
    rows.append(Cells(("combinations of values", f"{found.candidates:,}", ""), "sum"))
    return card("What became of all layouts", table(("", "layouts", "such as"), rows, words=(2,)))
