"""Which layouts of a space are the best? Those with the best bounds are simulated first, as long as bounds are better.

The best `top` of every job, and all that are tied with the best of all, are those of trying all: whatever is not
simulated is illegal, does not fit, or has a bound above the worst of them. A step of many microbatches is estimated
first, from shorter ones (`steady`), and simulated whole only where the estimate, less what it may be off, is not above
the worst of them.
Layouts that are as good as each other are in the order of how plain they are, so that nothing depends on who was done
first. What is found out is kept in a store as it comes, if there is one.
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
from clustersim.planning.layouts.candidate_bounds import Weighed, families, ladders, weigh
from clustersim.planning.layouts.derived_scenarios import drafts_of
from clustersim.planning.layouts.executors import Shared
from clustersim.planning.layouts.extrapolation import Extended, extended
from clustersim.planning.layouts.objective import Objective, objective_named
from clustersim.planning.layouts.search_space import Candidate, Space, add
from clustersim.planning.layouts.search_store import Store
from clustersim.planning.layouts.sensitivity import CHANGES, changed_score, changes_of
from clustersim.reliability import estimate
from clustersim.results.memory_check import fits_in_memory
from clustersim.results.search_result import Bounded, Change, Found, Layout, Pruned
from clustersim.results.simulation_result import SimulationResult
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from clustersim.uncertainty.model_file import load_uncertainty_model

Progress = Callable[[str, int, int, Layout | None], None]
"""Told what is done, how much of it, of how much, and the best layout so far."""
K = TypeVar("K")
T = TypeVar("T")
MEMORY: Final = "does not fit in memory"
NEEDLESS: Final = "less recomputation fits"
Queue = list[tuple[float, int, int]]
"""Bounds of ladders' next layouts, with the numbers of both."""


@dataclass(frozen=True, slots=True)
class Search:
    """How a space is searched. top: how many of the best are wanted of each job; workers: processes.

    store: a folder in which is kept what is found out, to go on from there; executor: to run on in place of processes
    of this machine; it must have this package; sensitivity: whether the best are simulated again with things changed.
    """

    space: Space
    top: int = 10
    objective: Objective = Objective.STEP_TIME
    workers: int = 1
    store: Path | None = None
    executor: Executor | None = None
    sensitivity: bool = True

    def __post_init__(self) -> None:
        for name, number in (("top", self.top), ("workers", self.workers)):
            if number < 1:
                raise InputError(f"{name}: {number} is too few; 1 is the fewest")

    def run(self, progress: Progress | None = None) -> Found:
        """Search; raise InputError where no layout is left, for a store of another search, and an unknown price.

        Ctrl-C ends it with what is known until then.
        """
        started = perf_counter()
        for job in self.space.jobs:
            self.objective.require(job.setup)
        aside: dict[str, Pruned] = {}
        with (
            Store.opened(self.store, self._told, self._files) as store,
            worker_pool(self.workers, self.executor) as pool,
        ):
            state = _State(self, store, aside, progress or _silent)
            try:
                state.weigh(pool, [*self.space.candidates(aside)])
                state.simulate(pool)
                if self.sensitivity:
                    state.change(pool)
            except KeyboardInterrupt:
                state.complete = False
            found = state.found(perf_counter() - started)
            if found.complete:
                store.write_table(found)
        return found

    @property
    def _files(self) -> list[Path]:
        """Those that the scenario and the clusters of jobs are read from."""
        clusters = (path for job in self.space.jobs for path in job.setup.cluster.files)
        return [*dict.fromkeys((*self.space.scenario.files, *clusters))]

    @property
    def _told(self) -> dict[str, Any]:
        """What tells the search from others."""
        jobs = [(job.overrides, dict(job.values), sorted(job.replicas or ())) for job in self.space.jobs]
        return {
            "scenario": self.space.scenario.to_mapping(),
            "objective": self.objective.value,
            "jobs": jobs,
            "named": sorted(self.space.named),
        }


def search(
    scenario: Scenario,
    *,
    fix: Mapping[str, object] | None = None,
    vary: Mapping[str, Iterable[object]] | None = None,
    objective: Objective | str = Objective.STEP_TIME,
    top: int = 10,
    workers: int = 1,
) -> Found:
    """The best layouts of a scenario's job on its cluster; see `Space.of` and `Search`.

    objective: as on the command line, such as "energy".
    """
    least = objective if isinstance(objective, Objective) else objective_named(objective)
    return Search(Space.of(scenario, fix, vary), top, least, workers).run()


@dataclass
class _State:
    """A search under way. ladders: layouts that are legal, of each of which the first that fits is wanted."""

    search: Search
    store: Store
    aside: dict[str, Pruned]
    tell: Progress
    complete: bool = True
    ladders: list[list[Weighed]] = field(default_factory=list)
    changes: tuple[Change, ...] = ()

    @cached_property
    def shared(self) -> Shared:
        return Shared.of(self.search.space.scenario)

    @cached_property
    def repeat(self) -> float:
        """The part by which two runs of the same step differ."""
        return load_uncertainty_model().repeat_deviation

    @cached_property
    def first(self) -> Layout | None:
        """The scenario as its file has it; None where it cannot be simulated."""
        try:
            return simulated(self.search.space.scenario, self.search.objective, Candidate(()))
        except ClusterSimError:
            return None

    def weigh(self, pool: Executor, candidates: Sequence[Candidate]) -> None:
        """Weigh all that the store does not know yet; raise InputError where none is left."""
        known, task = self.store.weighed, partial(weigh, self.shared, self.search.objective)
        fresh = ((None, partial(task, family)) for family in families(candidates) if family[0] not in known)
        for _, weighed in self._done(pool, lambda: next(fresh, None)):
            self.store.add_weighed(weighed)
            self.tell("weighing layouts", len(known), len(candidates), None)
        found = [known[candidate] for candidate in candidates]
        for item in (element for element in found if element.bound is None):
            add(self.aside, item.said)
        self.ladders = ladders(self.search.space, (entry for entry in found if entry.bound is not None))
        if not self.ladders:
            raise InputError(_none_left(self.search.space.size, self.aside))

    def simulate(self, pool: Executor) -> None:
        """Best bounds first, until none is below what is wanted; a few more run than are needed, on several workers."""
        queue = [(_bound(ladder[0]), number, 0) for number, ladder in enumerate(self.ladders)]
        heapify(queue)
        for (number, place), layout in self._done(pool, lambda: self._next(queue)):
            candidate = self.ladders[number][place].candidate
            self.store.add(candidate, layout)
            self._go_on(queue, number, place)
            done = len(self.store.layouts.keys() | self.store.estimates.keys())
            self.tell("simulating layouts", done, done + self._left(queue), self._best_so_far())
        if not self.store.layouts:
            raise InputError(_none_left(self.search.space.size, {MEMORY: Pruned(len(self.store.full), MEMORY)}))

    def _next(self, queue: Queue) -> tuple[tuple[int, int], Callable[[], Layout | None]] | None:
        """The next layout to try, if one may be among the best; what is known already is not tried again."""
        wanted = self._wanted()
        while queue:
            bound, number, place = heappop(queue)
            candidate = self.ladders[number][place].candidate
            estimate = self.store.estimates.get(candidate)
            if candidate in self.store.layouts or candidate in self.store.full:
                self._go_on(queue, number, place)
            elif estimate is not None and bound < self._least(estimate):
                heappush(queue, (self._least(estimate), number, place))
            elif bound <= wanted[candidate.job]:
                task = partial(_tried, self.shared, self.search.objective, candidate, whole=estimate is not None)
                return (number, place), task
        return None

    def _go_on(self, queue: Queue, number: int, place: int) -> None:
        """The same again where it was estimated; the next of a ladder, where this one does not fit."""
        ladder = self.ladders[number]
        candidate = ladder[place].candidate
        if candidate in self.store.full and place + 1 < len(ladder):
            heappush(queue, (_bound(ladder[place + 1]), number, place + 1))
        elif candidate in self.store.estimates and candidate not in self.store.layouts:
            heappush(queue, (self._least(self.store.estimates[candidate]), number, place))

    def change(self, pool: Executor) -> None:
        """Simulate the best of all with things changed that are nobody's choice."""
        task = partial(changed_score, self.shared, self.search.objective)
        rivals = [Candidate(rival.overrides, rival.job) for rival in self.found(0.0).rivals]
        scores: list[list[float | None]] = [[None] * len(rivals) for _ in CHANGES]
        places = [*product(range(len(CHANGES)), range(len(rivals)))]
        tasks = (((number, place), partial(task, rivals[place], number)) for number, place in places)
        for done, ((number, place), score) in enumerate(self._done(pool, lambda: next(tasks, None)), 1):
            scores[number][place] = score
            self.tell("changing what may be other", done, len(places), self._best())
        self.changes = changes_of(scores)

    def _done(self, pool: Executor, take: Callable[[], tuple[K, Callable[[], T]] | None]) -> Iterator[tuple[K, T]]:
        """What tasks make of it, with their keys, as they are done."""
        alone = self.search.workers == 1 and self.search.executor is None
        return iterate_completed(pool, 1 if alone else TASKS_PER_WORKER * self.search.workers, take)

    def _least(self, estimate: Layout) -> float:
        """The least score that an estimate leaves possible."""
        return estimate.score * (1.0 - self.search.objective.margin)

    def _left(self, queue: Queue) -> int:
        """How many may still be among the best."""
        wanted = self._wanted()
        return sum(bound <= wanted[self.ladders[number][place].candidate.job] for bound, number, place in queue)

    def _wanted(self) -> list[float]:
        """By job, the worst score of the best that are wanted, or that are as good as the best of all.

        Infinite while there are fewer than are wanted.
        """
        scores: list[list[float]] = [[] for _ in self.search.space.jobs]
        for candidate, layout in self.store.layouts.items():
            scores[candidate.job].append(layout.score)
        top, best = self.search.top, self._best()
        alike = 0.0 if best is None else best.score * (1.0 + self.repeat)
        return [max(alike, sorted(score)[top - 1]) if len(score) >= top else float("inf") for score in scores]

    def _best_so_far(self) -> Layout | None:
        """The best that is known, whole or estimated."""
        every = {**self.store.estimates, **self.store.layouts}
        return min(every.values(), key=lambda each: each.score, default=None)

    def _best(self) -> Layout | None:
        return min(self.store.layouts.values(), key=lambda each: each.score, default=None)

    def found(self, wall: Seconds) -> Found:
        """What is known; of a complete search the same whoever was done first."""
        aside, bounded, there, wanted = dict(self.aside), [], [], self._wanted()
        for weighed, layout, said in (seen for ladder in self.ladders for seen in self._seen(ladder, wanted)):
            if said:
                add(aside, said)
            elif layout is None:
                bounded.append(Bounded(weighed.candidate.overrides, weighed.candidate.job, _bound(weighed)))
            else:
                there.append((weighed.candidate, layout))
        ranked = sorted(there, key=lambda each: (each[1].score, each[0].plainness))
        alike = (ranked[0][1].score if ranked else 0.0) * (1.0 + self.repeat)
        marked = [(candidate, replace(layout, tied=layout.score <= alike)) for candidate, layout in ranked]
        tied = [place for place, (_, layout) in enumerate(marked) if layout.tied]
        return Found(
            objective=self.search.objective.value,
            candidates=self.search.space.size,
            pruned=dict(sorted(aside.items(), key=lambda reason: (-reason[1].count, reason[0]))),
            bounded=tuple(sorted(bounded, key=lambda each: (each.bound, each.overrides))),
            simulated=tuple(layout for _, layout in marked),
            top=self.search.top,
            preferred=min(tied, key=lambda place: marked[place][0].plainness, default=0),
            first=self.first,
            wall=wall,
            complete=self.complete,
            changes=self.changes,
            repeat=self.repeat,
        )

    def _seen(self, ladder: Sequence[Weighed], wanted: Sequence[float]) -> Iterator[tuple[Weighed, Layout | None, str]]:
        """What became of the layouts of a ladder: simulated, or set aside for what is said, or neither: bounded."""
        fits = False
        for weighed in ladder:
            layout = self._known(weighed.candidate, wanted)
            if fits:
                yield weighed, None, NEEDLESS
            elif _bound(weighed) > wanted[weighed.candidate.job]:
                yield weighed, None, ""
            elif weighed.candidate in self.store.full:
                yield weighed, None, MEMORY
            else:
                yield weighed, layout, ""
                fits = layout is not None

    def _known(self, candidate: Candidate, wanted: Sequence[float]) -> Layout | None:
        """A layout as it was simulated; as it was estimated, where that does to tell that it is not wanted."""
        estimate = self.store.estimates.get(candidate)
        if estimate is not None and self._least(estimate) > wanted[candidate.job]:
            return estimate
        return self.store.layouts.get(candidate, estimate)


def _bound(each: Weighed) -> float:
    return 0.0 if each.bound is None else each.bound


def _none_left(candidates: int, aside: Mapping[str, Pruned]) -> str:
    if not aside:
        return "no layout varies; name keys and values, as in --vary layout.tp=1,2,4"
    most = max(aside.values(), key=lambda each: each.count)
    return f"none of {candidates:,} layouts is left; most, {most.count:,}, are set aside for this: {most.example}"


def _tried(shared: Shared, objective: Objective, candidate: Candidate, *, whole: bool) -> Layout | None:
    """A layout, simulated, whole or estimated from less; None where it does not fit."""
    if not fits_in_memory(drafts_of(shared).setup(candidate.overrides)):
        return None
    scenario = shared().with_overrides(candidate.overrides)
    estimate = extended(scenario) if not whole and objective.near(scenario) else None
    return simulated(scenario, objective, candidate) if estimate is None else _layout(estimate, objective, candidate)


def simulated(scenario: Scenario, objective: Objective, candidate: Candidate) -> Layout:
    """A simulated layout."""
    return _layout(simulate(scenario), objective, candidate)


def _layout(result: SimulationResult | Extended, objective: Objective, candidate: Candidate) -> Layout:
    """What a search keeps of a step."""
    run = estimate(result.scenario, result.step_time) if objective.of_run else None
    economics = result.economics
    price = economics.price_per_gpu_hour
    return Layout(
        overrides=candidate.overrides,
        job=candidate.job,
        gpus=result.rank_count,
        cluster=result.scenario.cluster.name,
        score=objective.score(result) if run is None else objective.score_of_run(result, run),
        step_time=result.step_time,
        band=result.step_time_interval,
        tokens_per_gpu=result.tokens_per_second / result.rank_count,
        mfu=result.mfu(),
        peak_memory=result.peak_memory,
        memory=result.memory_capacity,
        cost=economics.cost_per_trillion_tokens,
        currency="" if price is None else price.currency,
        energy=economics.energy_per_trillion_tokens,
        breakdown={part: seconds for part, seconds in result.breakdown.mean().items() if seconds > 0.0},
        run=None if run is None else asdict(run),
        extended=isinstance(result, Extended),
    )


def _silent(_what: str, _done: int, _of: int, _best: Layout | None) -> None:
    """Nobody is told."""
