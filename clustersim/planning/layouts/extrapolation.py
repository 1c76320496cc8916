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
`MAX_OVERESTIMATE` bounds by how much the estimate is too long (tests/planning/layouts/test_steady.py). It may be too short by a few
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
from clustersim.results.economics import Economics, GpuGroup
from clustersim.results.memory_check import max_memory_utilization
from clustersim.results.provenance import busy_time_items
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.time_breakdown import TimeBreakdown, compute_breakdown
from clustersim.results.trace_table import TimeWindow
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

_PERIODIC_SCHEDULES: Final = (OneFOneB, Interleaved, Overlapped1F1B, ZeroBubbleV, DualPipeV, DualPipe)
"""Schedules in which forwards and backwards alternate, in a pattern that each microbatch repeats."""
MAX_OVERESTIMATE: Final = 5e-3
"""The part of a step by which it may be too long; 1.1e-3 was the most of 950 random layouts."""
_MICROBATCHES_PER_RANK: Final = 3
_EXTRA_MICROBATCHES: Final = 2
_MIN_MICROBATCHES: Final = 12
"""Microbatches that are simulated: for each pipeline rank, beside those, and in all at least."""
_MIN_REDUCTION: Final = 3
"""How many times as many it takes to be worth it: one that is simulated whole after all costs a third more."""
MIN_LAYER_PASSES: Final = 2000
"""How often a microbatch passes a layer in a step, from which on its events count more than what is done once."""


@dataclass(frozen=True)
class ExtrapolatedStep:
    """A step of `scenario`, from a shorter one, which goes on in between as it would so many `times` more.

    seconds: that it takes for it each time; span: when it does so.
    """

    scenario: Scenario
    short_result: SimulationResult
    repeat_count: float
    period_seconds: Seconds
    period_span: TimeWindow

    @property
    def rank_count(self) -> int:
        """World size."""
        return self.short_result.rank_count

    @property
    def step_time(self) -> Seconds:
        """Seconds of the step."""
        return self.short_result.step_time + self.repeat_count * self.period_seconds

    @cached_property
    def breakdown(self) -> TimeBreakdown:
        """Where every second of each rank's step goes."""
        base = self.short_result.breakdown
        return replace(base, seconds=base.seconds + self.repeat_count * self._period_breakdown.seconds)

    @cached_property
    def _period_breakdown(self) -> TimeBreakdown:
        """Where what is repeated goes."""
        period, (begin, end) = (
            compute_breakdown(self.short_result.trace_table, self.short_result.cost.time_segment, self.period_span),
            self.period_span,
        )
        return replace(period, seconds=period.seconds * (self.period_seconds / (end - begin)))

    @property
    def step_time_interval(self) -> tuple[Seconds, Seconds]:
        """Between what and what the step time is expected, as that of the shorter one is."""
        expected = self.short_result.relative_interval
        return self.step_time * expected.low, self.step_time * expected.high

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the whole batch per second."""
        training = self.scenario.training
        return tokens_per_second(training.global_batch, training.sequence, self.step_time)

    def mfu(self) -> float:
        """Model FLOP utilization: FLOP for a token are those of the shorter one."""
        return self.short_result.mfu() * self.tokens_per_second / self.short_result.tokens_per_second

    @cached_property
    def economics(self) -> Economics:
        """What the step costs and what energy it takes."""
        short_result, training = self.short_result, self.scenario.training
        tokens = float(training.global_batch * training.sequence)
        busy_items = busy_time_items(
            short_result.trace_table,
            short_result.cost.time_segment,
            short_result.cost.comm_timing_by_group,
            self.period_span,
        )
        gpus = map(
            self._extrapolate_gpus,
            short_result.economics.gpu_groups,
            short_result.gpu_groups(self._period_breakdown, busy_items),
        )
        return replace(short_result.economics, gpu_groups=tuple(gpus), step_time=self.step_time, tokens=tokens)

    def _extrapolate_gpus(self, base: GpuGroup, period: GpuGroup) -> GpuGroup:
        return replace(
            base,
            activity_seconds={
                gpu_activity: base.activity_seconds[gpu_activity]
                + self.repeat_count * period.activity_seconds[gpu_activity]
                for gpu_activity in base.activity_seconds
            },
        )

    @cached_property
    def _peak_and_capacity(self) -> tuple[Bytes, Bytes]:
        return max_memory_utilization(self.scenario)

    @property
    def peak_memory(self) -> Bytes:
        """Bytes that the fullest GPU needs."""
        return self._peak_and_capacity[0]

    @property
    def memory_capacity(self) -> Bytes:
        """Bytes that the fullest GPU has."""
        return self._peak_and_capacity[1]


def extrapolate_step(scenario: Scenario) -> ExtrapolatedStep | None:
    """A step from one of fewer microbatches; None where that is not known to be near, or hardly less work."""
    microbatches, ranks = scenario.microbatch_count, scenario.layout.pp
    short_count = _short_microbatch_count(scenario)
    if (
        microbatches < _MIN_REDUCTION * short_count
        or microbatches * scenario.model.layer_count < MIN_LAYER_PASSES
        or not _is_periodic(scenario)
    ):
        return None
    short_result = simulate(with_microbatch_count(scenario, short_count))
    return ExtrapolatedStep(
        scenario, short_result, (microbatches - short_count) / ranks, *_steady_period(short_result, ranks)
    )


def _short_microbatch_count(scenario: Scenario) -> int:
    """How many microbatches to simulate, in whole rounds of all ranks where the schedule wants them so."""
    ranks = scenario.layout.pp
    minimum = max(_MICROBATCHES_PER_RANK * ranks + _EXTRA_MICROBATCHES, _MIN_MICROBATCHES)
    return ceil(minimum / ranks) * ranks if _is_interleaved(scenario) else minimum


def _steady_period(short_result: SimulationResult, microbatches: int) -> tuple[Seconds, TimeWindow]:
    """What so many microbatches take of a step that goes on steadily; and from when to when the first stage does so."""
    trace, last = short_result.trace, short_result.scenario.microbatch_count - 1
    periods, spans = list[tuple[int, Seconds]](), dict[int, TimeWindow]()
    for rank in trace.simulated_ranks.tolist():
        first_tasks, events = _first_tasks(short_result, rank), trace.rank_events(rank)
        start = dict(zip(trace.task[events].tolist(), trace.start[events].tolist(), strict=True))
        warmup_forwards = sum(1 for _ in takewhile(lambda action: action.kind is FORWARD, first_tasks))
        for action, task in first_tasks.items():
            if action.kind is FORWARD and action.microbatch == last:
                begin, end = start[first_tasks[action._replace(microbatch=last - microbatches)]], start[task]
                periods.append((-warmup_forwards, end - begin))
                spans.setdefault(action.stage, (begin, end))
    return max(periods)[-1], spans[0]


def _first_tasks(short_result: SimulationResult, rank: int) -> dict[Action, int]:
    """Passes of a rank, each with the first of its tasks."""
    tasks = short_result.program.programs[int(short_result.program.program_index[rank])].tasks
    first: dict[Action, int] = {}
    for task_id, task in enumerate(tasks):
        if isinstance(task, ComputeTask) and task.action is not None:
            first.setdefault(task.action, task_id)
    return first


def _is_periodic(scenario: Scenario) -> bool:
    """Whether each microbatch does what the one before did."""
    varies = scenario.jitter is not None or scenario.training.expert_load is not None
    has_transients = bool(
        scenario.has_background_load or scenario.degradations.temporary_links
    )  # which are there for a part of the step
    has_partial_round = (
        _is_interleaved(scenario) and scenario.microbatch_count % scenario.layout.pp
    )  # then rounds are longer
    has_periodic_schedule = isinstance(scenario.effective_schedule, _PERIODIC_SCHEDULES) and not has_partial_round
    return has_periodic_schedule and not (varies or has_transients) and scenario.steps == 1


def _is_interleaved(scenario: Scenario) -> bool:
    """Whether microbatches go round all ranks, then through the next chunk of each."""
    schedule = scenario.effective_schedule
    return isinstance(schedule.base if isinstance(schedule, Overlapped1F1B) else schedule, Interleaved)
