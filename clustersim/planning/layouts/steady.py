"""What does a step of many microbatches take, from two steps of fewer?

A pipeline fills, goes on in the same way microbatch after microbatch, and drains. So seconds of a step, and of each of
its parts, grow by the same for each microbatch more: with p pipeline ranks

    t(m) = t(2p) + (m - 2p) (t(3p) - t(2p)) / p

Of 240 microbatches on 16 ranks 32 and 48 are simulated: a third of the work.

Where communication beside computation slows it, what begins beside what drifts from microbatch to microbatch, and the
two steps are not quite as steady as the long one: 1.5e-4 of the step is the most among DeepSeek-V3's best layouts, and
`NEAR` bounds by how much the estimate is too long (tests/planning/layouts/test_steady.py). It may be too short by a few
percent where a rank that is hardly busier than others falls behind slowly. So it tells which layouts cannot be among
the best, no more: those that may be are simulated whole.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, TypeVar

import numpy as np

from clustersim.analysis.breakdown import Breakdown
from clustersim.analysis.economics import Economics, Gpus
from clustersim.analysis.utilization import tokens_per_second
from clustersim.answer import Answer
from clustersim.arrays import FloatArray
from clustersim.fitting import tightest_memory
from clustersim.scenario import Scenario
from clustersim.scenario.changes.work import with_microbatches
from clustersim.schedules.breadth_first import BreadthFirst
from clustersim.schedules.combined import Combined
from clustersim.schedules.dual_pipe import DualPipe
from clustersim.schedules.dual_pipe_v import DualPipeV
from clustersim.schedules.gpipe import GPipe
from clustersim.schedules.interleaved import Interleaved
from clustersim.schedules.one_f_one_b import OneFOneB
from clustersim.schedules.zero_bubble_v import ZeroBubbleV
from clustersim.simulation import simulate
from clustersim.units import Bytes, Seconds

T = TypeVar("T", float, FloatArray)
_STEADY: Final = (OneFOneB, GPipe, Interleaved, BreadthFirst, Combined, ZeroBubbleV, DualPipeV, DualPipe)
"""Schedules with a pattern that each microbatch repeats; others are searched for, or somebody's own."""
NEAR: Final = 5e-3
"""The part of a step by which it may be too long; 2.2e-3 was the most of 1,000 random layouts, beside a slow GPU."""
ROUNDS: Final = (2, 3)
"""Microbatches for each pipeline rank that are simulated."""
LEAST: Final = 10
"""For how many of them it is worth it: a layout that is simulated whole after all then costs half more."""
LEAST_LAYERS: Final = 2000
"""How often a microbatch passes a layer in a step, from which on its events count more than what is done once."""


@dataclass(frozen=True)
class Extended:
    """A step of `scenario`, from two of fewer microbatches; times: what the longer one has more, to go on from it."""

    scenario: Scenario
    short: Answer
    long: Answer
    times: float

    @property
    def ranks(self) -> int:
        """World size."""
        return self.long.ranks

    @property
    def step_time(self) -> Seconds:
        """Seconds of the step."""
        return self._on(self.short.step_time, self.long.step_time)

    @cached_property
    def breakdown(self) -> Breakdown:
        """Where every second of each rank's step goes."""
        own = self.long.breakdown
        return replace(own, seconds=self._on(self.short.breakdown.seconds, own.seconds))

    @property
    def band(self) -> tuple[Seconds, Seconds]:
        """Between what and what the step time is expected, as that of the longer one is."""
        expected = self.long.expected
        return self.step_time * expected.low, self.step_time * expected.high

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the whole batch per second."""
        training = self.scenario.training
        return tokens_per_second(training.global_batch, training.sequence, self.step_time)

    def mfu(self) -> float:
        """Model FLOP utilization: FLOP for a token are those of the longer one."""
        return self.long.mfu() * self.tokens_per_second / self.long.tokens_per_second

    @cached_property
    def economics(self) -> Economics:
        """What the step costs and what energy it takes."""
        own, training = self.long.economics, self.scenario.training
        gpus = tuple(map(self._gpus, self.short.economics.gpus, own.gpus))
        tokens = float(training.global_batch * training.sequence)
        return replace(own, gpus=gpus, step_time=self.step_time, tokens=tokens)

    def _gpus(self, short: Gpus, long: Gpus) -> Gpus:
        return replace(long, seconds={each: self._on(short.seconds[each], long.seconds[each]) for each in long.seconds})

    @cached_property
    def _memory(self) -> tuple[Bytes, Bytes]:
        return tightest_memory(self.scenario)

    @property
    def peak_memory(self) -> Bytes:
        """Bytes that the fullest GPU needs."""
        return self._memory[0]

    @property
    def memory_capacity(self) -> Bytes:
        """Bytes that the fullest GPU has."""
        return self._memory[1]

    def _on(self, short: T, long: T) -> T:
        """What grows by the same for each microbatch more."""
        return long + self.times * (long - short)


def extended(scenario: Scenario) -> Extended | None:
    """A step from two of fewer microbatches; None where that is not known to be near, or hardly less work."""
    rounds, rest = divmod(scenario.microbatches, scenario.layout.pp)
    if rounds < LEAST or scenario.microbatches * scenario.model.layers < LEAST_LAYERS or not _is_steady(scenario):
        return None
    few, more = (with_microbatches(scenario, each * scenario.layout.pp + rest) for each in ROUNDS)
    short, long = simulate(few), simulate(more)
    if not np.array_equal(short.trace.representative, long.trace.representative):
        return None
    return Extended(scenario, short, long, (rounds - ROUNDS[1]) / (ROUNDS[1] - ROUNDS[0]))


def _is_steady(scenario: Scenario) -> bool:
    """Whether each microbatch does what the one before did."""
    varies = scenario.jitter is not None or scenario.training.expert_load is not None
    passing = bool(scenario.shares_links or scenario.disturbances.passing)  # which are there for a part of the step
    return not (varies or passing) and scenario.steps == 1 and isinstance(scenario.run_schedule, _STEADY)
