"""How far is the memory model from what the allocator of a profiled step held?"""

from dataclasses import dataclass, replace
from pathlib import Path

from calibrate.profile.snapshot import SnapshotPeak, read_snapshot
from clustersim.build import build_plan
from clustersim.common.units import Bytes
from clustersim.cost.calibration_record import MemoryAnchor
from clustersim.memory.footprint import MemoryCategory
from clustersim.parallel.mesh import PIPELINE
from clustersim.results.memory_check import memory_timelines, rank_layers, rank_tokens
from clustersim.scenario import Scenario

_OUTSIDE_ALLOCATOR = (MemoryCategory.CONTEXT, MemoryCategory.COMMUNICATION, MemoryCategory.FRAGMENTATION)


@dataclass(frozen=True, slots=True)
class MemoryComparison:
    """A snapshot's peak, and the anchor that it gives. by_category: modelled bytes at the peak."""

    peak: SnapshotPeak
    anchor: MemoryAnchor
    by_category: dict[str, Bytes]


def compare_memory(snapshot: Path, scenario: Scenario, rank: int) -> MemoryComparison:
    """Compare a snapshot with the memory model of a rank of a scenario."""
    peak = read_snapshot(snapshot)
    bare = replace(scenario, cost=replace(scenario.cost, record=None))
    plan = build_plan(bare)
    stage = int(plan.layout.rank_coordinates(PIPELINE)[rank])
    categories = memory_timelines(bare)[stage].peak_by_category()
    by_category = {
        category.value: size for category, size in categories.items() if category not in _OUTSIDE_ALLOCATOR and size
    }
    modelled = sum(by_category.values())
    anchor = MemoryAnchor(
        peak.allocated, max(peak.reserved, peak.allocated), modelled, rank_layers(plan, stage), rank_tokens(plan)
    )
    return MemoryComparison(peak, anchor, by_category)
