"""How is one layout of a search evaluated? Memory first, then an extrapolated or a full step."""

from dataclasses import asdict, dataclass, replace

from clustersim.planning.layouts.derived_scenarios import derived_scenarios
from clustersim.planning.layouts.executors import PackedScenario
from clustersim.planning.layouts.extrapolation import ExtrapolatedStep, extrapolate_step
from clustersim.planning.layouts.local_evaluation import evaluate_variants, local_result
from clustersim.planning.layouts.objective import Objective
from clustersim.planning.layouts.outer_variants import OuterVariant
from clustersim.planning.layouts.search_space import LayoutCandidate
from clustersim.reliability import estimate_run
from clustersim.reliability.local_training import LocalTraining
from clustersim.reliability.replica_memory import replica_memory_use
from clustersim.results.memory_check import MemoryUse, peak_memory_use, required_headroom
from clustersim.results.search_result import LayoutResult
from clustersim.results.simulation_result import SimulationResult
from clustersim.scenario import Scenario
from clustersim.scenario.resolved import ResolvedScenario
from clustersim.simulation import simulate


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How the layouts of a search are evaluated.

    headroom: share of a device to leave free; None: the default; variants: by job, settings of local training.
    """

    packed: PackedScenario
    objective: Objective
    headroom: float | None
    variants: tuple[tuple[OuterVariant, ...], ...] = ()


def evaluate_layout(
    evaluation: Evaluation, candidate: LayoutCandidate, *, in_full: bool, needs_headroom: bool
) -> LayoutResult | MemoryUse:
    """A layout, simulated in full or extrapolated; what memory it needs, if that is too much."""
    resolved = derived_scenarios(evaluation.packed).resolve(candidate.overrides)
    use, headroom = memory_use(resolved), required_headroom(resolved, evaluation.headroom)
    if not use.leaves_headroom(headroom if needs_headroom else 0.0):
        return use
    scenario, objective = evaluation.packed().with_overrides(candidate.overrides), evaluation.objective
    if scenario.diloco is not None:
        variants = evaluation.variants[candidate.job_index]
        return evaluate_variants(scenario, variants, objective, candidate, headroom)
    estimate = extrapolate_step(scenario) if not in_full and objective.allows_estimates(scenario) else None
    return (
        simulate_layout(scenario, objective, candidate, headroom)
        if estimate is None
        else _layout_record(estimate, objective, candidate, headroom)
    )


def simulate_layout(
    scenario: Scenario, objective: Objective, candidate: LayoutCandidate, headroom: float
) -> LayoutResult:
    """Simulate a layout. headroom: share of a device that it has to leave free."""
    if scenario.diloco is not None:
        variant = OuterVariant.of_settings(scenario.diloco)
        return replace(
            local_result(LocalTraining(scenario), variant, objective, candidate, headroom),
            overrides=candidate.overrides,
        )
    return _layout_record(simulate(scenario), objective, candidate, headroom)


def memory_use(resolved: ResolvedScenario) -> MemoryUse:
    """Memory at the peak of a step, or of the replica of local training with least room."""
    return peak_memory_use(resolved) if resolved.diloco is None else replica_memory_use(resolved)


def _layout_record(
    result: SimulationResult | ExtrapolatedStep, objective: Objective, candidate: LayoutCandidate, headroom: float
) -> LayoutResult:
    """What a search records of a step."""
    run = estimate_run(result.scenario, result.step_time) if objective.is_run_objective else None
    economics = result.economics
    price, quotes = economics.price_per_gpu_hour, economics.price_quotes
    return LayoutResult(
        overrides=candidate.overrides,
        job=candidate.job_index,
        gpus=result.rank_count,
        cluster=result.scenario.cluster.name,
        score=objective.score(result) if run is None else objective.run_score(result, run),
        step_time=result.step_time,
        interval=result.step_time_interval,
        tokens_per_gpu=result.tokens_per_second / result.rank_count,
        mfu=result.mfu,
        mfu_causal=result.mfu_causal,
        peak_memory=result.peak_memory,
        memory=result.memory_capacity,
        fit_probability=result.fit_probability,
        required_headroom=headroom,
        cost=economics.cost_per_trillion_tokens,
        currency="" if price is None else price.currency,
        price_kind="" if price is None else quotes[0].kind.value,
        energy=economics.energy_per_trillion_tokens,
        breakdown={category: seconds for category, seconds in result.breakdown.mean_seconds().items() if seconds > 0.0},
        run=None if run is None else asdict(run),
        extrapolated=isinstance(result, ExtrapolatedStep),
    )
