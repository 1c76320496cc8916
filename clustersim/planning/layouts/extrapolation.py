"""What does a step of many microbatches take, from one of fewer?

A pipeline fills, goes on in the same way microbatch after microbatch, and drains. So seconds of a step, and of each of
its parts, grow by the same for each microbatch more: by what one takes in between. With p pipeline ranks

    t(m) = t(n) + (m - n) s / p,    n = 3p + 2

where s lies between the beginnings of the last microbatch's forward and of the one p before it, on a rank that runs
fewest of them before its first backward: it is the first to go on in the way in which all do. Seconds of parts are
those between these beginnings on the first stage, which is the first to be done with its forwards: until then nothing
drains. Of 240 microbatches on 16 ranks 50 are simulated: a fifth of the work.

Where communication beside computation slows it, what begins beside what drifts from microbatch to microbatch, and the
shorter step is not quite as steady as the long one: 1e-3 of the step is the most among DeepSeek-V3's best layouts, and
`NEAR` bounds by how much the estimate is too long (tests/planning/layouts/test_steady.py). It may be too short by a few
percent where a rank that is hardly busier than others falls behind slowly. So it tells which layouts cannot be among
the best, no more: those that may be are simulated whole.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from math import ceil
from typing import Final

from clustersim.common.units import Bytes, Seconds
from clustersim.program.action import FORWARD, Action
from clustersim.program.task import ComputeTask
from clustersim.results.economics import Economics, Gpus
from clustersim.results.memory_check import max_memory_utilization
from clustersim.results.provenance import items
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.time_breakdown import Breakdown, breakdown
from clustersim.results.trace_table import Span
from clustersim.results.utilization import tokens_per_second
from clustersim.scenario import Scenario
from clustersim.scenario.changes.training import with_microbatch_count
from clustersim.schedules.dual_pipe import DualPipe
from clustersim.schedules.dual_pipe_v import DualPipeV
from clustersim.schedules.interleaved import Interleaved
from clustersim.schedules.one_f_one_b import OneFOneB
from clustersim.schedules.overlapped_1f1b import Overlapped1F1B
from clustersim.schedules.zero_bubble_v import ZeroBubbleV
from clustersim.simulation import simulate

_STEADY: Final = (OneFOneB, Interleaved, Overlapped1F1B, ZeroBubbleV, DualPipeV, DualPipe)
"""Schedules in which forwards and backwards alternate, in a pattern that each microbatch repeats."""
NEAR: Final = 5e-3
"""The part of a step by which it may be too long; 1.1e-3 was the most of 950 random layouts."""
_ROUNDS: Final = 3
_MORE: Final = 2
_FEWEST: Final = 12
"""Microbatches that are simulated: for each pipeline rank, beside those, and in all at least."""
_WORTH: Final = 3
"""How many times as many it takes to be worth it: one that is simulated whole after all costs a third more."""
LEAST_LAYERS: Final = 2000
"""How often a microbatch passes a layer in a step, from which on its events count more than what is done once."""


@dataclass(frozen=True)
class Extended:
    """A step of `scenario`, from a shorter one, which goes on in between as it would so many `times` more.

    seconds: that it takes for it each time; span: when it does so.
    """

    scenario: Scenario
    short: SimulationResult
    times: float
    seconds: Seconds
    span: Span

    @property
    def rank_count(self) -> int:
        """World size."""
        return self.short.rank_count

    @property
    def step_time(self) -> Seconds:
        """Seconds of the step."""
        return self.short.step_time + self.times * self.seconds

    @cached_property
    def breakdown(self) -> Breakdown:
        """Where every second of each rank's step goes."""
        own = self.short.breakdown
        return replace(own, seconds=own.seconds + self.times * self._between.seconds)

    @cached_property
    def _between(self) -> Breakdown:
        """Where what is repeated goes."""
        found, (since, until) = breakdown(self.short.trace_table, self.short.cost.time_segment, self.span), self.span
        return replace(found, seconds=found.seconds * (self.seconds / (until - since)))

    @property
    def step_time_interval(self) -> tuple[Seconds, Seconds]:
        """Between what and what the step time is expected, as that of the shorter one is."""
        expected = self.short.relative_interval
        return self.step_time * expected.low, self.step_time * expected.high

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the whole batch per second."""
        training = self.scenario.training
        return tokens_per_second(training.global_batch, training.sequence, self.step_time)

    def mfu(self) -> float:
        """Model FLOP utilization: FLOP for a token are those of the shorter one."""
        return self.short.mfu() * self.tokens_per_second / self.short.tokens_per_second

    @cached_property
    def economics(self) -> Economics:
        """What the step costs and what energy it takes."""
        short, training = self.short, self.scenario.training
        tokens = float(training.global_batch * training.sequence)
        every = items(short.trace_table, short.cost.time_segment, short.cost.comm_timing_by_group, self.span)
        gpus = map(self._gpus, short.economics.gpus, short.gpu_groups(self._between, every))
        return replace(short.economics, gpus=tuple(gpus), step_time=self.step_time, tokens=tokens)

    def _gpus(self, own: Gpus, more: Gpus) -> Gpus:
        return replace(
            own,
            seconds={
                gpu_activity: own.seconds[gpu_activity] + self.times * more.seconds[gpu_activity]
                for gpu_activity in own.seconds
            },
        )

    @cached_property
    def _memory(self) -> tuple[Bytes, Bytes]:
        return max_memory_utilization(self.scenario)

    @property
    def peak_memory(self) -> Bytes:
        """Bytes that the fullest GPU needs."""
        return self._memory[0]

    @property
    def memory_capacity(self) -> Bytes:
        """Bytes that the fullest GPU has."""
        return self._memory[1]


def extended(scenario: Scenario) -> Extended | None:
    """A step from one of fewer microbatches; None where that is not known to be near, or hardly less work."""
    many, ranks = scenario.microbatch_count, scenario.layout.pp
    few = _fewer(scenario)
    if many < _WORTH * few or many * scenario.model.layer_count < LEAST_LAYERS or not _is_steady(scenario):
        return None
    short = simulate(with_microbatch_count(scenario, few))
    return Extended(scenario, short, (many - few) / ranks, *_round(short, ranks))


def _fewer(scenario: Scenario) -> int:
    """How many microbatches to simulate, in whole rounds of all ranks where the schedule wants them so."""
    ranks = scenario.layout.pp
    least = max(_ROUNDS * ranks + _MORE, _FEWEST)
    return ceil(least / ranks) * ranks if _in_rounds(scenario) else least


def _round(short: SimulationResult, many: int) -> tuple[Seconds, Span]:
    """What so many microbatches take of a step that goes on steadily; and from when to when the first stage does so."""
    trace, last = short.trace, short.scenario.microbatch_count - 1
    found, spans = list[tuple[int, Seconds]](), dict[int, Span]()
    for rank in trace.simulated_ranks.tolist():
        first, own = _first_tasks(short, rank), trace.rank_events(rank)
        start = dict(zip(trace.task[own].tolist(), trace.start[own].tolist(), strict=True))
        ahead = sum(1 for _ in takewhile(lambda action: action.kind is FORWARD, first))
        for action, task in first.items():
            if action.kind is FORWARD and action.microbatch == last:
                since, until = start[first[action._replace(microbatch=last - many)]], start[task]
                found.append((-ahead, until - since))
                spans.setdefault(action.stage, (since, until))
    return max(found)[-1], spans[0]


def _first_tasks(short: SimulationResult, rank: int) -> dict[Action, int]:
    """Passes of a rank, each with the first of its tasks."""
    tasks = short.program.programs[int(short.program.program_index[rank])].tasks
    first: dict[Action, int] = {}
    for number, task in enumerate(tasks):
        if isinstance(task, ComputeTask) and task.action is not None:
            first.setdefault(task.action, number)
    return first


def _is_steady(scenario: Scenario) -> bool:
    """Whether each microbatch does what the one before did."""
    varies = scenario.jitter is not None or scenario.training.expert_load is not None
    passing = bool(
        scenario.has_background_load or scenario.degradations.temporary_links
    )  # which are there for a part of the step
    left = _in_rounds(scenario) and scenario.microbatch_count % scenario.layout.pp  # then rounds are longer
    known = isinstance(scenario.effective_schedule, _STEADY) and not left
    return known and not (varies or passing) and scenario.steps == 1


def _in_rounds(scenario: Scenario) -> bool:
    """Whether microbatches go round all ranks, then through the next chunk of each."""
    schedule = scenario.effective_schedule
    return isinstance(schedule.base if isinstance(schedule, Overlapped1F1B) else schedule, Interleaved)
