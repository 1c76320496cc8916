"""What is different between two answers: the input, the numbers, and which parts make a step longer?

The parts are those of the breakdown, the mean over all ranks. They sum to the step time in each answer, so their
differences sum to the difference of the step times. Parts are compared by name, whatever model and cluster they are of.
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
from clustersim.report.step_breakdown import ROUNDING
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.time_categories import PARTS, Part, named_parts
from clustersim.scenario.changes.diff import ChangedKey, changed_keys, changed_referenced_files

MOST_WORDS: Final = 60  # characters of a text in a list


@dataclass(frozen=True, slots=True)
class Difference:
    """Two answers.

    titles: what each is of; inputs: what their files say otherwise; notes: what else must be known; step_times:
    [2] seconds; parts: [2, parts] seconds of PARTS, the mean over ranks; stages: [2, rows, parts] seconds of each
    pipeline rank, no rows where the pipelines differ; row_labels: [rows]; answers: the numbers as `--json` has them.
    """

    titles: tuple[str, str]
    inputs: tuple[ChangedKey, ...]
    notes: tuple[str, ...]
    step_times: FloatArray
    parts: FloatArray
    stages: FloatArray
    row_labels: tuple[str, ...]
    answers: tuple[Mapping[str, Any], Mapping[str, Any]] = field(repr=False)

    @property
    def longer(self) -> Seconds:
        """Seconds by which the second step is longer."""
        return float(self.step_times[1] - self.step_times[0])

    @property
    def stage_deltas(self) -> FloatArray:
        """[rows, parts] seconds by which each part of each pipeline rank is longer."""
        return np.asarray(self.stages[1] - self.stages[0])

    @property
    def deltas(self) -> FloatArray:
        """[parts] seconds by which each part is longer."""
        return np.asarray(self.parts[1] - self.parts[0])

    @property
    def present(self) -> list[Part]:
        """The parts that are more than rounding in one of both."""
        return [part for part in PARTS if self.visible(self.parts[:, part.place].max())]

    @property
    def different(self) -> list[Part]:
        """The parts that differ by more than rounding."""
        return [part for part in self.present if self.visible(self.deltas[part.place])]

    def words(self, seconds: Seconds) -> str:
        """A difference of times; none where it is only rounding."""
        return format_signed_seconds(seconds) if self.visible(seconds) else "0 s"

    def amounts(self, part: Part) -> tuple[str, str, str]:
        """A part in both, and by how much it is longer."""
        both = self.parts[:, part.place].tolist()
        first, second = (format_seconds(item) if self.visible(item) else "0 s" for item in both)
        return first, second, self.words(both[1] - both[0])

    def visible(self, seconds: Seconds) -> bool:
        """Whether it is more than rounding."""
        return bool(abs(seconds) > ROUNDING * self.step_times.max())

    def to_json(self) -> dict[str, Any]:
        """The difference as plain data; of each number first, second and second minus first."""
        first, second = self.answers
        return {
            "first": {"title": self.titles[0], **{key: first[key] for key in ("name", *_NUMBERS)}},
            "second": {"title": self.titles[1], **{key: second[key] for key in ("name", *_NUMBERS)}},
            "inputs": [
                {"key": changed_key.key, "first": changed_key.first, "second": changed_key.second}
                for changed_key in self.inputs
            ],
            "delta": {key: second[key] - first[key] for key in _NUMBERS if key != "fits"},
            "parts_s": self._named(self.parts),
            "stages": [
                {"pipeline_rank": row, "parts_s": self._named(self.stages[:, row])}
                for row in range(self.stages.shape[1])
            ]
            or None,
            "notes": list(self.notes),
        }

    def _named(self, parts: FloatArray) -> list[dict[str, Any]]:
        return named_parts([part.value for part in self.present], parts[:, [part.place for part in self.present]])


def difference_of(
    first: SimulationResult, second: SimulationResult, titles: tuple[str, str], notes: tuple[str, ...] = ()
) -> Difference:
    """Compare two answers."""
    answers = first.to_json(), second.to_json()
    tokens = [
        simulation_result.scenario.training.global_batch * simulation_result.scenario.training.sequence
        for simulation_result in (first, second)
    ]
    times = tokens[1] / tokens[0]
    work = [] if times == 1.0 else [f"a step of B has {times:.4g} times the tokens; compare tokens/s per GPU"]
    others = [
        f"{name}: both name it by the same words, but the files differ"
        for name in changed_referenced_files(first.scenario, second.scenario)
    ]
    rows = len(first.ledgers) if first.scenario.placement == second.scenario.placement else 0
    return Difference(
        titles=titles,
        inputs=changed_keys(first.scenario, second.scenario),
        notes=(*notes, *work, *others),
        step_times=np.array([first.step_time, second.step_time]),
        parts=np.array([_seconds(answer["breakdown_s"]) for answer in answers]),
        stages=np.array([[_seconds(row["breakdown_s"]) for row in item["stages"][:rows]] for item in answers]).reshape(
            2, rows, len(PARTS)
        ),
        row_labels=tuple(stage_name(first.scenario, row) for row in range(rows)),
        answers=answers,
    )


def headline(difference: Difference) -> str:
    """The answer in a sentence."""
    step = format_step_time(float(difference.step_times[1]))
    if not difference.visible(difference.longer):
        return f"both steps take {step}"
    longer = "longer" if difference.longer > 0.0 else "shorter"
    part = difference.longer / float(difference.step_times[0])
    return f"B's step takes {step}, {format_step_time(abs(difference.longer))} ({part:+.1%}) {longer} than A's"


def lines(difference: Difference) -> list[tuple[str, str, str, str]]:
    """The numbers that people compare: name, of both, and the change."""
    first, second = difference.answers
    pairs = [(first[key], second[key], *words) for key, words in _NUMBERS.items()]
    return [(name, show(a), show(b), "" if a == b else change(a, b)) for a, b, name, show, change in pairs]


def words_of(value: object) -> str:
    """A value of the input as a file has it; long texts of a list (rows of an order) are cut.

    >>> words_of(None), words_of(True), words_of(16384), words_of([1, "a"])
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
            return f"[{', '.join(map(_cut, map(words_of, value)))}]"
        case Mapping():
            return f"{{{', '.join(f'{key}: {words_of(item)}' for key, item in value.items())}}}"
        case _:
            return str(value)


def _cut(words: str) -> str:
    return words if len(words) <= MOST_WORDS else f"{words[:MOST_WORDS]}..."


def _seconds(parts: Mapping[str, Seconds]) -> list[Seconds]:
    return [parts[part.value] for part in PARTS]


def _part(first: float, second: float) -> str:
    return f"{second / first - 1.0:+.1%}"


def _seconds_and_part(first: Seconds, second: Seconds) -> str:
    return f"{format_signed_seconds(second - first)} ({_part(first, second)})"


def _points(first: float, second: float) -> str:
    return f"{100 * (second - first):+.1f} points"


def _bytes(first: Bytes, second: Bytes) -> str:
    return f"{'-' if second < first else '+'}{format_bytes(abs(second - first))}"


_percent = "{:.1%}".format
_NUMBERS: Final[Mapping[str, tuple[str, Callable[[Any], str], Callable[[Any, Any], str]]]] = {
    "step_time_s": ("step time", format_step_time, _seconds_and_part),
    "tokens_per_s": ("tokens/s", "{:,.0f}".format, _part),
    "tokens_per_s_per_gpu": ("tokens/s per GPU", format_number, _part),
    "mfu": ("MFU", _percent, _points),
    "mfu_causal": ("MFU, causal", _percent, _points),
    "hfu": ("HFU", _percent, _points),
    "bubble_fraction": ("bubble", _percent, _points),
    "exposed_communication_fraction": ("exposed communication", _percent, _points),
    "peak_memory_bytes": ("peak memory", format_bytes, _bytes),
    "memory_capacity_bytes": ("memory of the GPU", format_bytes, _bytes),
    "ranks": ("GPUs", "{:,}".format, _part),
    "fits": ("fits", lambda fits: "✓ fits" if fits else "✕ does not fit", lambda _first, _second: "changes"),
}
"""What is compared of answers: its name, its words, and those of a change."""
