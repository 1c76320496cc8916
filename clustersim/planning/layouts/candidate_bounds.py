"""Is a layout legal, do its model states fit, and what is the lower bound of its score?"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from clustersim.common.errors import InputError
from clustersim.common.units import format_bytes
from clustersim.model.training import FullRecompute, NoRecompute, Recompute, SelectiveRecompute
from clustersim.planning.layouts.bounds import StepLowerBound, step_lower_bound
from clustersim.planning.layouts.config_keys import OFFLOAD, RECOMPUTE, STATE_NEUTRAL_KEYS
from clustersim.planning.layouts.derived_scenarios import derived_scenarios
from clustersim.planning.layouts.layout_evaluation import Evaluation
from clustersim.planning.layouts.local_evaluation import local_lower_bound
from clustersim.planning.layouts.search_jobs import SearchJob
from clustersim.planning.layouts.search_space import LayoutCandidate, SearchSpace
from clustersim.reliability.replica_memory import distinct_replicas, replica_memory_use
from clustersim.results.memory_check import MemoryUse, model_states_use, required_headroom
from clustersim.scenario.resolved import ResolvedScenario
from clustersim.scenario.validation_rules.consistency import find_problems

STATES_DO_NOT_FIT: Final = "weights and states do not fit in memory"
STATES_LEAVE_NO_HEADROOM: Final = "weights and states do not leave the headroom"


@dataclass(frozen=True, slots=True)
class CandidateBound:
    """A candidate before simulation. bound: lower bound of its score, None if it is rejected.

    rejection: why, as a message `reason: detail`; states: memory of its model states, None if it is illegal;
    states_leave_headroom: whether these alone leave the required headroom.
    """

    candidate: LayoutCandidate
    bound: float | None
    rejection: str = ""
    states: MemoryUse | None = None
    states_leave_headroom: bool = True


def state_groups(candidates: Iterable[LayoutCandidate]) -> Iterator[list[LayoutCandidate]]:
    """Consecutive candidates that differ in nothing that affects what stays in memory for the whole step."""
    for _, group in groupby(candidates, key=lambda candidate: _key_without(candidate, STATE_NEUTRAL_KEYS)):
        yield [*group]


def recompute_chains(space: SearchSpace, bounds: Iterable[CandidateBound]) -> list[list[CandidateBound]]:
    """Chains of layouts that differ only in how much they recompute; of each the first that fits is wanted.

    More recomputation is slower, and needed only where less does not fit. Where the user chose the policy, or
    activations may be offloaded (more recomputation copies less), each layout is a chain of its own, and so is
    a policy that is not nested with the others. Each chain is ordered from least to most, and the chains by
    bound.
    """
    is_user_chosen = any(key == RECOMPUTE or key.startswith(OFFLOAD) for key in space.user_keys)
    policies_by_job = [
        () if is_user_chosen or job.resolved.training.offload.activations else _chain_policies(job)
        for job in space.jobs
    ]
    chains: dict[object, dict[int, CandidateBound]] = {}
    for bound in bounds:
        policies = policies_by_job[bound.candidate.job_index]
        policy = _recompute_policy(space, bound.candidate) if policies else None
        is_singleton = policy not in policies
        key = bound.candidate if is_singleton else _key_without(bound.candidate, (RECOMPUTE,))
        chains.setdefault(key, {})[0 if is_singleton else policies.index(policy)] = bound
    ordered = ([chain[index] for index in sorted(chain)] for chain in chains.values())
    return sorted(ordered, key=lambda chain: (chain[0].bound or 0.0, chain[0].candidate.complexity_key))


def _chain_policies(job: SearchJob) -> Sequence[Recompute]:
    """A job's nested recompute policies, each including the previous one: full layers take precedence over modules."""
    policies = [job.parsed_values[RECOMPUTE, value] for value in job.values.get(RECOMPUTE, ())]
    chain: list[Recompute] = []
    for policy in sorted(policies, key=lambda policy: policy.is_selective):
        if all(_recomputes_all_of(policy, other) or _recomputes_all_of(other, policy) for other in chain):
            chain.append(policy)
    return sorted(chain, key=lambda policy: sum(_recomputes_all_of(policy, other) for other in chain))


def _recomputes_all_of(one: Recompute, other: Recompute) -> bool:
    """Whether one policy recomputes everything that the other does."""
    match one, other:
        case (_, NoRecompute()) | (FullRecompute(None), _):
            return True
        case FullRecompute(int() as layers), FullRecompute(int() as other_amount):
            return layers >= other_amount
        case SelectiveRecompute(modules), SelectiveRecompute(other_amount):
            return modules >= other_amount
    return False


def _recompute_policy(space: SearchSpace, candidate: LayoutCandidate) -> Recompute:
    """The recompute policy of a candidate."""
    job = space.jobs[candidate.job_index]
    values = (override.partition("=")[2] for override in candidate.overrides if override.startswith(f"{RECOMPUTE}="))
    policy: Recompute = next((job.parsed_values[RECOMPUTE, value] for value in values), job.resolved.training.recompute)
    return policy


def _key_without(candidate: LayoutCandidate, keys: Collection[str]) -> tuple[int, tuple[str, ...]]:
    other_overrides = (override for override in candidate.overrides if override.partition("=")[0] not in keys)
    return candidate.job_index, tuple(other_overrides)


def bound_candidates(evaluation: Evaluation, group: Sequence[LayoutCandidate]) -> list[CandidateBound]:
    """Legality, state memory and bound of a group without simulating it; activation memory is checked later."""
    bounds: list[CandidateBound] = []
    states: MemoryUse | None = None  # which are those of the whole group
    objective, scenarios, leave_headroom = evaluation.objective, derived_scenarios(evaluation.packed), True
    for index, candidate in enumerate(group):
        try:
            resolved = scenarios.resolve(candidate.overrides)
        except InputError as error:
            bounds.append(CandidateBound(candidate, None, str(error)))
            continue
        if problem := _replica_problem(resolved):
            bounds.append(CandidateBound(candidate, None, problem))
            continue
        if states is None:
            states = _states_use(resolved)
            leave_headroom = states.leaves_headroom(required_headroom(resolved, evaluation.headroom))
        if not states.fits:
            rejection = f"{STATES_DO_NOT_FIT}: {describe_use(states)}"
            return [*bounds, *(CandidateBound(rejected, None, rejection, states) for rejected in group[index:])]
        bound = objective.lower_bound(resolved, _step_bound(resolved, evaluation, candidate))
        bounds.append(CandidateBound(candidate, bound, states=states, states_leave_headroom=leave_headroom))
    return bounds


def _step_bound(resolved: ResolvedScenario, evaluation: Evaluation, candidate: LayoutCandidate) -> StepLowerBound:
    """Of a step, or of what replicas take for a global batch."""
    if resolved.diloco is None:
        return step_lower_bound(resolved)
    return StepLowerBound(local_lower_bound(resolved, evaluation.variants[candidate.job_index]))


def _states_use(resolved: ResolvedScenario) -> MemoryUse:
    """Memory of model states, of the replica of local training with least room."""
    return model_states_use(resolved) if resolved.diloco is None else replica_memory_use(resolved, model_states_use)


def _replica_problem(resolved: ResolvedScenario) -> str:
    """What is wrong with a replica of local training as a job of its own; empty: nothing."""
    replicas = () if resolved.diloco is None else distinct_replicas(resolved)
    return next((problem for replica in replicas for problem in find_problems(replica)), "")


def describe_use(use: MemoryUse) -> str:
    """What a layout needs, and what there is, as text."""
    if use.needed <= use.capacity and not use.hosts_fit:
        return "what is offloaded is more than the hosts' memory"
    return f"{format_bytes(use.needed)} of {format_bytes(use.capacity)}"
