"""What differs between two results: the input, the key numbers, and which time categories make a step longer?

Time categories are those of the breakdown, the mean over all ranks. They sum to the step time in each
result, so their differences sum to the difference of the step times. Categories are matched by name,
whatever the model and cluster.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.units import (
    Bytes,
    Seconds,
    format_bytes,
    format_number,
    format_seconds,
    format_signed_seconds,
    format_step_time,
)
from clustersim.report.labels import stage_name
from clustersim.report.step_breakdown import ROUNDING_TOLERANCE
from clustersim.results.result_json import IDEAL_KEY
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.time_categories import TIME_CATEGORIES, TimeCategory, compare_seconds
from clustersim.scenario.changes.diff import ChangedKey, changed_keys, changed_referenced_files

MAX_TEXT_LENGTH: Final = 60  # characters of a text in a list


@dataclass(frozen=True, slots=True)
class ResultDifference:
    """Differences between two results.

    titles: description of each; inputs: keys that differ between the scenario files; notes: caveats;
    step_times: [2] seconds; mean_seconds: [2, categories] mean over ranks; row_seconds: [2, rows, categories]
    of each pipeline rank, no rows if the pipelines differ; row_labels: [rows]; results_json: the numbers as
    `--json` writes them.
    """

    titles: tuple[str, str]
    inputs: tuple[ChangedKey, ...]
    notes: tuple[str, ...]
    step_times: FloatArray
    mean_seconds: FloatArray
    row_seconds: FloatArray
    row_labels: tuple[str, ...]
    results_json: tuple[Mapping[str, Any], Mapping[str, Any]] = field(repr=False)

    @property
    def step_time_delta(self) -> Seconds:
        """Step time of the second result minus that of the first, in seconds."""
        return float(self.step_times[1] - self.step_times[0])

    @property
    def row_deltas(self) -> FloatArray:
        """[rows, categories] second minus first, in seconds, for each pipeline rank."""
        return np.asarray(self.row_seconds[1] - self.row_seconds[0])

    @property
    def mean_deltas(self) -> FloatArray:
        """[categories] second minus first, in seconds, mean over ranks."""
        return np.asarray(self.mean_seconds[1] - self.mean_seconds[0])

    @property
    def nonzero_categories(self) -> list[TimeCategory]:
        """Categories above rounding error in either result."""
        return [
            category
            for category in TIME_CATEGORIES
            if self.exceeds_rounding(self.mean_seconds[:, category.index].max())
        ]

    @property
    def changed_categories(self) -> list[TimeCategory]:
        """Categories that differ by more than rounding error."""
        return [
            category for category in self.nonzero_categories if self.exceeds_rounding(self.mean_deltas[category.index])
        ]

    def format_delta(self, seconds: Seconds) -> str:
        """Signed time difference as text; "0 s" if it is only rounding error."""
        return format_signed_seconds(seconds) if self.exceeds_rounding(seconds) else "0 s"

    def format_category(self, category: TimeCategory) -> tuple[str, str, str]:
        """Texts of a category's time in both results, and of the difference."""
        first, second = self.mean_seconds[:, category.index].tolist()
        return self._format_pair(first, second)

    def _format_pair(self, first: Seconds, second: Seconds) -> tuple[str, str, str]:
        """Texts of a time in both results, "0 s" if it is only rounding error, and of the difference."""
        one, other = (format_seconds(time) if self.exceeds_rounding(time) else "0 s" for time in (first, second))
        return one, other, self.format_delta(second - first)

    @property
    def losses(self) -> list[dict[str, Any]]:
        """Seconds of the ideal and of each loss in both results; those that are none in both are left out."""
        both = [result_json["losses_s"] for result_json in self.results_json]
        names = [name for name in both[0] if any(self.exceeds_rounding(seconds[name]) for seconds in both)]
        return compare_seconds(names, np.array([[seconds[name] for name in names] for seconds in both]))

    @property
    def loss_rows(self) -> list[tuple[str, str, str, str]]:
        """Texts of `losses`: name, both results, difference; the losses that change most first, the ideal last."""
        ordered = sorted(self.losses, key=lambda loss: (loss["category"] == IDEAL_KEY, -abs(loss["delta"])))
        return [(loss["category"], *self._format_pair(loss["first"], loss["second"])) for loss in ordered]

    def exceeds_rounding(self, seconds: Seconds) -> bool:
        """Whether a time is above rounding error."""
        return bool(abs(seconds) > ROUNDING_TOLERANCE * self.step_times.max())

    def to_json(self) -> dict[str, Any]:
        """The difference as plain data; of each number first, second and second minus first."""
        first, second = self.results_json
        return {
            "first": {"title": self.titles[0], **{key: first[key] for key in ("name", *_COMPARED_NUMBERS)}},
            "second": {"title": self.titles[1], **{key: second[key] for key in ("name", *_COMPARED_NUMBERS)}},
            "inputs": [
                {"key": changed_key.key, "first": changed_key.first, "second": changed_key.second}
                for changed_key in self.inputs
            ],
            "delta": {key: second[key] - first[key] for key in _COMPARED_NUMBERS if key != "fits"},
            "categories_s": self._by_category(self.mean_seconds),
            "losses_s": self.losses,
            "stages": [
                {"pipeline_rank": row_index, "categories_s": self._by_category(self.row_seconds[:, row_index])}
                for row_index in range(self.row_seconds.shape[1])
            ]
            or None,
            "notes": list(self.notes),
        }

    def _by_category(self, seconds: FloatArray) -> list[dict[str, Any]]:
        return compare_seconds(
            [category.value for category in self.nonzero_categories],
            seconds[:, [category.index for category in self.nonzero_categories]],
        )


def compare_results(
    first: SimulationResult, second: SimulationResult, titles: tuple[str, str], notes: tuple[str, ...] = ()
) -> ResultDifference:
    """Compare two results."""
    results_json = first.to_json(), second.to_json()
    tokens = [
        simulation_result.scenario.training.global_batch * simulation_result.scenario.training.sequence
        for simulation_result in (first, second)
    ]
    token_ratio = tokens[1] / tokens[0]
    token_notes = (
        [] if token_ratio == 1.0 else [f"a step of B has {token_ratio:.4g} times the tokens; compare tokens/s per GPU"]
    )
    file_notes = [
        f"{name}: same name in both, but the files differ"
        for name in changed_referenced_files(first.scenario, second.scenario)
    ]
    row_count = len(first.ledgers) if first.scenario.placement == second.scenario.placement else 0
    return ResultDifference(
        titles=titles,
        inputs=changed_keys(first.scenario, second.scenario),
        notes=(*notes, *token_notes, *file_notes, *_warning_notes(first, second)),
        step_times=np.array([first.step_time, second.step_time]),
        mean_seconds=np.array([_category_seconds(result_json["breakdown_s"]) for result_json in results_json]),
        row_seconds=np.array(
            [
                [_category_seconds(row["breakdown_s"]) for row in result_json["stages"][:row_count]]
                for result_json in results_json
            ]
        ).reshape(2, row_count, len(TIME_CATEGORIES)),
        row_labels=tuple(stage_name(first.scenario, row) for row in range(row_count)),
        results_json=results_json,
    )


def _warning_notes(first: SimulationResult, second: SimulationResult) -> list[str]:
    """Likely mistakes in the scenarios, each with the result that it is of."""
    by_warning: dict[str, list[str]] = {}
    for name, result in zip("AB", (first, second), strict=True):
        for warning in result.scenario.warnings:
            by_warning.setdefault(warning, []).append(name)
    return [f"{' and '.join(names)}: {warning}" for warning, names in by_warning.items()]


def headline(difference: ResultDifference) -> str:
    """The step time difference in one sentence."""
    step = format_step_time(float(difference.step_times[1]))
    if not difference.exceeds_rounding(difference.step_time_delta):
        return f"both steps take {step}"
    direction = "longer" if difference.step_time_delta > 0.0 else "shorter"
    relative_change = difference.step_time_delta / float(difference.step_times[0])
    return (
        f"B's step takes {step}, {format_step_time(abs(difference.step_time_delta))} ({relative_change:+.1%}) "
        f"{direction} than A's"
    )


def number_rows(difference: ResultDifference) -> list[tuple[str, str, str, str]]:
    """Rows of key numbers: name, first, second, change."""
    first, second = difference.results_json
    pairs = [(first[key], second[key], *formats) for key, formats in _COMPARED_NUMBERS.items()]
    return [(name, show(a), show(b), "" if a == b else change(a, b)) for a, b, name, show, change in pairs]


def format_input(value: object) -> str:
    """An input value as text, as a scenario file has it; long items of a list (such as schedule rows) are truncated.

    >>> format_input(None), format_input(True), format_input(16384), format_input([1, "a"])
    ('not given', 'true', '16,384', '[1, a]')
    """
    match value:
        case None:
            return "not given"
        case bool():
            return "true" if value else "false"
        case int():
            return f"{value:,}"
        case list():
            return f"[{', '.join(map(_truncate, map(format_input, value)))}]"
        case Mapping():
            return f"{{{', '.join(f'{key}: {format_input(inner)}' for key, inner in value.items())}}}"
        case _:
            return str(value)


def _truncate(text: str) -> str:
    return text if len(text) <= MAX_TEXT_LENGTH else f"{text[:MAX_TEXT_LENGTH]}..."


def _category_seconds(by_category: Mapping[str, Seconds]) -> list[Seconds]:
    return [by_category[category.value] for category in TIME_CATEGORIES]


def _format_relative_change(first: float, second: float) -> str:
    return f"{second / first - 1.0:+.1%}"


def _format_time_change(first: Seconds, second: Seconds) -> str:
    return f"{format_signed_seconds(second - first)} ({_format_relative_change(first, second)})"


def _format_point_change(first: float, second: float) -> str:
    return f"{100 * (second - first):+.1f} points"


def _format_bytes_change(first: Bytes, second: Bytes) -> str:
    return f"{'-' if second < first else '+'}{format_bytes(abs(second - first))}"


_format_percent = "{:.1%}".format
_COMPARED_NUMBERS: Final[Mapping[str, tuple[str, Callable[[Any], str], Callable[[Any, Any], str]]]] = {
    "step_time_s": ("step time", format_step_time, _format_time_change),
    "tokens_per_s": ("tokens/s", "{:,.0f}".format, _format_relative_change),
    "tokens_per_s_per_gpu": ("tokens/s per GPU", format_number, _format_relative_change),
    "mfu": ("MFU, full matrix", _format_percent, _format_point_change),
    "mfu_causal": ("MFU, causal", _format_percent, _format_point_change),
    "hfu": ("HFU", _format_percent, _format_point_change),
    "bubble_fraction": ("bubble", _format_percent, _format_point_change),
    "exposed_communication_fraction": ("exposed communication", _format_percent, _format_point_change),
    "peak_memory_bytes": ("peak memory", format_bytes, _format_bytes_change),
    "memory_capacity_bytes": ("memory of the GPU", format_bytes, _format_bytes_change),
    "ranks": ("GPUs", "{:,}".format, _format_relative_change),
    "fits": ("fits", lambda fits: "✓ fits" if fits else "✕ does not fit", lambda _first, _second: "changes"),
}
"""Compared numbers by JSON key: label, format of the value, and format of the change."""
