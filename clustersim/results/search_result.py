"""Result of a layout search."""

from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Final

from clustersim.common.table import import_table_library
from clustersim.common.units import (
    JOULES_PER_KWH,
    Bytes,
    Joules,
    Seconds,
    format_energy,
    format_number,
    format_step_time,
)
from clustersim.results.memory_check import MemoryUse
from clustersim.results.outer_rounds import CONVERGENCE_NOTE

MAX_RIVALS: Final = 4
"""Number of layouts that are compared in the sensitivity analysis."""
SURELY_BETTER: Final = 0.05
"""Difference of the probability to fit by which a layout is preferred to a simpler one that is as fast."""
_BATCH_KEY: Final = "training.global_batch"
DERIVED_KEYS: Final = ("layout.sequence_parallel", "layout.layers_per_stage", _BATCH_KEY)
"""Keys whose values usually follow from other keys."""


@dataclass(frozen=True, slots=True)
class LayoutResult:
    """One simulated layout.

    overrides: as `--set` takes them; job: index of the sub-problem of the search; score: objective value, lower
    is better; interval: prediction interval of the step time; breakdown: seconds of a step by time category,
    averaged over ranks; mfu, mfu_causal: with attention as a full matrix, and as its causal mask leaves it;
    memory: capacity of the GPU in bytes; fit_probability: that it fits in memory, by the errors
    of published predictions; required_headroom: share of every device that it has to leave free; cost, energy: per
    trillion tokens, None where prices or powers are unknown; price_kind: contract or list, as `PriceKind`; tied: as
    good as the best within the variation of equal runs; run: metrics of the full training run if the objective needs
    them: days, goodput, interval (seconds between checkpoints), nodes and spare_nodes; extrapolated: its step time was
    extrapolated from fewer microbatches, accurately enough to exclude it from the best; variants: the same layout with
    each of the settings of local training that were asked for, while a search goes on.
    """

    overrides: tuple[str, ...]
    job: int
    gpus: int
    cluster: str
    score: float
    step_time: Seconds
    interval: tuple[Seconds, Seconds]
    tokens_per_gpu: float
    mfu: float
    mfu_causal: float
    peak_memory: Bytes
    memory: Bytes
    breakdown: Mapping[str, Seconds]
    fit_probability: float
    required_headroom: float
    cost: float | None = None
    currency: str = ""
    price_kind: str = ""
    energy: Joules | None = None
    tied: bool = False
    run: Mapping[str, float] | None = None
    extrapolated: bool = False
    variants: "tuple[LayoutResult, ...]" = ()

    @property
    def headroom(self) -> Bytes:
        """Free memory of the GPU with the highest memory use, in bytes."""
        return self.memory - self.peak_memory

    @property
    def leaves_headroom(self) -> bool:
        """Whether it leaves the required share of every device free."""
        return MemoryUse(self.peak_memory, self.memory).leaves_headroom(self.required_headroom)

    def to_json(self) -> dict[str, Any]:
        """The layout as plain data."""
        return {
            "overrides": list(self.overrides),
            "cluster": self.cluster,
            "gpus": self.gpus,
            "step_time_s": self.step_time,
            "step_time_interval_s": list(self.interval),
            "tokens_per_s_per_gpu": self.tokens_per_gpu,
            "mfu": self.mfu,
            "mfu_causal": self.mfu_causal,
            "peak_memory_bytes": self.peak_memory,
            "memory_headroom_bytes": self.headroom,
            "fit_probability": self.fit_probability,
            "required_headroom": self.required_headroom,
            "leaves_headroom": self.leaves_headroom,
            "cost_per_trillion_tokens": self.cost,
            "currency": self.currency or None,
            "price_kind": self.price_kind or None,
            "energy_per_trillion_tokens_kwh": None if self.energy is None else self.energy / JOULES_PER_KWH,
            "breakdown_s": dict(self.breakdown),
            **({} if self.run is None else {"run": dict(self.run)}),
            "tied_with_best": self.tied,
            "extrapolated": self.extrapolated,
        }


@dataclass(frozen=True, slots=True)
class PrunedLayouts:
    """Layouts that were excluded for one reason. example: a sentence about one of them."""

    count: int
    example: str = ""


@dataclass(frozen=True, slots=True)
class SetAsideJob:
    """A size or cluster that was asked for and cannot be searched. name: which; reason: why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class BoundedLayout:
    """A layout that was not simulated: its score is at least `bound`, worse than the best ones' scores."""

    overrides: tuple[str, ...]
    job: int
    bound: float


@dataclass(frozen=True, slots=True)
class SensitivityCase:
    """A changed assumption of the scenario. scores: of the rivals with it, None where it is not applicable."""

    description: str
    scores: tuple[float | None, ...]

    @property
    def best_index(self) -> int | None:
        """Index of the rival with the best score."""
        candidates = [(score, index) for index, score in enumerate(self.scores) if score is not None]
        return min(candidates)[1] if candidates else None


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    candidates: number of value combinations; pruned: of those, by reason; simulated: best first; bounded: valid
    layouts that fit and whose bound is above the scores of the best; top: number of best layouts requested;
    preferred: index of the simplest of those tied with the best; first: the initial guess; complete: whether
    all layouts were examined; changes: scores of the rivals under changed assumptions; repeat: relative
    variation between two runs of the same configuration; given: overrides of the file that are applied to all
    layouts; set_aside: jobs that were asked for and cannot be searched; warnings: settings of the recommended layout's
    scenario that are legal and still likely a mistake; variant_count: settings of local training that each layout was
    evaluated with, 0: layouts train in step.

    Layouts that do not leave the required headroom are among the simulated ones only where no layout of their job
    does, and come after all that do.
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
    set_aside: tuple[SetAsideJob, ...] = ()
    warnings: tuple[str, ...] = ()
    variant_count: int = 0

    @property
    def convergence_note(self) -> str:
        """What a ranking of local training does not know; empty where layouts train in step."""
        return CONVERGENCE_NOTE if self.variant_count else ""

    @property
    def shows_inverse_score(self) -> bool:
        """Whether scores (lower is better) are displayed inverted, as tokens/s per GPU."""
        return self.objective == "tokens-per-gpu"

    def format_score(self, score: float) -> str:
        """A score as text in the objective's unit."""
        if self.shows_inverse_score:
            return f"{1.0 / score:,.0f} tokens/s/GPU"
        match self.objective:
            case "cost" | "run-cost":
                return f"{format_number(score)} {self.simulated[0].currency} ({self.simulated[0].price_kind} price)"
            case "energy":
                return format_energy(score)
            case "days":
                return f"{score:.1f} days"
        return format_step_time(score)

    @cached_property
    def varying_derived_keys(self) -> frozenset[str]:
        """Keys of `DERIVED_KEYS` in which otherwise equal layouts among the best differ.

        Includes the batch wherever layouts of one sub-problem have several: it does not follow from other keys.
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
        """The recommended layout, and the best alternatives of the same sub-problem."""
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
        """Changes under which another rival beats the recommended layout by more than the repeatability."""
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
        """The best layouts in order, followed by the recommended one if it is not among the first `top`."""
        return self.simulated[: self.top] + ((self.recommended,) if self.preferred >= self.top else ())

    @property
    def recommended(self) -> LayoutResult:
        """The recommended layout: of those tied with the best that fit most surely, the simplest."""
        return self.simulated[self.preferred]

    @property
    def best_by_job(self) -> tuple[LayoutResult, ...]:
        """The best layout of every sub-problem that has one, in order of sub-problems."""
        best: dict[int, LayoutResult] = {}
        for layout in self.simulated:
            best.setdefault(layout.job, layout)
        return tuple(best[job] for job in sorted(best))

    @property
    def pareto_front(self) -> tuple[LayoutResult, ...]:
        """Simulated layouts not dominated in step time, GPU count and memory headroom; fastest first."""
        front: list[LayoutResult] = []
        for layout_result in sorted(
            self.simulated, key=lambda layout: (layout.step_time, layout.gpus, -layout.headroom)
        ):
            if not any(
                other.gpus <= layout_result.gpus and other.headroom >= layout_result.headroom for other in front
            ):
                front.append(layout_result)
        return tuple(front)

    def category_differences(self, other: LayoutResult) -> dict[str, Seconds]:
        """Seconds by time category that another layout takes longer than the recommended one.

        Largest magnitude first.
        """
        recommended = self.recommended.breakdown
        differences = {
            name: other.breakdown.get(name, 0.0) - recommended.get(name, 0.0)
            for name in {**recommended, **other.breakdown}
        }
        return dict(
            sorted(differences.items(), key=lambda category_delta: (-abs(category_delta[1]), category_delta[0]))
        )

    def to_arrow(self) -> Any:
        """A pyarrow table with a row for every simulated layout, best first; raises InputError without pyarrow.

        Columns are the numbers of `to_json` and, as text, the keys in which layouts differ; missing values are null.
        """
        pyarrow = import_table_library("pyarrow")
        table_rows = [_table_row(layout_result) for layout_result in self.simulated]
        names = dict.fromkeys(name for table_row in table_rows for name in table_row)
        return pyarrow.table({name: [table_row.get(name) for table_row in table_rows] for name in names})

    @property
    def runner_up(self) -> LayoutResult | None:
        """The best layout besides the recommended one."""
        return next(
            (layout_result for index, layout_result in enumerate(self.simulated) if index != self.preferred), None
        )

    def to_json(self) -> dict[str, Any]:
        """The result as plain data."""
        alternatives = {"runner_up": self.runner_up, "first_guess": self.first_guess}
        rivals = {name: other for name, other in alternatives.items() if other is not None and self.simulated}
        return {
            "objective": self.objective,
            "base_overrides": list(self.base_overrides),
            "complete": self.complete,
            "candidates": self.candidates,
            "pruned": {reason: pruned_layouts.count for reason, pruned_layouts in self.pruned.items()},
            "pruned_examples": {reason: layouts.example for reason, layouts in self.pruned.items()},
            "set_aside": [asdict(job) for job in self.set_aside],
            "warnings": list(self.warnings),
            **({"variants": self.variant_count, "convergence": self.convergence_note} if self.variant_count else {}),
            "bounded": len(self.bounded),
            "simulated": len(self.simulated),
            "wall_s": self.wall_seconds,
            "layouts_per_s": self.candidates / self.wall_seconds if self.wall_seconds > 0 else None,
            "best": [layout_result.to_json() for layout_result in self.best],
            "preferred": min(self.preferred, self.top),
            "first_guess": None if self.first_guess is None else self.first_guess.to_json(),
            "best_of_jobs": [layout.to_json() for layout in self.best_by_job],
            "pareto": [layout.to_json() for layout in self.pareto_front],
            "rivals": [list(rival.overrides) for rival in self.rivals],
            "sensitivity": [
                {"change": sensitivity_case.description, "scores": list(sensitivity_case.scores)}
                for sensitivity_case in self.sensitivity
            ],
            "category_differences_s": {name: self.category_differences(other) for name, other in rivals.items()},
        }


def override_values(layout: LayoutResult | BoundedLayout) -> dict[str, str]:
    """Values by key in which a layout differs from the scenario file."""
    return dict(override.split("=", 1) for override in layout.overrides)


def _table_row(layout: LayoutResult) -> dict[str, Any]:
    """A layout as a table row."""
    values = layout.to_json()
    (low, high), categories = layout.interval, values.pop("breakdown_s")
    del values["step_time_interval_s"]
    values |= {"overrides": " ".join(layout.overrides), "interval_low_s": low, "interval_high_s": high}
    values |= {f"run_{name}": value for name, value in values.pop("run", {}).items()}
    return {**values, **override_values(layout), **{f"{name} [s]": seconds for name, seconds in categories.items()}}


def layout_to_dict(layout: LayoutResult) -> dict[str, Any]:
    """A layout as a JSON-serializable dict; inverse of `layout_from_dict`."""
    return asdict(layout)


def layout_from_dict(content: Mapping[str, Any]) -> LayoutResult:
    """The layout of such a dict."""
    low, high = content["interval"]
    variants = tuple(map(layout_from_dict, content.get("variants", ())))
    changed = {"overrides": tuple(content["overrides"]), "interval": (low, high), "variants": variants}
    return LayoutResult(**{**content, **changed})
