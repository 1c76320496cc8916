"""How long would a step be if tokens chose their experts freely?

A balanced step is what benchmarks run (forced balance, or experts with a capacity): every rank gets equally many
tokens. A router that is free to choose (natural routing) loads ranks unevenly, and in each layer all ranks of an
expert-parallel group wait for the most loaded one. With an expected load of f times the mean on that rank, kernels
of experts take f times as long, and exposed dispatches and combines f times (of the most loaded node where tokens
are sent once to a node), so of the pipeline ranks the busiest one is busy that much longer, and the step grows in
proportion: bubbles are of the same passes. Nothing is simulated, so a balanced result says it at no cost; to
simulate a load, set `training.expert_load`.

How uneven natural routing is depends on the router, its training and the data, so the answer is a range: of ranks'
coefficients of variation that reproduce published pairs of forced and natural runs, simulated with random loads.

- 0.05: Mixtral, 1.045 times the forced step.
- 0.4: Qwen3-30B in its first 100 steps, 30.29 s against 24.71 s (NVIDIA-NeMo/Megatron-Bridge@067f987,
  examples/model_verification_cards/qwen3-30b-a3b/card.yaml, and skills/nemo-mbridge-perf-expert-parallel-overlap);
  Qwen3-235B at 16k to 128k tokens, 295 and 237, 335 and 277, 368 and 320, 389 and 357 TFLOP/s
  (yanring/Megatron-MoE-ModelZoo@e865051, best_practice/qwen3/readme.md): each of the five needs 0.33 to 0.39.

Routers without a balancing loss are worse (up to 0.88, `model.moe_expert_load`).
Left out: grouped products of uneven groups, and the memory of the most loaded rank.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.units import Seconds
from clustersim.cost.segment import SegmentTiming
from clustersim.model.moe_expert_load import RandomExpertLoad
from clustersim.parallel.mesh import EXPERT, EXPERT_MESH
from clustersim.program.task import Segment, TokenDispatcher
from clustersim.results.class_blocks import class_blocks
from clustersim.results.time_breakdown import TimeBreakdown
from clustersim.results.time_categories import BUBBLE_CATEGORIES, EXPOSED_CATEGORIES, TimeCategory
from clustersim.results.trace_table import SegmentTimingLookup, TraceTable, distinct_timings, sum_segment_runs
from clustersim.scenario.resolved import ResolvedScenario

NATURAL_VARIATIONS: Final = (0.05, 0.4)
"""Coefficients of variation of the tokens per rank, of well balanced and of unevenly used experts."""
_DRAWN_LAYERS: Final = 256  # their mean is within 1 % of the expected maximum's excess
_IDLE_INDICES: Final = [category.index for category in (*BUBBLE_CATEGORIES, TimeCategory.WAIT)]


@dataclass(frozen=True, slots=True)
class NaturalRouting:
    """Range of a step's time with natural routing, for each of `NATURAL_VARIATIONS`.

    ratios: over the balanced step, at least 1; step_time: seconds of the balanced step.
    """

    ratios: tuple[float, float]
    step_time: Seconds

    @property
    def step_times(self) -> tuple[Seconds, Seconds]:
        """Seconds of the step."""
        low, high = self.ratios
        return low * self.step_time, high * self.step_time


class LoadFactors(NamedTuple):
    """Expected tokens over the mean: of a layer's most loaded rank, and of what its communication waits for."""

    rank: float
    comm: float


def natural_routing(
    scenario: ResolvedScenario, table: TraceTable, segment_timing: SegmentTimingLookup, breakdown: TimeBreakdown
) -> NaturalRouting | None:
    """The range of a balanced step; None where routing changes nothing or its loads are given.

    Ranks with all experts, and experts with a capacity, process equally many tokens, whatever the router chooses.
    """
    moes = scenario.model.distinct_routed_moes
    is_free = scenario.layout.ep > 1 and all(moe.capacity_factor is None for moe in moes)
    if not moes or not is_free or scenario.training.expert_load is not None:
        return None
    kernels = _expert_kernel_seconds(table, segment_timing)
    exposed = breakdown.seconds[:, EXPOSED_CATEGORIES[EXPERT].index]
    busy = breakdown.seconds.sum(axis=1) - breakdown.seconds[:, _IDLE_INDICES].sum(axis=1)
    low, high = (
        float((busy + (factors.rank - 1.0) * kernels + (factors.comm - 1.0) * exposed).max() / busy.max())
        for factors in (expected_load_factors(scenario, variation) for variation in NATURAL_VARIATIONS)
    )
    return NaturalRouting((low, high), table.trace.makespan / table.step_count)


def expected_load_factors(scenario: ResolvedScenario, variation: float) -> LoadFactors:
    """Expected load factors of expert-parallel ranks whose tokens have this coefficient of variation."""
    layout = scenario.layout
    (group, *_) = layout.meshes[EXPERT_MESH].groups_along(EXPERT)
    node_count = len(np.unique(scenario.cluster.fabric.node_ids(group)))
    rank_factor = _expected_maximum(variation, layout.ep, layout.ep)
    if layout.dispatcher is TokenDispatcher.ALL_GATHER:
        return LoadFactors(rank_factor, 1.0)  # all ranks get all tokens
    sends_once_to_nodes = layout.dispatcher is not TokenDispatcher.ALL_TO_ALL and 1 < node_count < layout.ep
    section_count = node_count if sends_once_to_nodes and layout.ep % node_count == 0 else layout.ep
    return LoadFactors(rank_factor, _expected_maximum(variation, layout.ep, section_count))


@lru_cache(maxsize=64)
def _expected_maximum(variation: float, rank_count: int, section_count: int) -> float:
    """Expected load over the mean of the most loaded of equal sections of the ranks."""
    load = RandomExpertLoad(variation)
    shares = np.array([load.expert_shares(rank_count, layer, 0) for layer in range(_DRAWN_LAYERS)])
    sections = shares.reshape(_DRAWN_LAYERS, section_count, -1).sum(axis=2)
    return float(sections.max(axis=1).mean()) * section_count


def _expert_kernel_seconds(table: TraceTable, segment_timing: SegmentTimingLookup) -> FloatArray:
    """Kernel seconds of experts in a step: [classes]."""
    return np.concatenate([_class_expert_seconds(block, segment_timing) for block in class_blocks(table)])


def _class_expert_seconds(table: TraceTable, segment_timing: SegmentTimingLookup) -> FloatArray:
    events = np.arange(len(table.trace))
    totals = sum_segment_runs(table, events, table.trace.end - table.trace.start)
    distinct, timing_index = distinct_timings(table, totals, segment_timing)
    per_run = np.array([_segment_expert_seconds(segment, timing) for segment, timing in distinct])[timing_index]
    seconds = np.bincount(totals.rank_class, per_run * totals.run_count, minlength=len(table.ranks))
    per_step: FloatArray = seconds / table.step_count
    return per_step


def _segment_expert_seconds(segment: Segment, timing: SegmentTiming) -> Seconds:
    on_experts = np.array([operation.on_expert_rank for operation in segment.operations], dtype=np.bool_)
    return float((timing.kernel_seconds - timing.launch_stalls)[on_experts].sum())
