"""Is a layout legal, do its model states fit, and what is the lower bound of its score?"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from clustersim.common.errors import InputError
from clustersim.model.training import FullRecompute, NoRecompute, Recompute, SelectiveRecompute
from clustersim.planning.layouts.bounds import step_lower_bound
from clustersim.planning.layouts.config_keys import OFFLOAD, RECOMPUTE, STATE_NEUTRAL_KEYS
from clustersim.planning.layouts.derived_scenarios import derived_scenarios
from clustersim.planning.layouts.executors import PackedScenario
from clustersim.planning.layouts.objective import Objective
from clustersim.planning.layouts.search_jobs import SearchJob
from clustersim.planning.layouts.search_space import LayoutCandidate, SearchSpace
from clustersim.results.memory_check import model_states_fit

STATES_DO_NOT_FIT: Final = "weights and states do not fit in memory"


@dataclass(frozen=True, slots=True)
class CandidateBound:
    """A candidate before simulation. bound: lower bound of its score, None if it is rejected.

    rejection: why, as a message `reason: detail`.
    """

    candidate: LayoutCandidate
    bound: float | None
    rejection: str = ""


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


def bound_candidates(
    packed: PackedScenario, objective: Objective, group: Sequence[LayoutCandidate]
) -> list[CandidateBound]:
    """Legality, state memory and bound of a group without simulating it; activation memory is checked later."""
    bounds: list[CandidateBound] = []
    is_first_legal, scenarios = True, derived_scenarios(packed)
    for index, candidate in enumerate(group):
        try:
            resolved = scenarios.resolve(candidate.overrides)
        except InputError as error:
            bounds.append(CandidateBound(candidate, None, str(error)))
            continue
        if is_first_legal and not model_states_fit(resolved):
            return [
                *bounds,
                *(CandidateBound(layout_candidate, None, STATES_DO_NOT_FIT) for layout_candidate in group[index:]),
            ]
        is_first_legal = False
        bounds.append(CandidateBound(candidate, objective.lower_bound(resolved, step_lower_bound(resolved))))
    return bounds
