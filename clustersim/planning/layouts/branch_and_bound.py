"""Which layouts of a space are the best? Best-first branch and bound: simulate by ascending lower bound.

The best `top` of every job, and all that tie with the overall best, are those of exhaustive search:
whatever is not simulated is illegal, does not fit or leaves no headroom, or has a bound above the worst of them.
Only of a job in which no layout leaves the headroom, the best that fit without it are searched then; they rank
below all others. A step of many
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
    STATES_LEAVE_NO_HEADROOM,
    CandidateBound,
    bound_candidates,
    describe_use,
    recompute_chains,
    state_groups,
)
from clustersim.planning.layouts.executors import PackedScenario
from clustersim.planning.layouts.layout_evaluation import Evaluation, evaluate_layout, simulate_layout
from clustersim.planning.layouts.objective import Objective, parse_objective
from clustersim.planning.layouts.search_space import LayoutCandidate, SearchSpace, count_pruned
from clustersim.planning.layouts.search_store import SearchStore
from clustersim.planning.layouts.sensitivity import PERTURBATIONS, label_scores, perturbed_score
from clustersim.results.memory_check import MemoryUse, required_headroom
from clustersim.results.search_result import (
    SURELY_BETTER,
    BoundedLayout,
    LayoutResult,
    PrunedLayouts,
    SearchResult,
    SensitivityCase,
    SetAsideJob,
)
from clustersim.scenario import Scenario
from clustersim.uncertainty.model_file import load_uncertainty_model

Progress = Callable[[str, int, int, LayoutResult | None], None]
"""Callback with what is done, how much of it, the total, and the best layout so far."""
K = TypeVar("K")
T = TypeVar("T")
DOES_NOT_FIT: Final = "does not fit in memory"
LEAVES_NO_HEADROOM: Final = "does not leave the headroom"
NEEDLESS_RECOMPUTE: Final = "less recomputation fits"
BoundQueue = list[tuple[float, int, int]]
"""Heap of (bound, chain index, position in the chain) of the next layout of each chain."""


@dataclass(frozen=True, slots=True)
class LayoutSearch:
    """A configured search. top: number of best layouts wanted per job; workers: processes.

    store: folder of the journal, to resume from; executor: used in place of local processes, it must have this
    package installed; sensitivity: whether the best are simulated again with perturbed conditions; headroom: share
    of every device that a layout has to leave free, None: what published errors of predicted memory ask for.
    """

    space: SearchSpace
    top: int = 10
    objective: Objective = Objective.STEP_TIME
    workers: int = 1
    store: Path | None = None
    executor: Executor | None = None
    sensitivity: bool = True
    headroom: float | None = None

    def __post_init__(self) -> None:
        if self.headroom is not None and not 0.0 <= self.headroom < 1.0:
            raise InputError(f"headroom: {self.headroom:g} is no share of a device; 0 or more and below 1 is one")
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
        return replace(result, warnings=self._warnings(result))

    def _warnings(self, result: SearchResult) -> tuple[str, ...]:
        """Likely mistakes in the scenario of the layout to take."""
        if not result.simulated:
            return ()
        return self.space.scenario.with_overrides(*result.recommended.overrides).warnings

    @property
    def _input_files(self) -> list[Path]:
        """The files that the scenario and the jobs' clusters are read from."""
        clusters = (path for job in self.space.jobs for path in job.resolved.cluster.files)
        return [*dict.fromkeys((*self.space.scenario.files, *clusters))]

    @property
    def _identity(self) -> dict[str, Any]:
        """What identifies the search in its store."""
        jobs = [
            (job.overrides, dict(job.values), sorted(job.allowed_dp or ()), *map(asdict, job.outer_variants))
            for job in self.space.jobs
        ]
        return {
            "scenario": self.space.scenario.to_mapping(),
            "objective": self.objective.value,
            "jobs": jobs,
            "named": sorted(self.space.user_keys),
            "headroom": self.headroom,
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

    objective: as on the command line, such as "energy". `LayoutSearch` has further settings, such as the headroom.
    """
    selected_objective = objective if isinstance(objective, Objective) else parse_objective(objective)
    return LayoutSearch(SearchSpace.from_scenario(scenario, fix, vary), top, selected_objective, workers).run()


@dataclass
class _SearchState:
    """A search in progress.

    legal: layouts whose states fit; too_large_states: memory of those of the others; chains: those that are
    searched, of each chain the first that fits and leaves the headroom is wanted; relaxed_jobs: those in which none
    does, so that the headroom is waived.
    """

    search: LayoutSearch
    store: SearchStore
    pruned: dict[str, PrunedLayouts]
    report_progress: Progress
    complete: bool = True
    legal: list[CandidateBound] = field(default_factory=list)
    chains: list[list[CandidateBound]] = field(default_factory=list)
    too_large_states: dict[LayoutCandidate, MemoryUse] = field(default_factory=dict)
    relaxed_jobs: frozenset[int] = frozenset()
    changes: tuple[SensitivityCase, ...] = ()

    @cached_property
    def evaluation(self) -> Evaluation:
        packed = PackedScenario.pack(self.search.space.scenario)
        variants = tuple(job.outer_variants for job in self.search.space.jobs)
        return Evaluation(packed, self.search.objective, self.search.headroom, variants)

    @cached_property
    def repeatability(self) -> float:
        """Relative difference of two runs of the same step, the tolerance for ties."""
        return load_uncertainty_model().repeat_deviation

    @cached_property
    def initial_layout(self) -> LayoutResult | None:
        """The scenario as in its file; None if it cannot be simulated."""
        scenario = self.search.space.scenario
        headroom = required_headroom(scenario, self.search.headroom)
        try:
            return simulate_layout(scenario, self.search.objective, LayoutCandidate(()), headroom)
        except ClusterSimError:
            return None

    def bound_all(self, pool: Executor, candidates: Sequence[LayoutCandidate]) -> None:
        """Compute the bounds that the store lacks; raise InputError if no candidate is left."""
        bounds, task = self.store.bounds, partial(bound_candidates, self.evaluation)
        tasks = (
            (None, partial(task, state_group))
            for state_group in state_groups(candidates)
            if state_group[0] not in bounds
        )
        for _, group_bounds in self._run_tasks(pool, lambda: next(tasks, None)):
            self.store.add_bounds(group_bounds)
            self.report_progress("bounding step times", len(bounds), len(candidates), None)
        candidate_bounds = [bounds[candidate] for candidate in candidates]
        for candidate_bound in (candidate for candidate in candidate_bounds if candidate.bound is None):
            count_pruned(self.pruned, candidate_bound.rejection)
        self.legal = [candidate for candidate in candidate_bounds if candidate.bound is not None]
        self.too_large_states = {
            bound.candidate: bound.states
            for bound in candidate_bounds
            if bound.bound is None and bound.states is not None
        }
        if not self.legal:
            raise InputError(self._empty_search_message())

    def simulate_by_bound(self, pool: Executor) -> None:
        """Simulate the layouts that leave the headroom; in jobs that have none, those that fit without it."""
        self._simulate_chains(pool)
        job_indices = {
            candidate.job_index for candidate, layout in self.store.layouts.items() if layout.leaves_headroom
        }
        self.relaxed_jobs = frozenset({bound.candidate.job_index for bound in self.legal} - job_indices)
        if self.relaxed_jobs:
            self._simulate_chains(pool)
        if not self.store.layouts:
            raise InputError(self._empty_search_message())

    def _simulate_chains(self, pool: Executor) -> None:
        """Simulate by ascending bound until none is below the threshold; several workers simulate a few too many."""
        searched = (bound for bound in self.legal if bound.states_leave_headroom or self._is_relaxed(bound.candidate))
        self.chains = recompute_chains(self.search.space, searched)
        queue = [(_bound_of(chain[0]), chain_index, 0) for chain_index, chain in enumerate(self.chains)]
        heapify(queue)
        for (chain_index, position), result in self._run_tasks(pool, lambda: self._next_task(queue)):
            candidate = self.chains[chain_index][position].candidate
            self.store.add_result(candidate, result)
            self._requeue(queue, chain_index, position)
            done = len(self.store.layouts.keys() | self.store.estimates.keys())
            self.report_progress("simulating layouts", done, done + self._remaining_count(queue), self._best_so_far())

    def _is_relaxed(self, candidate: LayoutCandidate) -> bool:
        """Whether the headroom is waived for a layout."""
        return candidate.job_index in self.relaxed_jobs

    def _is_short_of_memory(self, candidate: LayoutCandidate) -> bool:
        """Whether a layout was found not to fit, or not to leave the headroom where that is required."""
        use = self.store.short_of_memory.get(candidate)
        return use is not None and not (use.fits and self._is_relaxed(candidate))

    def _next_task(self, queue: BoundQueue) -> tuple[tuple[int, int], Callable[[], LayoutResult | MemoryUse]] | None:
        """The next layout that may be among the best and is not evaluated yet, as a task."""
        thresholds = self._thresholds()
        while queue:
            bound, chain_index, position = heappop(queue)
            candidate = self.chains[chain_index][position].candidate
            estimate = self.store.estimates.get(candidate)
            if candidate in self.store.layouts or self._is_short_of_memory(candidate):
                self._requeue(queue, chain_index, position)
            elif estimate is not None and bound < self._min_score(estimate):
                heappush(queue, (self._min_score(estimate), chain_index, position))
            elif bound <= thresholds[candidate.job_index]:
                task = partial(
                    evaluate_layout,
                    self.evaluation,
                    candidate,
                    in_full=estimate is not None,
                    needs_headroom=not self._is_relaxed(candidate),
                )
                return (chain_index, position), task
        return None

    def _requeue(self, queue: BoundQueue, chain_index: int, position: int) -> None:
        """Requeue an estimated layout for full simulation, or the next of the chain if this one does not fit."""
        chain = self.chains[chain_index]
        candidate = chain[position].candidate
        if self._is_short_of_memory(candidate) and position + 1 < len(chain):
            heappush(queue, (_bound_of(chain[position + 1]), chain_index, position + 1))
        elif candidate in self.store.estimates and candidate not in self.store.layouts:
            heappush(queue, (self._min_score(self.store.estimates[candidate]), chain_index, position))

    def test_sensitivity(self, pool: Executor) -> None:
        """Simulate the tied best layouts with perturbed conditions."""
        task = partial(perturbed_score, self.evaluation.packed, self.search.objective)
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
        return min(candidates.values(), key=_rank, default=None)

    def _best(self) -> LayoutResult | None:
        return min(self.store.layouts.values(), key=_rank, default=None)

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
                evaluated += _with_variants(candidate_bound.candidate, layout)
        for bound in self.legal:
            if not (bound.states_leave_headroom or self._is_relaxed(bound.candidate) or bound.states is None):
                count_pruned(pruned, f"{STATES_LEAVE_NO_HEADROOM}: {describe_use(bound.states)}")
        ranked = sorted(
            evaluated, key=lambda candidate_layout: (*_rank(candidate_layout[1]), candidate_layout[0].complexity_key)
        )
        marked = [
            (candidate, replace(layout, tied=_ties(layout, ranked[0][1], self.repeatability)))
            for candidate, layout in ranked
        ]
        return SearchResult(
            objective=self.search.objective.value,
            candidates=self.search.space.combination_count,
            pruned=dict(sorted(pruned.items(), key=lambda reason: (-reason[1].count, reason[0]))),
            bounded=tuple(sorted(bounded, key=lambda bounded_layout: (bounded_layout.bound, bounded_layout.overrides))),
            simulated=tuple(layout for _, layout in marked),
            top=self.search.top,
            preferred=self._preferred_index(marked),
            first_guess=self.initial_layout,
            wall_seconds=wall,
            complete=self.complete,
            sensitivity=self.changes,
            repeatability=self.repeatability,
            set_aside=(*self.search.space.set_aside, *(self._empty_jobs() if self.complete else ())),
            variant_count=max(len(job.outer_variants) for job in self.search.space.jobs),
        )

    def _empty_jobs(self) -> Iterator[SetAsideJob]:
        """The jobs of which no layout is left."""
        searched = {candidate.job_index for candidate in self.store.layouts}
        for job_index, job in enumerate(self.search.space.jobs):
            if job_index not in searched:
                name = f"{job.resolved.cluster.gpu_count:,} GPUs of {job.resolved.cluster.name}"
                reason = self._memory_shortage(job_index) or "no layout is legal"
                yield SetAsideJob(name, f"none of {job.combination_count:,} layouts is left: {reason}")

    def _memory_shortage(self, job_index: int | None = None) -> str:
        """What the legal layouts (of a job) lack, and which of them lacks least; empty if none is legal."""
        short_of_memory = {
            candidate: use
            for candidate, use in (*self.too_large_states.items(), *self.store.short_of_memory.items())
            if job_index in (None, candidate.job_index)
        }
        if not short_of_memory:
            return ""
        least, use = min(short_of_memory.items(), key=lambda item: item[1].needed / item[1].capacity)
        return (
            f"{len(short_of_memory):,} are legal, and none fits in memory; the one that needs least, "
            f"{describe_use(use)}, is {' '.join(least.overrides)}"
        )

    def _empty_search_message(self) -> str:
        """Why no layout is left: memory, if some are legal; else the rule that most violate."""
        candidates = self.search.space.combination_count
        if shortage := self._memory_shortage():
            return f"none of {candidates:,} layouts is left: {shortage}"
        if not self.pruned:
            return "no layout varies; name keys and values, as in --vary layout.tp=1,2,4"
        main_reason = max(self.pruned.values(), key=lambda pruned_layouts: pruned_layouts.count)
        return (
            f"none of {candidates:,} layouts is left; most, {main_reason.count:,}, are pruned by this: "
            f"{main_reason.example}"
        )

    def _preferred_index(self, ranked: Sequence[tuple[LayoutCandidate, LayoutResult]]) -> int:
        """Of those tied with the best the simplest, among the ones that fit most surely if a headroom is wanted."""
        tied = [(index, candidate, layout) for index, (candidate, layout) in enumerate(ranked) if layout.tied]
        surest = max((layout.fit_probability for _, _, layout in tied), default=0.0)
        wanted = 0.0 if self.search.headroom == 0.0 else surest - SURELY_BETTER
        sure = [(index, candidate) for index, candidate, layout in tied if layout.fit_probability >= wanted]
        return min(sure, key=lambda indexed: indexed[1].complexity_key, default=(0, None))[0]

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
            elif self._is_short_of_memory(candidate_bound.candidate):
                use = self.store.short_of_memory[candidate_bound.candidate]
                reason = LEAVES_NO_HEADROOM if use.fits else DOES_NOT_FIT
                yield candidate_bound, None, f"{reason}: {describe_use(use)}"
            else:
                yield candidate_bound, layout, ""
                has_fit = layout is not None

    def _evaluated_layout(self, candidate: LayoutCandidate, thresholds: Sequence[float]) -> LayoutResult | None:
        """A layout as simulated, or its estimate where that suffices to exclude it."""
        estimate = self.store.estimates.get(candidate)
        if estimate is not None and self._min_score(estimate) > thresholds[candidate.job_index]:
            return estimate
        return self.store.layouts.get(candidate, estimate)


def _with_variants(candidate: LayoutCandidate, layout: LayoutResult) -> list[tuple[LayoutCandidate, LayoutResult]]:
    """A layout, or it with each of the settings of local training."""
    variants = [(LayoutCandidate(variant.overrides, variant.job), variant) for variant in layout.variants]
    return variants or [(candidate, layout)]


def _bound_of(candidate_bound: CandidateBound) -> float:
    return 0.0 if candidate_bound.bound is None else candidate_bound.bound


def _rank(layout: LayoutResult) -> tuple[bool, float]:
    """Sort key, best first: layouts that do not leave the headroom come after those that do."""
    return not layout.leaves_headroom, layout.score


def _ties(layout: LayoutResult, best: LayoutResult, repeatability: float) -> bool:
    """Whether a layout is as good as the best, within the variation of equal runs."""
    return layout.leaves_headroom == best.leaves_headroom and layout.score <= best.score * (1.0 + repeatability)


def _ignore_progress(_label: str, _done: int, _total: int, _best: LayoutResult | None) -> None:
    """Ignore progress."""
