"""Is a layout legal, does it fit, and how good can it be at best?"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from clustersim.common.errors import InputError
from clustersim.model.training import FullRecompute, NoRecompute, Recompute, SelectiveRecompute
from clustersim.planning.layouts.bounds import lower_bound
from clustersim.planning.layouts.config_keys import OFFLOAD, PASSING, RECOMPUTE
from clustersim.planning.layouts.derived_scenarios import drafts_of
from clustersim.planning.layouts.executors import Shared
from clustersim.planning.layouts.objective import Objective
from clustersim.planning.layouts.search_jobs import Job
from clustersim.planning.layouts.search_space import Candidate, Space
from clustersim.results.memory_check import model_states_fit

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
    for item in weighed:
        there = rungs[item.candidate.job]
        again = _recompute(space, item.candidate) if there else None
        alone = again not in there
        key = item.candidate if alone else _without(item.candidate, (RECOMPUTE,))
        found.setdefault(key, {})[0 if alone else there.index(again)] = item
    climbed = ([ladder[rung] for rung in sorted(ladder)] for ladder in found.values())
    return sorted(climbed, key=lambda ladder: (ladder[0].bound or 0.0, ladder[0].candidate.plainness))


def _rungs(job: Job) -> Sequence[Recompute]:
    """What a job's layouts may compute again, each all that the one before it does: whole layers before modules."""
    every = [job.objects[RECOMPUTE, value] for value in job.values.get(RECOMPUTE, ())]
    found: list[Recompute] = []
    for item in sorted(every, key=lambda each: not isinstance(each, NoRecompute | FullRecompute)):
        if all(_has(item, other) or _has(other, item) for other in found):
            found.append(item)
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
    values = (override.partition("=")[2] for override in candidate.overrides if override.startswith(f"{RECOMPUTE}="))
    found: Recompute = next((job.objects[RECOMPUTE, value] for value in values), job.setup.training.recompute)
    return found


def _without(candidate: Candidate, keys: Collection[str]) -> tuple[int, tuple[str, ...]]:
    rest = (override for override in candidate.overrides if override.partition("=")[0] not in keys)
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
        if fresh and not model_states_fit(setup):
            return [*found, *(Weighed(item, None, MEMORY_OF_STATES) for item in family[place:])]
        fresh = False
        found.append(Weighed(candidate, objective.least(setup, lower_bound(setup))))
    return found
