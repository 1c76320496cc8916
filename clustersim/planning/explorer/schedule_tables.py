"""What do pipeline ranks hold, and how large is a schedule's bubble, for any number of microbatches?

The package's order is played. Once every rank is in its steady state, a microbatch for each pipeline rank more adds as
much as the last ones did; so two numbers of microbatches are played for all larger ones that leave the same remainder.
Orders of several chunks are regular only where pipeline ranks divide the microbatches; others are played in full.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import le
from typing import Any, Final

from clustersim.common.errors import InputError
from clustersim.model.presets import load_preset
from clustersim.model.training import Training
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.planning.explorer.settings import Space, chunks_of
from clustersim.program.action import Action, ActionKind, flatten_entries
from clustersim.results.explorer_tables import Table
from clustersim.scenario.validation_rules.consistency import MAX_PASSES, check_batch
from clustersim.schedules.schedule import Schedule
from clustersim.schedules.validation import dry_run

_DRAWN: Final = tuple(2**power for power in range(11))
"""Microbatches at which the page draws the bubble."""
_STEADY: Final = 2  # times as many microbatches as pipeline ranks
_FORWARD, _BACKWARD = 1.0, 2.0  # as long as these take in a bubble of equal stages
Moment = list[int]
"""Which of a rank's stages runs backward, then the microbatches that each of them holds."""


@dataclass(frozen=True, slots=True)
class Played:
    """finish: of the step, in forwards; held: for each pipeline rank its moments."""

    finish: float
    held: list[list[Moment]]

    def bubble(self, passes: int) -> float:
        """The share of the step in which a rank waits for others, which runs so many forwards and backwards."""
        return 1 - passes * (_FORWARD + _BACKWARD) / self.finish

    def further(self, before: "Played", times: int) -> "Played":
        """As much further, `times` over, as this is from `before`."""
        held = [
            [[now + times * (now - then) for now, then in zip(*pair, strict=True)] for pair in zip(*ranks, strict=True)]
            for ranks in zip(self.held, before.held, strict=True)
        ]
        return Played(self.finish + times * (self.finish - before.finish), held)


Play = Callable[[Schedule, int, int], Played]


def schedules(space: Space) -> tuple[Table, Table]:
    """What schedules do with microbatches, and the sentences of those that cannot run so many."""
    axes = {key: space.values[key] for key in ("schedule", "chunks", "pp")}
    axes["microbatches"] = tuple(sorted({*space.values["microbatches"], *_DRAWN}))
    most = max(model.layer_count for model in space.models) + 2  # stages: the first and the last can do without layers
    known: dict[tuple[Schedule, int, int], Played] = {}

    def order_of(schedule: str, chunks: int, pp: int, microbatches: int) -> Schedule | None:
        """The schedule, where it is one with so many chunks and there are not too many stages and passes."""
        found = space.schedule({"schedule": schedule, "chunks": chunks})
        fits = pp in space.pipelines and pp * chunks <= most
        return found if fits and chunks_of(found) == chunks and pp * chunks * microbatches <= MAX_PASSES else None

    def played(*asked: Any) -> Played:
        if asked not in known:
            known[asked] = play(*asked)
        return known[asked]

    def ask(**settings: Any) -> dict[str, Any] | None:
        order, pp, microbatches = order_of(**settings), settings["pp"], settings["microbatches"]
        if order is None or (chunks_of(order) > 1 and pp == 1):
            return None
        try:
            found = answer(order, pp, microbatches, played)
        except InputError:
            return None
        return {"bubble": found.bubble(microbatches * chunks_of(order)), "held": found.held}

    def refused(**settings: Any) -> list[str] | None:
        order, pp, microbatches = order_of(**settings), settings["pp"], settings["microbatches"]
        if order is None or (pp > 1 and steady(order, pp, microbatches)):
            return None
        return [*check_batch(space.at(**settings, batch=microbatches))] or None

    return Table.of(ask, **axes), Table.of(refused, **axes)


def answer(schedule: Schedule, pp: int, microbatches: int, played: Play) -> Played:
    """What a step does, played or as what follows from fewer microbatches."""
    first = steady(schedule, pp, microbatches)
    if not first:
        return played(schedule, pp, microbatches)
    return played(schedule, pp, first + pp).further(played(schedule, pp, first), (microbatches - first) // pp - 1)


def steady(schedule: Schedule, pp: int, microbatches: int) -> int:
    """The fewest microbatches from which, and from as many and one for each pipeline rank, these follow; or 0."""
    first = _STEADY * pp + microbatches % pp
    return first if first + pp < microbatches and (chunks_of(schedule) == 1 or microbatches % pp == 0) else 0


def play(schedule: Schedule, pp: int, microbatches: int) -> Played:
    """Play a step in full."""
    order = schedule.order(pp, microbatches)
    plan = Plan(load_preset("llama-tiny"), Training(1, microbatches), Layout(pp=pp), schedule.placement)
    places = [{stage.index: place for place, stage in enumerate(plan.stages_on_rank(rank))} for rank in range(pp)]
    held = [_moments(flatten_entries(steps), place) for steps, place in zip(order, places, strict=True)]
    return Played(dry_run(order, forward=_FORWARD, backward=_BACKWARD).makespan, held)


def _moments(actions: Sequence[Action], places: Mapping[int, int]) -> list[Moment]:
    """When a rank's backwards begin, but for moments at which another backward of the stage meets as much or more."""
    held = [0] * len(places)
    found: set[tuple[int, ...]] = set()
    for action in actions:
        place = places[action.stage]
        if action.kind is ActionKind.FORWARD:
            held[place] += 1
        else:
            found.add((place, *held))
            held[place] -= 1
    return [[*moment] for place in sorted(places.values()) for moment in _fullest({m for m in found if m[0] == place})]


def _fullest(moments: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Those of which one is the fullest, however large stages are: none holds as much or more, nor do two around it."""
    kept: list[tuple[int, ...]] = []
    for moment in sorted(moments, key=sum, reverse=True):
        if not any(all(map(le, moment, other)) for other in kept):
            kept.append(moment)
    kept.sort()
    ends = {0, len(kept) - 1}
    return [now for place, now in enumerate(kept) if place in ends or not _between(*kept[place - 1 : place + 2])]


def _between(before: tuple[int, ...], now: tuple[int, ...], after: tuple[int, ...]) -> bool:
    return all(2 * b == a + c for a, b, c in zip(before, now, after, strict=True))
