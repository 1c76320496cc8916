"""Is a layout legal, does it fit, and how good can it be at best?"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from clustersim.errors import InputError
from clustersim.fitting import fits
from clustersim.planning.search.bounds import lower_bound
from clustersim.planning.search.objective import Objective
from clustersim.planning.search.space import Candidate
from clustersim.scenario import Scenario

MEMORY: Final = "does not fit in memory"


@dataclass(frozen=True, slots=True)
class Weighed:
    """A candidate before it is simulated. bound: of its score, from below; None where it is set aside.

    said: why, a sentence `reason: what it is about`.
    """

    candidate: Candidate
    bound: float | None
    said: str = ""


def weigh(scenario: Scenario, objective: Objective, candidates: Sequence[Candidate]) -> list[Weighed]:
    """What can be said of layouts without simulating them."""
    return [_weighed(scenario, objective, each) for each in candidates]


def _weighed(scenario: Scenario, objective: Objective, candidate: Candidate) -> Weighed:
    try:
        changed = scenario.changed(candidate.overrides)
    except InputError as error:
        return Weighed(candidate, None, _first(error))
    if not fits(changed):
        return Weighed(candidate, None, MEMORY)
    return Weighed(candidate, objective.least(changed, lower_bound(changed)))


def _first(error: InputError) -> str:
    """The first of the sentences of a refusal, which begins with the key that it is about."""
    lines = str(error).splitlines()
    return (lines[1] if len(lines) > 1 else lines[0].partition(": ")[2]).strip(" -")
