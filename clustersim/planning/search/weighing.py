"""Is a layout legal, does it fit, and how good can it be at best?"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from clustersim.errors import InputError
from clustersim.fitting import states_fit
from clustersim.planning.search.bounds import lower_bound
from clustersim.planning.search.executors import Shared
from clustersim.planning.search.keys import PASSING, RECOMPUTE
from clustersim.planning.search.objective import Objective
from clustersim.planning.search.space import Candidate, Space
from clustersim.workload.training import FullRecompute, NoRecompute

MEMORY_OF_STATES: Final = "weights and states do not fit in memory"


@dataclass(frozen=True, slots=True)
class Weighed:
    """A candidate before it is simulated. bound: of its score, from below; None where it is set aside.

    said: why, a sentence `reason: what it is about`.
    """

    candidate: Candidate
    bound: float | None
    said: str = ""


def families(candidates: Iterable[Candidate]) -> Iterator[list[Candidate]]:
    """Neighbours that differ in nothing on which depends what stays in memory for the whole step."""
    for _, family in groupby(candidates, key=lambda each: _without(each, PASSING)):
        yield [*family]


def ladders(space: Space, weighed: Iterable[Weighed]) -> list[list[Weighed]]:
    """Layouts of which the first that fits is wanted: those that differ in how many whole layers they compute again.

    More of them is slower, and needed only where less does not fit; where somebody chose what is computed again, and
    for all that computes modules again, each is by itself. Each ladder, and all of them, best bounds first.
    """
    found: dict[object, list[Weighed]] = {}
    for each in sorted(weighed, key=lambda each: (each.bound or 0.0, each.candidate.plainness)):
        alone = RECOMPUTE in space.named or not _of_layers(space, each.candidate)
        found.setdefault(each.candidate if alone else _without(each.candidate, (RECOMPUTE,)), []).append(each)
    return [*found.values()]


def _of_layers(space: Space, candidate: Candidate) -> bool:
    """Whether it computes some, all or none of its layers again, each as a whole."""
    job = space.jobs[candidate.job]
    values = (each.partition("=")[2] for each in candidate.overrides if each.startswith(f"{RECOMPUTE}="))
    recompute = next((job.objects[RECOMPUTE, value] for value in values), job.setup.training.recompute)
    return isinstance(recompute, NoRecompute | FullRecompute)


def _without(candidate: Candidate, keys: Collection[str]) -> tuple[int, tuple[str, ...]]:
    rest = (each for each in candidate.overrides if each.partition("=")[0] not in keys)
    return candidate.job, tuple(rest)


def weigh(shared: Shared, objective: Objective, family: Sequence[Candidate]) -> list[Weighed]:
    """What can be said of a family without simulating it, but for whether activations fit beside states."""
    found: list[Weighed] = []
    fresh = True
    for place, candidate in enumerate(family):
        try:
            changed = shared().changed(candidate.overrides)
        except InputError as error:
            found.append(Weighed(candidate, None, _first(error)))
            continue
        if fresh and not states_fit(changed):
            return [*found, *(Weighed(each, None, MEMORY_OF_STATES) for each in family[place:])]
        fresh = False
        found.append(Weighed(candidate, objective.least(changed, lower_bound(changed))))
    return found


def _first(error: InputError) -> str:
    """The first of the sentences of a refusal, which begins with the key that it is about."""
    lines = str(error).splitlines()
    return (lines[1] if len(lines) > 1 else lines[0].partition(": ")[2]).strip(" -")
