"""Is a layout legal, does it fit, and how good can it be at best?"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from clustersim.errors import InputError
from clustersim.fitting import fits, states_fit
from clustersim.planning.search.bounds import lower_bound
from clustersim.planning.search.executors import Shared
from clustersim.planning.search.keys import PASSING, RECOMPUTE
from clustersim.planning.search.objective import Objective
from clustersim.planning.search.space import Candidate
from clustersim.scenario import Scenario
from clustersim.workload.training import FullRecompute, NoRecompute

MEMORY: Final = "does not fit in memory"
MEMORY_OF_STATES: Final = "weights and states do not fit in memory"
NEEDLESS: Final = "less recomputation fits"


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


def _without(candidate: Candidate, keys: Collection[str]) -> tuple[int, tuple[str, ...]]:
    rest = (each for each in candidate.overrides if each.partition("=")[0] not in keys)
    return candidate.job, tuple(rest)


def weigh(shared: Shared, objective: Objective, family: Sequence[Candidate], *, all_of: bool) -> list[Weighed]:
    """What can be said of a family without simulating it.

    all_of: also of those that compute more whole layers again than another that fits, and so are slower and not needed.
    """
    found: list[Weighed] = []
    for _, others in groupby(family, key=lambda each: _without(each, (RECOMPUTE,))):
        known = [each.said for each in found]
        if MEMORY_OF_STATES in known:
            found += [Weighed(each, None, MEMORY_OF_STATES) for each in others]
        else:
            found += _weighed(shared(), objective, [*others], fresh=MEMORY not in known, all_of=all_of)
    return found


def _weighed(
    scenario: Scenario, objective: Objective, others: Sequence[Candidate], *, fresh: bool, all_of: bool
) -> list[Weighed]:
    """Of layouts that differ in what they compute again. fresh: whether states may not fit, for all that is known."""
    found: list[Weighed] = []
    enough = False
    for place, candidate in enumerate(others):
        try:
            changed = scenario.changed(candidate.overrides)
        except InputError as error:
            found.append(Weighed(candidate, None, _first(error)))
            continue
        layers = isinstance(changed.training.recompute, NoRecompute | FullRecompute)
        if layers and enough:
            found.append(Weighed(candidate, None, NEEDLESS))
        elif fits(changed):
            enough = enough or (layers and not all_of)
            found.append(Weighed(candidate, objective.least(changed, lower_bound(changed))))
        elif fresh and not states_fit(changed):
            return [*found, *(Weighed(each, None, MEMORY_OF_STATES) for each in others[place:])]
        else:
            found.append(Weighed(candidate, None, MEMORY))
            fresh = False
    return found


def _first(error: InputError) -> str:
    """The first of the sentences of a refusal, which begins with the key that it is about."""
    lines = str(error).splitlines()
    return (lines[1] if len(lines) > 1 else lines[0].partition(": ")[2]).strip(" -")
