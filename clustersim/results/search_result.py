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

RIVALS: Final = 4
"""Layouts that are compared where something is other than supposed."""
_BATCH: Final = "training.global_batch"
FOLLOWING: Final = ("layout.sequence_parallel", "layout.layers_per_stage", _BATCH)
"""Keys that follow from others, as a rule."""


@dataclass(frozen=True, slots=True)
class Layout:
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
class Pruned:
    """Layouts that were set aside for one reason. example: a sentence about one of them."""

    count: int
    example: str = ""


@dataclass(frozen=True, slots=True)
class Bounded:
    """A layout that was not simulated, since its score is above `bound`, and that above the best ones'."""

    overrides: tuple[str, ...]
    job: int
    bound: float


@dataclass(frozen=True, slots=True)
class Change:
    """Something that is other than the scenario says. scores: of the rivals with it, None where it cannot be."""

    words: str
    scores: tuple[float | None, ...]

    @property
    def best(self) -> int | None:
        """The place of the best of the rivals."""
        there = [(score, place) for place, score in enumerate(self.scores) if score is not None]
        return min(there)[1] if there else None


@dataclass(frozen=True)
class Found:
    """A search. candidates: combinations of values; pruned: of those, by reason; simulated: best first.

    bounded: legal ones that fit and whose bound is above the scores of the best; top: how many of the best are wanted;
    preferred: the plainest of those that are tied with the best, by its place; first: the first guess; complete:
    whether all layouts were looked at; changes: how the rivals compare where something is other than supposed; repeat:
    the part by which two runs of the same differ; given: overrides of the file that all of its layouts are beside.
    """

    objective: str
    candidates: int
    pruned: Mapping[str, Pruned]
    bounded: tuple[Bounded, ...]
    simulated: tuple[Layout, ...]
    top: int
    preferred: int
    first: Layout | None
    wall: Seconds
    complete: bool = True
    changes: tuple[Change, ...] = ()
    repeat: float = 0.0
    given: tuple[str, ...] = ()

    @property
    def more_is_better(self) -> bool:
        """Whether people read scores, of which less is better, the other way round: as tokens."""
        return self.objective == "tokens-per-gpu"

    def score_words(self, score: float) -> str:
        """A score as people read it."""
        if self.more_is_better:
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
    def telling(self) -> frozenset[str]:
        """Keys of `FOLLOWING` that follow from nothing here: some of the best layouts differ in nothing else.

        The batch, too, wherever layouts of one job have several: it is not what anything follows from.
        """
        alike: dict[Hashable, list[dict[str, str]]] = {}
        batches: dict[int, set[str]] = {}
        for layout in self.best:
            keys = keys_of(layout)
            others = frozenset(pair for pair in keys.items() if pair[0] not in FOLLOWING)
            alike.setdefault((layout.job, others), []).append(keys)
        every: tuple[Layout | Bounded, ...] = (*self.simulated, *self.bounded)
        for one in every:
            batches.setdefault(one.job, set()).add(keys_of(one).get(_BATCH, ""))
        found = {key for same in alike.values() for key in FOLLOWING if len({item.get(key) for item in same}) > 1}
        return frozenset(found | ({_BATCH} if any(len(batch) > 1 for batch in batches.values()) else set()))

    @property
    def rivals(self) -> tuple[Layout, ...]:
        """The one to take, and the best of the others of its job."""
        if not self.simulated:
            return ()
        others = [layout for layout in self.best if layout.job == self.choice.job and layout is not self.choice]
        return (self.choice, *others[: RIVALS - 1])

    @property
    def overtaken(self) -> tuple[str, ...]:
        """With which changes another rival is better than the one to take, by more than runs of the same differ."""
        told = [(change.words, change.scores[0], change.best) for change in self.changes if change.scores]
        seen = [(words, own, best) for words, own, best in told if own is not None and best is not None]
        scores = {change.words: change.scores for change in self.changes}
        return tuple(words for words, own, best in seen if own > (scores[words][best] or own) * (1.0 + self.repeat))

    @property
    def best(self) -> tuple[Layout, ...]:
        """The best of all, in order, and behind them the one to take where so many as good as it come before it."""
        return self.simulated[: self.top] + ((self.choice,) if self.preferred >= self.top else ())

    @property
    def choice(self) -> Layout:
        """The one to take: the plainest of those that are tied with the best."""
        return self.simulated[self.preferred]

    @property
    def of_jobs(self) -> tuple[Layout, ...]:
        """The best of every job that has one, in the order of jobs."""
        found: dict[int, Layout] = {}
        for layout in self.simulated:
            found.setdefault(layout.job, layout)
        return tuple(found[job] for job in sorted(found))

    @property
    def pareto(self) -> tuple[Layout, ...]:
        """Simulated layouts of which no other is as fast, on as few GPUs, with as much memory left; fastest first."""
        kept: list[Layout] = []
        for layout in sorted(self.simulated, key=lambda each: (each.step_time, each.gpus, -each.headroom)):
            if not any(other.gpus <= layout.gpus and other.headroom >= layout.headroom for other in kept):
                kept.append(layout)
        return tuple(kept)

    def why(self, other: Layout) -> dict[str, Seconds]:
        """Which parts of a step another layout has longer than the one to take (shorter: below zero), most first."""
        mine = self.choice.breakdown
        parts = {name: other.breakdown.get(name, 0.0) - mine.get(name, 0.0) for name in {**mine, **other.breakdown}}
        return dict(sorted(parts.items(), key=lambda part: (-abs(part[1]), part[0])))

    def to_arrow(self) -> Any:
        """A pyarrow table: a row for every layout that was simulated, best first; raise InputError without pyarrow.

        Columns are numbers of `to_json` and, as texts, the keys that layouts differ in; what is nothing is null.
        """
        try:
            arrow = import_module("pyarrow")
        except ImportError:
            raise InputError("a table needs pyarrow; pip install 'clustersim[table]'") from None
        rows = [_row(layout) for layout in self.simulated]
        names = dict.fromkeys(name for row in rows for name in row)
        return arrow.table({name: [row.get(name) for row in rows] for name in names})

    @property
    def runner_up(self) -> Layout | None:
        """The best beside the one to take."""
        return next((layout for place, layout in enumerate(self.simulated) if place != self.preferred), None)

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        others = {"runner_up": self.runner_up, "first_guess": self.first}
        rivals = {name: other for name, other in others.items() if other is not None and self.simulated}
        return {
            "objective": self.objective,
            "given": list(self.given),
            "complete": self.complete,
            "candidates": self.candidates,
            "pruned": {reason: pruned.count for reason, pruned in self.pruned.items()},
            "pruned_examples": {reason: item.example for reason, item in self.pruned.items()},
            "bounded": len(self.bounded),
            "simulated": len(self.simulated),
            "wall_s": self.wall,
            "layouts_per_s": self.candidates / self.wall if self.wall > 0 else None,
            "best": [layout.to_json() for layout in self.best],
            "preferred": min(self.preferred, self.top),
            "first_guess": None if self.first is None else self.first.to_json(),
            "best_of_jobs": [of_job.to_json() for of_job in self.of_jobs],
            "pareto": [element.to_json() for element in self.pareto],
            "rivals": [list(rival.overrides) for rival in self.rivals],
            "sensitivity": [{"change": change.words, "scores": list(change.scores)} for change in self.changes],
            "why": {name: self.why(other) for name, other in rivals.items()},
        }


def keys_of(layout: Layout | Bounded) -> dict[str, str]:
    """How a layout differs from the file's own: values by key."""
    return dict(override.split("=", 1) for override in layout.overrides)


def _row(layout: Layout) -> dict[str, Any]:
    """A layout as a row of a table."""
    numbers = layout.to_json()
    (low, high), parts = layout.band, numbers.pop("breakdown_s")
    del numbers["step_time_band_s"]
    numbers |= {"overrides": " ".join(layout.overrides), "expected_low_s": low, "expected_high_s": high}
    numbers |= {f"run_{name}": value for name, value in numbers.pop("run", {}).items()}
    return {**numbers, **keys_of(layout), **{f"{name} [s]": seconds for name, seconds in parts.items()}}


def plain(layout: Layout) -> dict[str, Any]:
    """A layout as a line of a file; `layout_of` reads it."""
    return asdict(layout)


def layout_of(content: Mapping[str, Any]) -> Layout:
    """The layout of such a line."""
    low, high = content["band"]
    return Layout(**{**content, "overrides": tuple(content["overrides"]), "band": (low, high)})
