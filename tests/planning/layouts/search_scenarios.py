"""Scenarios for layout searches: small enough to simulate every layout of a search space."""

from itertools import product
from typing import Any

from clustersim.common.errors import InputError
from clustersim.planning.layouts import SearchSpace
from clustersim.results.memory_check import check
from clustersim.scenario import Scenario
from clustersim.simulation import simulate

DENSE: dict[str, Any] = {
    "model": {"layers": 4, "hidden": 1024, "heads": 8, "ffn": 4096, "vocab": 32000},
    "cluster": {"name": "dgx-h100", "gpus": 8},
    "layout": {"tp": 2, "pp": 2, "data": "zero1", "sequence_parallel": True},
    "training": {"sequence": 1024, "global_batch": 8},
    "framework": {"name": "ideal", "launch": "10 us"},
}
MOE: dict[str, Any] = {
    **DENSE,
    "model": {**DENSE["model"], "experts": {"count": 8, "top_k": 2, "ffn": 1024}},
    "layout": {"ep": 2, "pp": 2, "data": "zero1"},
}


def search_scenario(*overrides: str, moe: bool = False) -> Scenario:
    """A dense or MoE scenario with overrides."""
    return Scenario.from_mapping(MOE if moe else DENSE, list(overrides))


def exhaustive_step_times(
    scenario: Scenario, vary: dict[str, list[str]], headroom: float = 0.0
) -> dict[frozenset[str], float]:
    """Brute force: the step time of every legal combination of values that fits in memory, by the varied overrides.

    headroom: share of the memory that has to stay free.

    Written without the search space: data parallelism is derived from the other degrees, sequence parallelism is
    on with tensor parallelism, and layers are partitioned evenly.
    """
    step_times = {}
    for values in product(*vary.values()):
        chosen = [f"{key}={value}" for key, value in zip(vary, values, strict=True)]
        values_by_key = dict(replica_size.split("=", 1) for replica_size in chosen)
        layout = scenario.layout
        degrees = [int(values_by_key.get(f"layout.{name}", getattr(layout, name))) for name in ("tp", "cp", "pp")]
        replica_size = degrees[0] * degrees[1] * degrees[2]
        if scenario.cluster.gpu_count % replica_size:
            continue
        sequence_parallel = "true" if degrees[0] > 1 else "false"
        derived = [f"layout.dp={scenario.cluster.gpu_count // replica_size}", "layout.layers_per_stage=even"]
        derived += [f"layout.sequence_parallel={sequence_parallel}"] if "layout.tp" in values_by_key else []
        try:
            changed = scenario.with_overrides([*chosen, *derived], suggest=False)
        except InputError:
            continue
        report = check(changed)
        if report.fits and report.peak_memory_bytes <= report.memory_capacity_bytes * (1.0 - headroom):
            step_times[frozenset(chosen)] = simulate(changed).step_time
    return step_times


def varied_overrides(space: SearchSpace, overrides: tuple[str, ...]) -> frozenset[str]:
    """The overrides of a layout that belong to varied keys."""
    (search_job,) = space.jobs
    return frozenset(override for override in overrides if override.partition("=")[0] in search_job.values)
