"""How are many Monte Carlo runs computed? On worker processes, reproducibly, and stored as they come."""

import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Final

from clustersim.common.gc_control import gc_disabled
from clustersim.common.processes import TASKS_PER_WORKER, iterate_completed
from clustersim.hardware.failures import FailureSlowdown
from clustersim.reliability.failure_events import generate_failures
from clustersim.reliability.job_simulation import HEALTHY, JobParameters, JobSimulation
from clustersim.results.goodput import TimelineInterval, TrainingRun

StateKey = tuple[int, FailureSlowdown | None]
StateSimulator = Callable[[int, FailureSlowdown | None], tuple[str, float]]
_DRAW_WINDOW_RATIO: Final = 1.15  # window for which failures are drawn at a time, relative to the work


class _UnknownState(Exception):  # noqa: N818 - control flow, not an error
    """A run reached a cluster state that is not simulated yet."""


@dataclass(frozen=True, slots=True)
class SimulatedStates:
    """The job's rates in the cluster states simulated so far."""

    rates: tuple[tuple[StateKey, tuple[str, float]], ...] = ()

    def __call__(self, missing: int, slowdown: FailureSlowdown | None) -> tuple[str, float]:
        """The name of a state and work per second in it."""
        if not missing and slowdown is None:
            return HEALTHY, 1.0
        rate = _rate_by_state(self).get((missing, slowdown))
        if rate is None:
            raise _UnknownState
        return rate


@lru_cache(maxsize=8)
def _rate_by_state(states: SimulatedStates) -> dict[StateKey, tuple[str, float]]:
    return dict(states.rates)


@dataclass
class MonteCarloRuns:
    """Computes Monte Carlo runs. simulate_state: gives a state's rate, called once for each state that occurs."""

    pool: Executor
    workers: int
    simulate_state: StateSimulator
    seed: int

    def __post_init__(self) -> None:
        self._rates: dict[StateKey, tuple[str, float]] = {}

    def simulate_runs(
        self,
        parameters: JobParameters,
        run_indices: Sequence[int],
        on_run_done: Callable[[TrainingRun], None] | None = None,
    ) -> list[TrainingRun]:
        """Simulate runs by their indices, in that order; on_run_done is called with each as it completes."""
        runs: dict[int, TrainingRun] = {}
        pending = list(reversed(run_indices))
        packed = [self._pickle_parameters(parameters)]

        def next_task() -> tuple[int, Callable[[], TrainingRun | StateKey]] | None:
            if not pending:
                return None
            run_index = pending.pop()
            return run_index, partial(_simulate_run, packed[0], self.seed, run_index)

        for run_index, run in iterate_completed(
            self.pool, 1 if self.workers == 1 else TASKS_PER_WORKER * self.workers, next_task
        ):
            if isinstance(run, TrainingRun):
                runs[run_index] = run
                if on_run_done is not None:
                    on_run_done(run)
                continue
            self._state_rate(*run)
            packed[0] = self._pickle_parameters(parameters)
            pending.append(run_index)
        return [runs[run_index] for run_index in run_indices]

    def timeline(self, parameters: JobParameters, run_index: int) -> list[TimelineInterval]:
        """How a run spends its time, segment by segment."""
        timeline: list[TimelineInterval] = []
        _build_job(replace(parameters, state_rate=self._state_rate), self.seed, run_index, timeline).run()
        return timeline

    def _state_rate(self, missing: int, slowdown: FailureSlowdown | None) -> tuple[str, float]:
        """The rate in a state, simulated on first use."""
        if (missing, slowdown) not in self._rates:
            self._rates[missing, slowdown] = self.simulate_state(missing, slowdown)
        return self._rates[missing, slowdown]

    @property
    def _simulated_states(self) -> SimulatedStates:
        return SimulatedStates(tuple(self._rates.items()))

    def _pickle_parameters(self, parameters: JobParameters) -> bytes:
        reliability = replace(
            parameters.reliability, sources={}
        )  # not needed by runs, and would be pickled with every task
        return pickle.dumps(replace(parameters, reliability=reliability, state_rate=self._simulated_states))


def run_to_dict(run: TrainingRun) -> dict[str, object]:
    """A run as a JSON-compatible dict."""
    return asdict(run)


@lru_cache(maxsize=4)
def _unpickle_parameters(packed: bytes) -> JobParameters:
    parameters: JobParameters = pickle.loads(packed)
    return parameters


def _simulate_run(packed: bytes, seed: int, run_index: int) -> TrainingRun | StateKey:
    """A run; or the state whose rate it needs."""
    parameters = _unpickle_parameters(packed)
    requested: list[StateKey] = []

    def state_rate(missing: int, slowdown: FailureSlowdown | None) -> tuple[str, float]:
        requested[:] = [(missing, slowdown)]
        return parameters.state_rate(missing, slowdown)

    try:
        with gc_disabled():
            return _build_job(replace(parameters, state_rate=state_rate), seed, run_index).run(run_index)
    except _UnknownState:
        return requested[0]


def _build_job(
    parameters: JobParameters, seed: int, run_index: int, timeline: list[TimelineInterval] | None = None
) -> JobSimulation:
    events = generate_failures(
        parameters.reliability, parameters.domains, seed, run_index, _DRAW_WINDOW_RATIO * parameters.work
    )
    return JobSimulation(parameters, events, timeline)
