"""Is a layout legal, does it fit, and how good can it be at best?"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from clustersim.errors import InputError
from clustersim.fitting import fits
from clustersim.planning.search.bounds import lower_bound
from clustersim.planning.search.keys import RECOMPUTE
from clustersim.planning.search.objective import Objective
from clustersim.planning.search.space import Candidate
from clustersim.scenario import Scenario
from clustersim.workload.training import FullRecompute, NoRecompute

MEMORY: Final = "does not fit in memory"
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
    """Neighbours that differ in nothing but what they compute again."""
    for _, family in groupby(candidates, key=_family):
        yield [*family]


def _family(candidate: Candidate) -> tuple[int, tuple[str, ...]]:
    return candidate.job, tuple(each for each in candidate.overrides if not each.startswith(f"{RECOMPUTE}="))


def weigh(scenario: Scenario, objective: Objective, family: Sequence[Candidate], *, all_of: bool) -> list[Weighed]:
    """What can be said of a family without simulating it.

    all_of: also of those that compute more whole layers again than another that fits, and so are slower and not needed.
    """
    found: list[Weighed] = []
    enough = False
    for candidate in family:
        try:
            changed = scenario.changed(candidate.overrides)
        except InputError as error:
            found.append(Weighed(candidate, None, _first(error)))
            continue
        layers = isinstance(changed.training.recompute, NoRecompute | FullRecompute)
        if layers and enough:
            found.append(Weighed(candidate, None, NEEDLESS))
        elif not fits(changed):
            found.append(Weighed(candidate, None, MEMORY))
        else:
            enough = enough or (layers and not all_of)
            found.append(Weighed(candidate, objective.least(changed, lower_bound(changed))))
    return found


def _first(error: InputError) -> str:
    """The first of the sentences of a refusal, which begins with the key that it is about."""
    lines = str(error).splitlines()
    return (lines[1] if len(lines) > 1 else lines[0].partition(": ")[2]).strip(" -")
