"""Which layouts of a space are the best? Best-first branch and bound: simulate by ascending lower bound.

The best `top` of every job, and all that tie with the overall best, are those of exhaustive search:
whatever is not simulated is illegal, does not fit, or has a bound above the worst of them. A step of many
microbatches is first extrapolated from a shorter one (`extrapolation`), and simulated in full only if the
estimate, less its error margin, is not above the worst of them. Ties are ordered by simplicity, so the
result does not depend on completion order. Results are journaled as they come, if there is a store.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from heapq import heapify, heappop, heappush
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any, Final, TypeVar

from clustersim.common.errors import ClusterSimError, InputError
from clustersim.common.processes import TASKS_PER_WORKER, iterate_completed, worker_pool
from clustersim.common.units import Seconds
from clustersim.planning.layouts.candidate_bounds import (
    CandidateBound,
    bound_candidates,
    recompute_chains,
    state_groups,
)
from clustersim.planning.layouts.derived_scenarios import derived_scenarios
from clustersim.planning.layouts.executors import PackedScenario
from clustersim.planning.layouts.extrapolation import ExtrapolatedStep, extrapolate_step
from clustersim.planning.layouts.objective import Objective, parse_objective
from clustersim.planning.layouts.search_space import LayoutCandidate, SearchSpace, count_pruned
from clustersim.planning.layouts.search_store import SearchStore
from clustersim.planning.layouts.sensitivity import PERTURBATIONS, label_scores, perturbed_score
from clustersim.reliability import estimate_run
from clustersim.results.memory_check import fits_in_memory
from clustersim.results.search_result import BoundedLayout, LayoutResult, PrunedLayouts, SearchResult, SensitivityCase
from clustersim.results.simulation_result import SimulationResult
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from clustersim.uncertainty.model_file import load_uncertainty_model

Progress = Callable[[str, int, int, LayoutResult | None], None]
"""Callback with what is done, how much of it, the total, and the best layout so far."""
K = TypeVar("K")
T = TypeVar("T")
DOES_NOT_FIT: Final = "does not fit in memory"
NEEDLESS_RECOMPUTE: Final = "less recomputation fits"
BoundQueue = list[tuple[float, int, int]]
"""Heap of (bound, chain index, position in the chain) of the next layout of each chain."""


@dataclass(frozen=True, slots=True)
class LayoutSearch:
    """A configured search. top: number of best layouts wanted per job; workers: processes.

    store: folder of the journal, to resume from; executor: used in place of local processes, it must have this
    package installed; sensitivity: whether the best are simulated again with perturbed conditions.
    """

    space: SearchSpace
    top: int = 10
    objective: Objective = Objective.STEP_TIME
    workers: int = 1
    store: Path | None = None
    executor: Executor | None = None
    sensitivity: bool = True

    def __post_init__(self) -> None:
        for name, value in (("top", self.top), ("workers", self.workers)):
            if value < 1:
                raise InputError(f"{name}: {value} is too few; 1 is the fewest")

    def run(self, progress: Progress | None = None) -> SearchResult:
        """Search; raise InputError if no layout is left, for a store of another search, and for an unknown price.

        Ctrl-C ends it with the results so far.
        """
        started = perf_counter()
        for job in self.space.jobs:
            self.objective.require_data(job.resolved)
        pruned: dict[str, PrunedLayouts] = {}
        with (
            SearchStore.open_or_resume(self.store, self._identity, self._input_files) as store,
            worker_pool(self.workers, self.executor) as pool,
        ):
            state = _SearchState(self, store, pruned, progress or _ignore_progress)
            try:
                state.bound_all(pool, [*self.space.candidates(pruned)])
                state.simulate_by_bound(pool)
                if self.sensitivity:
                    state.test_sensitivity(pool)
            except KeyboardInterrupt:
                state.complete = False
            result = state.build_result(perf_counter() - started)
            if result.complete:
                store.write_table(result)
        return result

    @property
    def _input_files(self) -> list[Path]:
        """The files that the scenario and the jobs' clusters are read from."""
        clusters = (path for job in self.space.jobs for path in job.resolved.cluster.files)
        return [*dict.fromkeys((*self.space.scenario.files, *clusters))]

    @property
    def _identity(self) -> dict[str, Any]:
        """What identifies the search in its store."""
        jobs = [(job.overrides, dict(job.values), sorted(job.allowed_dp or ())) for job in self.space.jobs]
        return {
            "scenario": self.space.scenario.to_mapping(),
            "objective": self.objective.value,
            "jobs": jobs,
            "named": sorted(self.space.user_keys),
        }


def search_layouts(
    scenario: Scenario,
    *,
    fix: Mapping[str, object] | None = None,
    vary: Mapping[str, Iterable[object]] | None = None,
    objective: Objective | str = Objective.STEP_TIME,
    top: int = 10,
    workers: int = 1,
) -> SearchResult:
    """The best layouts of a scenario's job on its cluster; see `SearchSpace.from_scenario` and `LayoutSearch`.

    objective: as on the command line, such as "energy".
    """
    selected_objective = objective if isinstance(objective, Objective) else parse_objective(objective)
    return LayoutSearch(SearchSpace.from_scenario(scenario, fix, vary), top, selected_objective, workers).run()


@dataclass
class _SearchState:
    """A search in progress. chains: legal layouts, of each chain the first that fits is wanted."""

    search: LayoutSearch
    store: SearchStore
    pruned: dict[str, PrunedLayouts]
    report_progress: Progress
    complete: bool = True
    chains: list[list[CandidateBound]] = field(default_factory=list)
    changes: tuple[SensitivityCase, ...] = ()

    @cached_property
    def packed_scenario(self) -> PackedScenario:
        return PackedScenario.pack(self.search.space.scenario)

    @cached_property
    def repeatability(self) -> float:
        """Relative difference of two runs of the same step, the tolerance for ties."""
        return load_uncertainty_model().repeat_deviation

    @cached_property
    def initial_layout(self) -> LayoutResult | None:
        """The scenario as in its file; None if it cannot be simulated."""
        try:
            return simulate_layout(self.search.space.scenario, self.search.objective, LayoutCandidate(()))
        except ClusterSimError:
            return None

    def bound_all(self, pool: Executor, candidates: Sequence[LayoutCandidate]) -> None:
        """Compute the bounds that the store lacks; raise InputError if no candidate is left."""
        bounds, task = self.store.bounds, partial(bound_candidates, self.packed_scenario, self.search.objective)
        tasks = (
            (None, partial(task, state_group))
            for state_group in state_groups(candidates)
            if state_group[0] not in bounds
        )
        for _, group_bounds in self._run_tasks(pool, lambda: next(tasks, None)):
            self.store.add_bounds(group_bounds)
            self.report_progress("weighing layouts", len(bounds), len(candidates), None)
        candidate_bounds = [bounds[candidate] for candidate in candidates]
        for candidate_bound in (candidate for candidate in candidate_bounds if candidate.bound is None):
            count_pruned(self.pruned, candidate_bound.rejection)
        self.chains = recompute_chains(
            self.search.space, (candidate for candidate in candidate_bounds if candidate.bound is not None)
        )
        if not self.chains:
            raise InputError(_empty_search_message(self.search.space.combination_count, self.pruned))

    def simulate_by_bound(self, pool: Executor) -> None:
        """Simulate by ascending bound until none is below the threshold; several workers simulate a few too many."""
        queue = [(_bound_of(chain[0]), chain_index, 0) for chain_index, chain in enumerate(self.chains)]
        heapify(queue)
        for (chain_index, position), layout in self._run_tasks(pool, lambda: self._next_task(queue)):
            candidate = self.chains[chain_index][position].candidate
            self.store.add_result(candidate, layout)
            self._requeue(queue, chain_index, position)
            done = len(self.store.layouts.keys() | self.store.estimates.keys())
            self.report_progress("simulating layouts", done, done + self._remaining_count(queue), self._best_so_far())
        if not self.store.layouts:
            raise InputError(
                _empty_search_message(
                    self.search.space.combination_count,
                    {DOES_NOT_FIT: PrunedLayouts(len(self.store.out_of_memory), DOES_NOT_FIT)},
                )
            )

    def _next_task(self, queue: BoundQueue) -> tuple[tuple[int, int], Callable[[], LayoutResult | None]] | None:
        """The next layout that may be among the best and is not evaluated yet, as a task."""
        thresholds = self._thresholds()
        while queue:
            bound, chain_index, position = heappop(queue)
            candidate = self.chains[chain_index][position].candidate
            estimate = self.store.estimates.get(candidate)
            if candidate in self.store.layouts or candidate in self.store.out_of_memory:
                self._requeue(queue, chain_index, position)
            elif estimate is not None and bound < self._min_score(estimate):
                heappush(queue, (self._min_score(estimate), chain_index, position))
            elif bound <= thresholds[candidate.job_index]:
                task = partial(
                    _evaluate, self.packed_scenario, self.search.objective, candidate, in_full=estimate is not None
                )
                return (chain_index, position), task
        return None

    def _requeue(self, queue: BoundQueue, chain_index: int, position: int) -> None:
        """Requeue an estimated layout for full simulation, or the next of the chain if this one does not fit."""
        chain = self.chains[chain_index]
        candidate = chain[position].candidate
        if candidate in self.store.out_of_memory and position + 1 < len(chain):
            heappush(queue, (_bound_of(chain[position + 1]), chain_index, position + 1))
        elif candidate in self.store.estimates and candidate not in self.store.layouts:
            heappush(queue, (self._min_score(self.store.estimates[candidate]), chain_index, position))

    def test_sensitivity(self, pool: Executor) -> None:
        """Simulate the tied best layouts with perturbed conditions."""
        task = partial(perturbed_score, self.packed_scenario, self.search.objective)
        rivals = [LayoutCandidate(rival.overrides, rival.job) for rival in self.build_result(0.0).rivals]
        scores: list[list[float | None]] = [[None] * len(rivals) for _ in PERTURBATIONS]
        pairs = [*product(range(len(PERTURBATIONS)), range(len(rivals)))]
        tasks = (
            ((change_index, rival_index), partial(task, rivals[rival_index], change_index))
            for change_index, rival_index in pairs
        )
        for done, ((change_index, rival_index), score) in enumerate(
            self._run_tasks(pool, lambda: next(tasks, None)), 1
        ):
            scores[change_index][rival_index] = score
            self.report_progress("changing what may be other", done, len(pairs), self._best())
        self.changes = label_scores(scores)

    def _run_tasks(
        self, pool: Executor, next_task: Callable[[], tuple[K, Callable[[], T]] | None]
    ) -> Iterator[tuple[K, T]]:
        """Results of tasks with their keys, in completion order."""
        is_serial = self.search.workers == 1 and self.search.executor is None
        return iterate_completed(pool, 1 if is_serial else TASKS_PER_WORKER * self.search.workers, next_task)

    def _min_score(self, estimate: LayoutResult) -> float:
        """The lowest score compatible with an estimate."""
        return estimate.score * (1.0 - self.search.objective.estimate_margin)

    def _remaining_count(self, queue: BoundQueue) -> int:
        """How many layouts may still be among the best."""
        thresholds = self._thresholds()
        return sum(
            bound <= thresholds[self.chains[chain_index][position].candidate.job_index]
            for bound, chain_index, position in queue
        )

    def _thresholds(self) -> list[float]:
        """By job, the worst score among the best `top` or tied with the overall best; infinite while fewer exist."""
        scores: list[list[float]] = [[] for _ in self.search.space.jobs]
        for candidate, layout in self.store.layouts.items():
            scores[candidate.job_index].append(layout.score)
        top, best = self.search.top, self._best()
        tie_score = 0.0 if best is None else best.score * (1.0 + self.repeatability)
        return [max(tie_score, sorted(score)[top - 1]) if len(score) >= top else float("inf") for score in scores]

    def _best_so_far(self) -> LayoutResult | None:
        """The best known layout, simulated or estimated."""
        candidates = {**self.store.estimates, **self.store.layouts}
        return min(candidates.values(), key=lambda layout: layout.score, default=None)

    def _best(self) -> LayoutResult | None:
        return min(self.store.layouts.values(), key=lambda layout: layout.score, default=None)

    def build_result(self, wall: Seconds) -> SearchResult:
        """The result so far; of a complete search it does not depend on completion order."""
        pruned, bounded, evaluated, thresholds = dict(self.pruned), [], [], self._thresholds()
        for candidate_bound, layout, pruning_reason in (
            outcome for chain in self.chains for outcome in self._chain_outcomes(chain, thresholds)
        ):
            if pruning_reason:
                count_pruned(pruned, pruning_reason)
            elif layout is None:
                bounded.append(
                    BoundedLayout(
                        candidate_bound.candidate.overrides,
                        candidate_bound.candidate.job_index,
                        _bound_of(candidate_bound),
                    )
                )
            else:
                evaluated.append((candidate_bound.candidate, layout))
        ranked = sorted(
            evaluated, key=lambda candidate_layout: (candidate_layout[1].score, candidate_layout[0].complexity_key)
        )
        tie_score = (ranked[0][1].score if ranked else 0.0) * (1.0 + self.repeatability)
        marked = [(candidate, replace(layout, tied=layout.score <= tie_score)) for candidate, layout in ranked]
        tied_indices = [index for index, (_, layout) in enumerate(marked) if layout.tied]
        return SearchResult(
            objective=self.search.objective.value,
            candidates=self.search.space.combination_count,
            pruned=dict(sorted(pruned.items(), key=lambda reason: (-reason[1].count, reason[0]))),
            bounded=tuple(sorted(bounded, key=lambda bounded_layout: (bounded_layout.bound, bounded_layout.overrides))),
            simulated=tuple(layout for _, layout in marked),
            top=self.search.top,
            preferred=min(tied_indices, key=lambda index: marked[index][0].complexity_key, default=0),
            first_guess=self.initial_layout,
            wall_seconds=wall,
            complete=self.complete,
            sensitivity=self.changes,
            repeatability=self.repeatability,
        )

    def _chain_outcomes(
        self, chain: Sequence[CandidateBound], thresholds: Sequence[float]
    ) -> Iterator[tuple[CandidateBound, LayoutResult | None, str]]:
        """(candidate, layout, reason) of a chain: simulated, or pruned for a reason, or neither (bounded)."""
        has_fit = False
        for candidate_bound in chain:
            layout = self._evaluated_layout(candidate_bound.candidate, thresholds)
            if has_fit:
                yield candidate_bound, None, NEEDLESS_RECOMPUTE
            elif _bound_of(candidate_bound) > thresholds[candidate_bound.candidate.job_index]:
                yield candidate_bound, None, ""
            elif candidate_bound.candidate in self.store.out_of_memory:
                yield candidate_bound, None, DOES_NOT_FIT
            else:
                yield candidate_bound, layout, ""
                has_fit = layout is not None

    def _evaluated_layout(self, candidate: LayoutCandidate, thresholds: Sequence[float]) -> LayoutResult | None:
        """A layout as simulated, or its estimate where that suffices to exclude it."""
        estimate = self.store.estimates.get(candidate)
        if estimate is not None and self._min_score(estimate) > thresholds[candidate.job_index]:
            return estimate
        return self.store.layouts.get(candidate, estimate)


def _bound_of(candidate_bound: CandidateBound) -> float:
    return 0.0 if candidate_bound.bound is None else candidate_bound.bound


def _empty_search_message(candidates: int, pruned: Mapping[str, PrunedLayouts]) -> str:
    if not pruned:
        return "no layout varies; name keys and values, as in --vary layout.tp=1,2,4"
    main_reason = max(pruned.values(), key=lambda pruned_layouts: pruned_layouts.count)
    return (
        f"none of {candidates:,} layouts is left; most, {main_reason.count:,}, are pruned by this: "
        f"{main_reason.example}"
    )


def _evaluate(
    packed: PackedScenario, objective: Objective, candidate: LayoutCandidate, *, in_full: bool
) -> LayoutResult | None:
    """A layout, simulated in full or extrapolated; None if it does not fit."""
    if not fits_in_memory(derived_scenarios(packed).resolve(candidate.overrides)):
        return None
    scenario = packed().with_overrides(candidate.overrides)
    estimate = extrapolate_step(scenario) if not in_full and objective.allows_estimates(scenario) else None
    return (
        simulate_layout(scenario, objective, candidate)
        if estimate is None
        else _layout_record(estimate, objective, candidate)
    )


def simulate_layout(scenario: Scenario, objective: Objective, candidate: LayoutCandidate) -> LayoutResult:
    """Simulate a layout."""
    return _layout_record(simulate(scenario), objective, candidate)


def _layout_record(
    result: SimulationResult | ExtrapolatedStep, objective: Objective, candidate: LayoutCandidate
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
        mfu=result.mfu(),
        mfu_causal=result.mfu_causal(),
        peak_memory=result.peak_memory,
        memory=result.memory_capacity,
        cost=economics.cost_per_trillion_tokens,
        currency="" if price is None else price.currency,
        price_kind="" if price is None else quotes[0].kind.value,
        energy=economics.energy_per_trillion_tokens,
        breakdown={category: seconds for category, seconds in result.breakdown.mean_seconds().items() if seconds > 0.0},
        run=None if run is None else asdict(run),
        extrapolated=isinstance(result, ExtrapolatedStep),
    )


def _ignore_progress(_label: str, _done: int, _total: int, _best: LayoutResult | None) -> None:
    """Ignore progress."""
