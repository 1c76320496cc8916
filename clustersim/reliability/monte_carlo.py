"""How are many runs made? Each on some process of this machine, the same whichever does it, and kept as it comes."""

import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Final

from clustersim.common.gc_control import gc_disabled
from clustersim.common.processes import TASKS_PER_WORKER, iterate_completed
from clustersim.hardware.failures import FailureSlowdown
from clustersim.reliability.failure_events import events_of
from clustersim.reliability.job_simulation import HEALTHY, Job, Terms
from clustersim.results.goodput import Piece, Run

State = tuple[int, FailureSlowdown | None]
Simulate = Callable[[int, FailureSlowdown | None], tuple[str, float]]
_WINDOW: Final = 1.15  # of the work: for how long failures are drawn at a time


class _UnknownState(Exception):  # noqa: N818 - not a mistake, but a question
    """A run came to a state of the cluster that was not simulated yet."""


@dataclass(frozen=True, slots=True)
class Known:
    """How fast the job is in states of its cluster that were simulated."""

    paces: tuple[tuple[State, tuple[str, float]], ...] = ()

    def __call__(self, missing: int, slower: FailureSlowdown | None) -> tuple[str, float]:
        """The name of a state and work per second in it."""
        if not missing and slower is None:
            return HEALTHY, 1.0
        found = _by_state(self).get((missing, slower))
        if found is None:
            raise _UnknownState
        return found


@lru_cache(maxsize=8)
def _by_state(known: Known) -> dict[State, tuple[str, float]]:
    return dict(known.paces)


@dataclass
class Runs:
    """Makes runs. simulate: the pace in a state, asked for once for each that occurs; most: tasks at a time."""

    pool: Executor
    workers: int
    simulate: Simulate
    seed: int

    def __post_init__(self) -> None:
        self._paces: dict[State, tuple[str, float]] = {}

    def of(self, terms: Terms, numbers: Sequence[int], done: Callable[[Run], None] | None = None) -> list[Run]:
        """Runs by their numbers, in that order; done: told of each as it is there."""
        found: dict[int, Run] = {}
        waiting = list(reversed(numbers))
        packed = [self._packed(terms)]

        def take() -> tuple[int, Callable[[], Run | State]] | None:
            if not waiting:
                return None
            number = waiting.pop()
            return number, partial(_run, packed[0], self.seed, number)

        for number, run in iterate_completed(
            self.pool, 1 if self.workers == 1 else TASKS_PER_WORKER * self.workers, take
        ):
            if isinstance(run, Run):
                found[number] = run
                if done is not None:
                    done(run)
                continue
            self._pace(*run)
            packed[0] = self._packed(terms)
            waiting.append(number)
        return [found[number] for number in numbers]

    def timeline(self, terms: Terms, number: int) -> list[Piece]:
        """What a run that was made spent its time on."""
        record: list[Piece] = []
        _job(replace(terms, pace=self._pace), self.seed, number, record).run()
        return record

    def _pace(self, missing: int, slower: FailureSlowdown | None) -> tuple[str, float]:
        """The pace in a state, simulated if it was not yet."""
        if (missing, slower) not in self._paces:
            self._paces[missing, slower] = self.simulate(missing, slower)
        return self._paces[missing, slower]

    @property
    def _known(self) -> Known:
        return Known(tuple(self._paces.items()))

    def _packed(self, terms: Terms) -> bytes:
        said = replace(terms.reliability, sources={})  # which no run needs, and every task would carry
        return pickle.dumps(replace(terms, reliability=said, pace=self._known))


def plain(run: Run) -> dict[str, object]:
    """A run as plain data."""
    return asdict(run)


@lru_cache(maxsize=4)
def _unpacked(packed: bytes) -> Terms:
    terms: Terms = pickle.loads(packed)
    return terms


def _run(packed: bytes, seed: int, number: int) -> Run | State:
    """A run; or the state whose pace it needs to know."""
    terms = _unpacked(packed)
    asked: list[State] = []

    def pace(missing: int, slower: FailureSlowdown | None) -> tuple[str, float]:
        asked[:] = [(missing, slower)]
        return terms.pace(missing, slower)

    try:
        with gc_disabled():
            return _job(replace(terms, pace=pace), seed, number).run(number)
    except _UnknownState:
        return asked[0]


def _job(terms: Terms, seed: int, number: int, record: list[Piece] | None = None) -> Job:
    events = events_of(terms.reliability, terms.site, seed, number, _WINDOW * terms.work)
    return Job(terms, events, record)
