"""What did a search of layouts find?"""

from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, Final

from clustersim.common.errors import InputError
from clustersim.common.units import (
    JOULES_PER_KWH,
    Bytes,
    Joules,
    Seconds,
    format_energy,
    format_number,
    format_step_time,
)

MAX_RIVALS: Final = 4
"""Layouts that are compared where something is other than supposed."""
_BATCH_KEY: Final = "training.global_batch"
DERIVED_KEYS: Final = ("layout.sequence_parallel", "layout.layers_per_stage", _BATCH_KEY)
"""Keys that follow from others, as a rule."""


@dataclass(frozen=True, slots=True)
class LayoutResult:
    """One layout that was simulated. overrides: as `--set` takes them; job: of the search, by its place.

    score: what it is measured by, less is better; band: between what and what the step is expected; breakdown: seconds
    of a step by part, the mean over ranks; memory: of the GPU; cost, energy: of a trillion tokens, None where prices or
    powers are not known; tied: as good as the best, as far as equal steps differ; run: of the whole run where it is
    looked for: days, goodput, interval (seconds between checkpoints), nodes and spare_nodes; extended: its step was not
    simulated whole, but follows from shorter ones, near enough to tell that it is not among the best.
    """

    overrides: tuple[str, ...]
    job: int
    gpus: int
    cluster: str
    score: float
    step_time: Seconds
    band: tuple[Seconds, Seconds]
    tokens_per_gpu: float
    mfu: float
    peak_memory: Bytes
    memory: Bytes
    breakdown: Mapping[str, Seconds]
    cost: float | None = None
    currency: str = ""
    energy: Joules | None = None
    tied: bool = False
    run: Mapping[str, float] | None = None
    extended: bool = False

    @property
    def headroom(self) -> Bytes:
        """What the fullest GPU has left."""
        return self.memory - self.peak_memory

    def to_json(self) -> dict[str, Any]:
        """The layout as plain data."""
        return {
            "overrides": list(self.overrides),
            "cluster": self.cluster,
            "gpus": self.gpus,
            "step_time_s": self.step_time,
            "step_time_band_s": list(self.band),
            "tokens_per_s_per_gpu": self.tokens_per_gpu,
            "mfu": self.mfu,
            "peak_memory_bytes": self.peak_memory,
            "memory_headroom_bytes": self.headroom,
            "cost_per_trillion_tokens": self.cost,
            "currency": self.currency or None,
            "energy_per_trillion_tokens_kwh": None if self.energy is None else self.energy / JOULES_PER_KWH,
            "breakdown_s": dict(self.breakdown),
            **({} if self.run is None else {"run": dict(self.run)}),
            "tied_with_best": self.tied,
            "extended": self.extended,
        }


@dataclass(frozen=True, slots=True)
class PrunedLayouts:
    """Layouts that were set aside for one reason. example: a sentence about one of them."""

    count: int
    example: str = ""


@dataclass(frozen=True, slots=True)
class BoundedLayout:
    """A layout that was not simulated, since its score is above `bound`, and that above the best ones'."""

    overrides: tuple[str, ...]
    job: int
    bound: float


@dataclass(frozen=True, slots=True)
class SensitivityCase:
    """Something that is other than the scenario says. scores: of the rivals with it, None where it cannot be."""

    description: str
    scores: tuple[float | None, ...]

    @property
    def best_index(self) -> int | None:
        """The place of the best of the rivals."""
        candidates = [(score, index) for index, score in enumerate(self.scores) if score is not None]
        return min(candidates)[1] if candidates else None


@dataclass(frozen=True)
class SearchResult:
    """A search. candidates: combinations of values; pruned: of those, by reason; simulated: best first.

    bounded: legal ones that fit and whose bound is above the scores of the best; top: how many of the best are wanted;
    preferred: the plainest of those that are tied with the best, by its place; first: the first guess; complete:
    whether all layouts were looked at; changes: how the rivals compare where something is other than supposed; repeat:
    the part by which two runs of the same differ; given: overrides of the file that all of its layouts are beside.
    """

    objective: str
    candidates: int
    pruned: Mapping[str, PrunedLayouts]
    bounded: tuple[BoundedLayout, ...]
    simulated: tuple[LayoutResult, ...]
    top: int
    preferred: int
    first_guess: LayoutResult | None
    wall_seconds: Seconds
    complete: bool = True
    sensitivity: tuple[SensitivityCase, ...] = ()
    repeatability: float = 0.0
    base_overrides: tuple[str, ...] = ()

    @property
    def shows_inverse_score(self) -> bool:
        """Whether people read scores, of which less is better, the other way round: as tokens."""
        return self.objective == "tokens-per-gpu"

    def format_score(self, score: float) -> str:
        """A score as people read it."""
        if self.shows_inverse_score:
            return f"{1.0 / score:,.0f} tokens/s/GPU"
        match self.objective:
            case "cost" | "run-cost":
                return f"{format_number(score)} {self.simulated[0].currency}"
            case "energy":
                return format_energy(score)
            case "days":
                return f"{score:.1f} days"
        return format_step_time(score)

    @cached_property
    def varying_derived_keys(self) -> frozenset[str]:
        """Keys of `DERIVED_KEYS` that follow from nothing here: some of the best layouts differ in nothing else.

        The batch, too, wherever layouts of one job have several: it is not what anything follows from.
        """
        keys_by_rest_key: dict[Hashable, list[dict[str, str]]] = {}
        batches: dict[int, set[str]] = {}
        for layout_result in self.best:
            values_by_key = override_values(layout_result)
            other_values = frozenset(pair for pair in values_by_key.items() if pair[0] not in DERIVED_KEYS)
            keys_by_rest_key.setdefault((layout_result.job, other_values), []).append(values_by_key)
        all_layouts: tuple[LayoutResult | BoundedLayout, ...] = (*self.simulated, *self.bounded)
        for layout in all_layouts:
            batches.setdefault(layout.job, set()).add(override_values(layout).get(_BATCH_KEY, ""))
        varying = {
            key
            for equal_layouts in keys_by_rest_key.values()
            for key in DERIVED_KEYS
            if len({equal_layout.get(key) for equal_layout in equal_layouts}) > 1
        }
        return frozenset(varying | ({_BATCH_KEY} if any(len(batch) > 1 for batch in batches.values()) else set()))

    @property
    def rivals(self) -> tuple[LayoutResult, ...]:
        """The one to take, and the best of the others of its job."""
        if not self.simulated:
            return ()
        alternatives = [
            layout_result
            for layout_result in self.best
            if layout_result.job == self.recommended.job and layout_result is not self.recommended
        ]
        return (self.recommended, *alternatives[: MAX_RIVALS - 1])

    @property
    def rank_changes(self) -> tuple[str, ...]:
        """With which changes another rival is better than the one to take, by more than runs of the same differ."""
        summaries = [
            (change.description, change.scores[0], change.best_index) for change in self.sensitivity if change.scores
        ]
        comparable = [
            (description, choice_score, best)
            for description, choice_score, best in summaries
            if choice_score is not None and best is not None
        ]
        scores = {change.description: change.scores for change in self.sensitivity}
        return tuple(
            description
            for description, choice_score, best in comparable
            if choice_score > (scores[description][best] or choice_score) * (1.0 + self.repeatability)
        )

    @property
    def best(self) -> tuple[LayoutResult, ...]:
        """The best of all, in order, and behind them the one to take where so many as good as it come before it."""
        return self.simulated[: self.top] + ((self.recommended,) if self.preferred >= self.top else ())

    @property
    def recommended(self) -> LayoutResult:
        """The one to take: the plainest of those that are tied with the best."""
        return self.simulated[self.preferred]

    @property
    def best_by_job(self) -> tuple[LayoutResult, ...]:
        """The best of every job that has one, in the order of jobs."""
        best: dict[int, LayoutResult] = {}
        for layout in self.simulated:
            best.setdefault(layout.job, layout)
        return tuple(best[job] for job in sorted(best))

    @property
    def pareto_front(self) -> tuple[LayoutResult, ...]:
        """Simulated layouts of which no other is as fast, on as few GPUs, with as much memory left; fastest first."""
        front: list[LayoutResult] = []
        for layout_result in sorted(self.simulated, key=lambda each: (each.step_time, each.gpus, -each.headroom)):
            if not any(
                other.gpus <= layout_result.gpus and other.headroom >= layout_result.headroom for other in front
            ):
                front.append(layout_result)
        return tuple(front)

    def category_differences(self, other: LayoutResult) -> dict[str, Seconds]:
        """Which parts of a step another layout has longer than the one to take (shorter: below zero), most first."""
        recommended = self.recommended.breakdown
        differences = {
            name: other.breakdown.get(name, 0.0) - recommended.get(name, 0.0)
            for name in {**recommended, **other.breakdown}
        }
        return dict(sorted(differences.items(), key=lambda item: (-abs(item[1]), item[0])))

    def to_arrow(self) -> Any:
        """A pyarrow table: a row for every layout that was simulated, best first; raise InputError without pyarrow.

        Columns are numbers of `to_json` and, as texts, the keys that layouts differ in; what is nothing is null.
        """
        try:
            pyarrow = import_module("pyarrow")
        except ImportError:
            raise InputError("a table needs pyarrow; pip install 'clustersim[table]'") from None
        table_rows = [_table_row(layout_result) for layout_result in self.simulated]
        names = dict.fromkeys(name for table_row in table_rows for name in table_row)
        return pyarrow.table({name: [table_row.get(name) for table_row in table_rows] for name in names})

    @property
    def runner_up(self) -> LayoutResult | None:
        """The best beside the one to take."""
        return next(
            (layout_result for index, layout_result in enumerate(self.simulated) if index != self.preferred), None
        )

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        alternatives = {"runner_up": self.runner_up, "first_guess": self.first_guess}
        rivals = {name: other for name, other in alternatives.items() if other is not None and self.simulated}
        return {
            "objective": self.objective,
            "given": list(self.base_overrides),
            "complete": self.complete,
            "candidates": self.candidates,
            "pruned": {reason: pruned_layouts.count for reason, pruned_layouts in self.pruned.items()},
            "pruned_examples": {reason: item.example for reason, item in self.pruned.items()},
            "bounded": len(self.bounded),
            "simulated": len(self.simulated),
            "wall_s": self.wall_seconds,
            "layouts_per_s": self.candidates / self.wall_seconds if self.wall_seconds > 0 else None,
            "best": [layout_result.to_json() for layout_result in self.best],
            "preferred": min(self.preferred, self.top),
            "first_guess": None if self.first_guess is None else self.first_guess.to_json(),
            "best_of_jobs": [element.to_json() for element in self.best_by_job],
            "pareto": [entry.to_json() for entry in self.pareto_front],
            "rivals": [list(rival.overrides) for rival in self.rivals],
            "sensitivity": [
                {"change": sensitivity_case.description, "scores": list(sensitivity_case.scores)}
                for sensitivity_case in self.sensitivity
            ],
            "why": {name: self.category_differences(other) for name, other in rivals.items()},
        }


def override_values(layout: LayoutResult | BoundedLayout) -> dict[str, str]:
    """How a layout differs from the file's own: values by key."""
    return dict(override.split("=", 1) for override in layout.overrides)


def _table_row(layout: LayoutResult) -> dict[str, Any]:
    """A layout as a row of a table."""
    numbers = layout.to_json()
    (low, high), categories = layout.band, numbers.pop("breakdown_s")
    del numbers["step_time_band_s"]
    numbers |= {"overrides": " ".join(layout.overrides), "expected_low_s": low, "expected_high_s": high}
    numbers |= {f"run_{name}": value for name, value in numbers.pop("run", {}).items()}
    return {**numbers, **override_values(layout), **{f"{name} [s]": seconds for name, seconds in categories.items()}}


def layout_to_dict(layout: LayoutResult) -> dict[str, Any]:
    """A layout as a line of a file; `layout_from_dict` reads it."""
    return asdict(layout)


def layout_from_dict(content: Mapping[str, Any]) -> LayoutResult:
    """The layout of such a line."""
    low, high = content["band"]
    return LayoutResult(**{**content, "overrides": tuple(content["overrides"]), "band": (low, high)})
