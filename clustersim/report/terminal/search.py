"""How is a layout search summarized on the terminal?

The best layout and why, its rivals, and why others were excluded.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Final

from clustersim.common.units import format_bytes, format_probability, format_seconds, format_step_time
from clustersim.report.terminal.table import build_table, plain_text, warning_lines
from clustersim.results.search_result import (
    DERIVED_KEYS,
    SURELY_BETTER,
    BoundedLayout,
    LayoutResult,
    SearchResult,
    override_values,
)
from clustersim.results.utilization import LeadingMfu

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table
    from rich.text import Text

STEP_TIME_OBJECTIVE: Final = "step-time"
_OBJECTIVE_SUFFIXES: Final = {
    "cost": " per trillion tokens",
    "energy": " per trillion tokens",
    "run-cost": " for the run",
}
_OBJECTIVE_LABELS: Final = {"tokens-per-gpu": "tokens/s/GPU", "run-cost": "cost"}
_MAX_CATEGORIES: Final = 4  # maximum number of categories listed
_MAX_REASONS: Final = 8
_MIN_RELATIVE_CHANGE: Final = 0.001  # relative to the step: categories that change by less are omitted


def render_search(result: SearchResult, *, resumable: bool = False) -> "Group":
    """Rich renderable: coloured on a terminal, plain elsewhere."""
    from rich.console import Group

    renderables: list[RenderableType] = [render_choice(result, resumable=resumable)]
    if not result.simulated:
        return Group(*renderables, plain_text("nothing was simulated yet"))
    renderables += [plain_text(""), *_best_layouts(result)]
    if len(result.best_by_job) > 1:
        job_rows = (
            ((layout.cluster, f"{layout.gpus:,}"), layout, layout_label(layout, result))
            for layout in result.best_by_job
        )
        renderables += [
            plain_text(""),
            plain_text("the best on each", "bold"),
            _layout_table(("cluster", "GPUs"), result, job_rows),
        ]
    pruned = [(f"{entry.count:,}", reason, entry.example.partition(": ")[2]) for reason, entry in result.pruned.items()]
    pruned_table = build_table(("", "pruned by", "such as"), pruned[:_MAX_REASONS], right_aligned=(0,))
    renderables += [
        plain_text(""),
        *_reason_lines(result),
        *_robustness_lines(result),
        plain_text(""),
        plain_text(f"{describe_counts(result)}, in {format_seconds(result.wall_seconds)}"),
        pruned_table,
    ]
    return Group(*renderables)


def render_choice(result: SearchResult, *, resumable: bool = False) -> "Group":
    """Rich renderable of the layout to take, and of what has to be known about it."""
    from rich.console import Group

    hint = "the same command resumes it" if resumable else "with --resume DIR, a later search continues from there"
    stopped = [] if result.complete else [plain_text(f"stopped before the end; {hint}", "yellow")]
    set_aside = (plain_text(f"set aside, {job.name}: {job.reason}", "yellow") for job in result.set_aside)
    choice = _choice_lines(result) if result.simulated else ()
    note = [plain_text(result.convergence_note, "dim")] if result.convergence_note else []
    return Group(*stopped, *set_aside, *choice, *note, *warning_lines(result.warnings))


def headline(result: SearchResult) -> str:
    """The chosen layout's step time, and the change against the file's own layout."""
    choice = result.recommended
    score_label = (
        ""
        if result.objective == STEP_TIME_OBJECTIVE
        else f", {result.format_score(choice.score)}{_OBJECTIVE_SUFFIXES.get(result.objective, '')}"
    )
    comparison = "" if result.first_guess is None else _compare_with_initial(result, result.first_guess)
    unit = "for each global batch, outer exchange included" if result.variant_count else "a step"
    return f"best layout: {format_step_time(choice.step_time)} {unit}{score_label}{comparison}"


def _compare_with_initial(result: SearchResult, initial: LayoutResult) -> str:
    """Change of the chosen layout against the file's own."""
    if initial.headroom < 0.0:
        needed, capacity = format_bytes(initial.peak_memory), format_bytes(initial.memory)
        return f"; the file's own layout does not fit ({needed} of {capacity})"
    if result.recommended.leaves_headroom and not initial.leaves_headroom:
        left, probability = format_bytes(initial.headroom), format_probability(initial.fit_probability)
        return f"; the file's own layout leaves only {left} of memory (it fits with a probability of {probability})"
    if result.recommended.score == initial.score:
        return ", the file's own layout"
    ratio = result.recommended.score / initial.score
    change = (1.0 / ratio if result.shows_inverse_score else ratio) - 1.0
    if abs(change) < _MIN_RELATIVE_CHANGE:
        return ", as good as the file's own layout"
    subject = (
        ""
        if result.objective == STEP_TIME_OBJECTIVE
        else f" {_OBJECTIVE_LABELS.get(result.objective, result.objective)}"
    )
    return f", {change:+.1%}{subject} against the file's own layout"


def run_command(result: SearchResult, layout: LayoutResult, file: Path) -> str:
    """Shell command that runs a layout."""
    set_options = " ".join(f"--set {quote(override)}" for override in (*result.base_overrides, *layout.overrides))
    return f"clustersim {'diloco' if result.variant_count else 'run'} {quote(str(file))} {set_options}"


def layout_label(layout: LayoutResult, result: SearchResult) -> str:
    """Short label that distinguishes a layout; empty for the file's own."""
    return _format_keys(shown_keys(layout, result))


def _format_keys(keys: Mapping[str, str]) -> str:
    return ", ".join(format_pair(key, value) for key, value in keys.items())


def format_pair(key: str, value: str) -> str:
    """A key and its value; the value alone if it is self-explanatory."""
    key_name = key.rpartition(".")[2]
    if key_name in ("schedule", "data", "name", "path"):
        return simplify_value(value)
    if key == "cluster.gpus":
        return f"{int(value):,} GPUs"
    if key == "training.recompute" and value == "none":
        return "no recompute"
    return f"{key_name} {simplify_value(value)}"


def simplify_value(value: str) -> str:
    """A mapping value in short notation.

    >>> simplify_value("{interleaved: {chunks: 4}}"), simplify_value("{hsdp: {shard: 8}}")
    ('interleaved x 4', 'hsdp over 8')
    >>> simplify_value("{layers: 2}")
    'layers 2'
    """
    plain = value.translate(str.maketrans("", "", '{}"')).replace("interleaved: chunks: ", "interleaved x ")
    return plain.replace(": shard: ", " over ").replace("layers: ", "layers ")


def shown_keys(layout: LayoutResult | BoundedLayout, result: SearchResult) -> dict[str, str]:
    """Relevant keys with their values; keys that follow from others are omitted."""
    hidden = set(DERIVED_KEYS) - result.varying_derived_keys
    return {key: value for key, value in override_values(layout).items() if key not in hidden and value != "null"}


def format_interval(layout: LayoutResult) -> str:
    """Prediction interval of the step time; the unit is given once if it is the same."""
    low, high = map(format_step_time, layout.interval)
    first, *units = low.split(" ")  # of a long step several: "2 min 5 s"
    return f"{first}-{high}" if units == high.split(" ")[1:] else f"{low}-{high}"


def describe_counts(result: SearchResult) -> str:
    """How many layouts there were, and how many were pruned, bounded and simulated."""
    pruned_count = sum(layouts.count for layouts in result.pruned.values())
    extrapolated_count = sum(entry.extrapolated for entry in result.simulated)
    extrapolated_note = f" ({extrapolated_count:,} of them with fewer microbatches)" if extrapolated_count else ""
    return (
        f"{result.candidates:,} combinations: {pruned_count:,} pruned, {len(result.bounded):,} excluded by "
        "their bounds, "
        f"{len(result.simulated) // max(1, result.variant_count):,} simulated{extrapolated_note}"
        f"{_variant_note(result)}"
    )


def _variant_note(result: SearchResult) -> str:
    """With how many settings of local training each layout was evaluated."""
    return f", each with {result.variant_count:,} settings of local training" if result.variant_count else ""


def describe_differences(result: SearchResult, other: LayoutResult) -> str:
    """Time categories that are longer or shorter in another layout than in the chosen one."""
    min_seconds = _MIN_RELATIVE_CHANGE * result.recommended.step_time
    changes = [
        (name, delta) for name, delta in result.category_differences(other).items() if abs(delta) >= min_seconds
    ][:_MAX_CATEGORIES]
    change_labels = [
        f"{format_seconds(abs(delta))} {'more' if delta > 0 else 'less'} {name}" for name, delta in changes
    ]
    return ", ".join(change_labels) if change_labels else "no time category differs by 0.1% of the step"


def _choice_lines(result: SearchResult) -> "Iterator[Text]":
    yield plain_text(headline(result), "bold")
    yield plain_text(layout_label(result.recommended, result))
    if run := describe_training_run(result.recommended):
        yield plain_text(run)
    yield plain_text(describe_fit(result), "" if result.recommended.leaves_headroom else "bold red")
    if tie_note := describe_ties(result):
        yield plain_text(tie_note, "dim")


def describe_fit(result: SearchResult) -> str:
    """How much memory the chosen layout leaves, how surely it fits, and which headroom was asked for."""
    choice = result.recommended
    fit = (
        f"{format_bytes(choice.headroom)} of {format_bytes(choice.memory)} left, fits with a probability of "
        f"{format_probability(choice.fit_probability)}"
    )
    if not choice.leaves_headroom:
        return f"UNSAFE: no layout leaves a headroom of {choice.required_headroom:.1%}; this is the best without: {fit}"
    return f"{fit} (headroom {choice.required_headroom:.1%})" if choice.required_headroom else f"{fit} (no headroom)"


def describe_ties(result: SearchResult) -> str:
    """Which of the layouts that tie was chosen, and why; empty if none ties."""
    tied = [layout for layout in result.simulated if layout.tied]
    if len(tied) < 2:
        return ""
    choice, note = result.recommended, f"{len(tied)} layouts tie within run-to-run variation; "
    if min(layout.fit_probability for layout in tied) + SURELY_BETTER < choice.fit_probability:
        more = choice.headroom - min(layout.headroom for layout in tied)
        return f"{note}this one is preferred as it leaves up to {format_bytes(more)} more memory"
    if result.variant_count:
        return f"{note}the one with the fewest inner steps, closest to synchronous training, is recommended"
    return note + (
        "the simplest of them is recommended"
        if result.preferred
        else "the recommended one is also the simplest of them"
    )


def describe_training_run(layout: LayoutResult) -> str:
    """Days, goodput, spare nodes and checkpoint interval of a whole training run; empty if not requested."""
    run = layout.run
    if run is None:
        return ""
    spares = run["spare_nodes"]
    return (
        f"{run['days']:.1f} days with failures, goodput {run['goodput']:.1%}, {spares:,} spare "
        f"node{'' if spares == 1 else 's'}, a checkpoint every {format_seconds(run['interval'])}"
    )


def _best_layouts(result: SearchResult) -> "Iterator[RenderableType]":
    """The best layouts, by the keys in which they differ; common keys are printed once."""
    keys = [shown_keys(layout_result, result) for layout_result in result.best]
    common = dict(
        key_value
        for key_value in keys[0].items()
        if all(key_value in keys_of_layout.items() for keys_of_layout in keys)
    )
    rows = []
    for index, layout in enumerate(result.best):
        is_chosen = layout is result.recommended
        mark = "*" if is_chosen else "=" if layout.tied else " "
        distinct_keys = _format_keys({key: value for key, value in keys[index].items() if key not in common})
        rows.append(((f"{(result.preferred if is_chosen else index) + 1}{mark}",), layout, distinct_keys))
    if result.first_guess is not None:
        rows.append((("file ",), result.first_guess, "as it is"))
    yield _layout_table(("",), result, rows)
    if common:
        yield plain_text(f"all of them: {_format_keys(common)}", "dim")


def _number_cells(layout: LayoutResult, result: SearchResult) -> dict[str, str]:
    """Compared numbers of a layout, by header."""
    score_cell = (
        {} if result.objective == STEP_TIME_OBJECTIVE else {result.objective: result.format_score(layout.score)}
    )
    leading = LeadingMfu.select(layout.mfu, layout.mfu_causal)
    step, memory = format_step_time(layout.step_time), format_bytes(layout.peak_memory)
    return {
        "step": step,
        "90% interval": format_interval(layout),
        **score_cell,
        leading.name: f"{leading.value:.1%}",
        "memory": memory,
        "fits": f"{format_probability(layout.fit_probability)}{'' if layout.leaves_headroom else ' unsafe'}",
    }


def _layout_table(
    leading_headers: Sequence[str], result: SearchResult, rows: Iterable[tuple[Sequence[str], LayoutResult, str]]
) -> "Table":
    """Rows of leading cells, a layout's numbers, and its label. leading_headers: of the first cells."""
    headers = (*leading_headers, *_number_cells(result.recommended, result), "layout")
    cells = [(*leading_cells, *_number_cells(layout, result).values(), label) for leading_cells, layout, label in rows]
    return build_table(headers, cells, right_aligned=range(len(headers) - 1))


def _reason_lines(result: SearchResult) -> "Iterator[Text]":
    if (other := result.runner_up) is not None:
        yield plain_text(f"runner-up, {layout_label(other, result)}: {describe_differences(result, other)}")
    if result.first_guess is not None:
        yield plain_text(f"the file's own layout: {describe_differences(result, result.first_guess)}")


def _robustness_lines(result: SearchResult) -> "Iterator[Text]":
    """Whether the chosen layout stays the best of its rivals under changed assumptions."""
    evaluated_changes = [change for change in result.sensitivity if change.scores and change.scores[0] is not None]
    if len(result.rivals) < 2 or not evaluated_changes:
        return
    overtaking_changes = result.rank_changes
    conclusion = (
        f"another is better with {'; '.join(overtaking_changes)}"
        if overtaking_changes
        else "no other layout is better with any of these"
    )
    yield plain_text(f"with {'; '.join(change.description for change in evaluated_changes)}: {conclusion}")
