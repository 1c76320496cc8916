"""What does a step of many microbatches take, extrapolated from one of fewer?

A pipeline fills, repeats the same pattern microbatch after microbatch, and drains. So the step time, and
the time in each category, grow linearly with the number of microbatches. With p pipeline ranks

    t(m) = t(n) + (m - n) s / p,    n = 3p + 2

where s is the time between the starts of the last microbatch's forward and of the one p before it, on a
rank that runs the fewest forwards before its first backward: it is the first to reach the steady pattern.
Category times are those between these starts on the first stage, which finishes its forwards first: nothing
drains until then. Of 240 microbatches on 16 ranks 50 are simulated: a fifth of the work.

Where overlapping communication slows computation, what overlaps drifts from microbatch to microbatch, and
the shorter step is not quite as steady as the long one: at most 1e-3 of the step among DeepSeek-V3's best
layouts. `MAX_OVERESTIMATE` bounds by how much the estimate is too long
(tests/planning/layouts/test_extrapolation.py). It may be too short by a few percent where a rank that is hardly
busier than others falls behind slowly. So estimates only exclude layouts from the best; those that may be
among the best are simulated in full.
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
from clustersim.results.gpu_groups import gpu_groups
from clustersim.results.memory_check import max_host_use, max_memory_utilization, memory_fit_probability
from clustersim.results.provenance import busy_time_items
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.time_breakdown import TimeBreakdown, compute_breakdown
from clustersim.results.trace_table import TimeWindow
from clustersim.results.utilization import tokens_per_second
from clustersim.scenario import Scenario
from clustersim.scenario.changes.training import with_microbatch_count
from clustersim.simulation import simulate

MAX_OVERESTIMATE: Final = 5e-3
"""Relative error by which the estimate may be too long; the maximum over 950 random layouts was 1.1e-3."""
_MICROBATCHES_PER_RANK: Final = 3
_EXTRA_MICROBATCHES: Final = 2
_MIN_MICROBATCHES: Final = 12
"""Simulated microbatches: per pipeline rank, in addition to those, and the minimum in total."""
_MIN_REDUCTION: Final = 3
"""Minimum ratio of microbatches to simulated ones; simulating in full after all costs a third more."""
MIN_LAYER_PASSES: Final = 2000
"""Minimum microbatches x layers of a step for which simulating its events dominates the fixed cost."""


@dataclass(frozen=True)
class ExtrapolatedStep:
    """A step of `scenario`, extrapolated from a shorter one by `repeat_count` more steady periods.

    period_seconds: duration of a period; period_span: its (begin, end) in the shorter step.
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
        """Time by category of each rank's step."""
        base = self.short_result.breakdown
        return replace(base, seconds=base.seconds + self.repeat_count * self._period_breakdown.seconds)

    @cached_property
    def _period_breakdown(self) -> TimeBreakdown:
        """Time by category of one period."""
        period, (begin, end) = (
            compute_breakdown(self.short_result.trace_table, self.short_result.cost.time_segment, self.period_span),
            self.period_span,
        )
        return replace(period, seconds=period.seconds * (self.period_seconds / (end - begin)))

    @property
    def step_time_interval(self) -> tuple[Seconds, Seconds]:
        """The prediction interval of the step time, relative to the shorter step's."""
        expected = self.short_result.relative_interval
        return self.step_time * expected.low, self.step_time * expected.high

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the global batch per second."""
        training = self.scenario.training
        return tokens_per_second(training.global_batch, training.sequence, self.step_time)

    @property
    def mfu(self) -> float:
        """Model FLOP utilization: FLOP per token are those of the shorter step."""
        return self.short_result.mfu * self._speed_ratio

    @property
    def mfu_causal(self) -> float:
        """Model FLOP utilization with attention counted as its causal mask leaves it."""
        return self.short_result.mfu_causal * self._speed_ratio

    @property
    def _speed_ratio(self) -> float:
        """Tokens per second over those of the short result."""
        return self.tokens_per_second / self.short_result.tokens_per_second

    @cached_property
    def economics(self) -> Economics:
        """Cost and energy of the step."""
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
            gpu_groups(self.scenario, self._period_breakdown, busy_items),
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
    def fit_probability(self) -> float:
        """Probability that the step fits in memory, by the errors of published predictions."""
        return memory_fit_probability(self.scenario, *self._peak_and_capacity, max_host_use(self.scenario))

    @property
    def peak_memory(self) -> Bytes:
        """Bytes needed on the GPU with the highest memory utilization."""
        return self._peak_and_capacity[0]

    @property
    def memory_capacity(self) -> Bytes:
        """Capacity in bytes of the GPU with the highest memory utilization."""
        return self._peak_and_capacity[1]


def extrapolate_step(scenario: Scenario) -> ExtrapolatedStep | None:
    """Extrapolate a step from fewer microbatches; None if that is not accurate, or saves little."""
    microbatches, period = scenario.microbatch_count, _period_microbatches(scenario)
    short_count = _short_microbatch_count(scenario)
    if (
        microbatches < _MIN_REDUCTION * short_count
        or microbatches * scenario.model.layer_count < MIN_LAYER_PASSES
        or not _is_periodic(scenario)
    ):
        return None
    short_result = simulate(with_microbatch_count(scenario, short_count))
    return ExtrapolatedStep(
        scenario, short_result, (microbatches - short_count) / period, *_steady_period(short_result, period)
    )


def _short_microbatch_count(scenario: Scenario) -> int:
    """Number of microbatches to simulate, a multiple of its rounds where the schedule has some."""
    ranks = scenario.layout.pp
    minimum = max(_MICROBATCHES_PER_RANK * ranks + _EXTRA_MICROBATCHES, _MIN_MICROBATCHES)
    period = _period_microbatches(scenario)
    return ceil(minimum / period) * period if scenario.effective_schedule.round_size(ranks) > 1 else minimum


def _period_microbatches(scenario: Scenario) -> int:
    """Microbatches after which a step repeats: a round, or one for each pipeline rank."""
    ranks = scenario.layout.pp
    return max(ranks, scenario.effective_schedule.round_size(ranks))


def _steady_period(short_result: SimulationResult, microbatches: int) -> tuple[Seconds, TimeWindow]:
    """(seconds, span on the first stage) of a steady period of this many microbatches."""
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
    """Passes of a rank, each with its first task."""
    tasks = short_result.program.programs[int(short_result.program.program_index[rank])].tasks
    first: dict[Action, int] = {}
    for task_id, task in enumerate(tasks):
        if isinstance(task, ComputeTask) and task.action is not None:
            first.setdefault(task.action, task_id)
    return first


def _is_periodic(scenario: Scenario) -> bool:
    """Whether each microbatch repeats the previous one."""
    varies = scenario.jitter is not None or scenario.training.expert_load is not None
    has_transients = bool(
        scenario.has_background_load or scenario.degradations.temporary_links
    )  # which are present during a fraction of the step
    # then the rounds are longer
    has_partial_round = scenario.microbatch_count % scenario.effective_schedule.round_size(scenario.layout.pp)
    has_periodic_schedule = scenario.effective_schedule.is_periodic and not has_partial_round
    return has_periodic_schedule and not (varies or has_transients) and scenario.steps == 1
