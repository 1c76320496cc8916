"""Is a layout legal, does it fit, and how good can it be at best?"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from clustersim.errors import InputError
from clustersim.fitting import states_fit
from clustersim.planning.layouts.bounds import lower_bound
from clustersim.planning.layouts.drafts import drafts_of
from clustersim.planning.layouts.executors import Shared
from clustersim.planning.layouts.jobs import Job
from clustersim.planning.layouts.keys import OFFLOAD, PASSING, RECOMPUTE
from clustersim.planning.layouts.objective import Objective
from clustersim.planning.layouts.space import Candidate, Space
from clustersim.workload.training import FullRecompute, NoRecompute, Recompute, SelectiveRecompute

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
    """Layouts of which the first that fits is wanted: those that differ in how much they compute again.

    More of it is slower, and needed only where less does not fit. Where somebody chose what is computed again, or
    activations may go to the host (more of it is less to copy), each is by itself, and so is what computes other things
    again than the rest. Each ladder from least to most, and of all of them best bounds first.
    """
    chosen = any(key == RECOMPUTE or key.startswith(OFFLOAD) for key in space.named)
    rungs = [() if chosen or job.setup.training.offload.activations else _rungs(job) for job in space.jobs]
    found: dict[object, dict[int, Weighed]] = {}
    for each in weighed:
        there = rungs[each.candidate.job]
        again = _recompute(space, each.candidate) if there else None
        alone = again not in there
        key = each.candidate if alone else _without(each.candidate, (RECOMPUTE,))
        found.setdefault(key, {})[0 if alone else there.index(again)] = each
    climbed = ([ladder[rung] for rung in sorted(ladder)] for ladder in found.values())
    return sorted(climbed, key=lambda ladder: (ladder[0].bound or 0.0, ladder[0].candidate.plainness))


def _rungs(job: Job) -> Sequence[Recompute]:
    """What a job's layouts may compute again, each all that the one before it does: whole layers before modules."""
    every = [job.objects[RECOMPUTE, value] for value in job.values.get(RECOMPUTE, ())]
    found: list[Recompute] = []
    for each in sorted(every, key=lambda each: not isinstance(each, NoRecompute | FullRecompute)):
        if all(_has(each, other) or _has(other, each) for other in found):
            found.append(each)
    return sorted(found, key=lambda each: sum(_has(each, other) for other in found))


def _has(one: Recompute, other: Recompute) -> bool:
    """Whether one computes all again that the other does."""
    match one, other:
        case (_, NoRecompute()) | (FullRecompute(None), _):
            return True
        case FullRecompute(int() as layers), FullRecompute(int() as fewer):
            return layers >= fewer
        case SelectiveRecompute(modules), SelectiveRecompute(fewer):
            return modules >= fewer
    return False


def _recompute(space: Space, candidate: Candidate) -> Recompute:
    """What it computes again."""
    job = space.jobs[candidate.job]
    values = (each.partition("=")[2] for each in candidate.overrides if each.startswith(f"{RECOMPUTE}="))
    found: Recompute = next((job.objects[RECOMPUTE, value] for value in values), job.setup.training.recompute)
    return found


def _without(candidate: Candidate, keys: Collection[str]) -> tuple[int, tuple[str, ...]]:
    rest = (each for each in candidate.overrides if each.partition("=")[0] not in keys)
    return candidate.job, tuple(rest)


def weigh(shared: Shared, objective: Objective, family: Sequence[Candidate]) -> list[Weighed]:
    """What can be said of a family without simulating it, but for whether activations fit beside states."""
    found: list[Weighed] = []
    fresh, drafts = True, drafts_of(shared)
    for place, candidate in enumerate(family):
        try:
            setup = drafts.setup(candidate.overrides)
        except InputError as error:
            found.append(Weighed(candidate, None, str(error)))
            continue
        if fresh and not states_fit(setup):
            return [*found, *(Weighed(each, None, MEMORY_OF_STATES) for each in family[place:])]
        fresh = False
        found.append(Weighed(candidate, objective.least(setup, lower_bound(setup))))
    return found
