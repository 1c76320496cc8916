"""Jobs that are laid out in tests: small enough for every layout of a space to be simulated."""

from itertools import product
from typing import Any

from clustersim.common.errors import InputError
from clustersim.planning.layouts import SearchSpace
from clustersim.results.memory_check import fits_in_memory
from clustersim.scenario import Scenario
from clustersim.simulation import simulate

DENSE: dict[str, Any] = {
    "model": {"layers": 4, "hidden": 1024, "heads": 8, "ffn": 4096, "vocab": 32000},
    "cluster": {"name": "dgx-h100", "gpus": 8},
    "layout": {"tp": 2, "pp": 2, "data": "zero1", "sequence_parallel": True},
    "training": {"sequence": 1024, "global_batch": 8},
}
MIXTURE: dict[str, Any] = {
    **DENSE,
    "model": {**DENSE["model"], "experts": {"count": 8, "top_k": 2, "ffn": 1024}},
    "layout": {"ep": 2, "pp": 2, "data": "zero1"},
}


def job(*overrides: str, mixture: bool = False) -> Scenario:
    """One of them."""
    return Scenario.from_mapping(MIXTURE if mixture else DENSE, list(overrides))


def every(scenario: Scenario, vary: dict[str, list[str]]) -> dict[frozenset[str], float]:
    """Brute force: the step time of every combination of values that is legal and fits, by what was varied.

    Written without the space: data parallelism is what is left, sequence parallelism goes with tensor parallelism, and
    layers are dealt evenly.
    """
    found = {}
    for values in product(*vary.values()):
        chosen = [f"{key}={value}" for key, value in zip(vary, values, strict=True)]
        told = dict(item.split("=", 1) for item in chosen)
        own = scenario.layout
        degrees = [int(told.get(f"layout.{name}", getattr(own, name))) for name in ("tp", "cp", "pp")]
        each = degrees[0] * degrees[1] * degrees[2]
        if scenario.cluster.gpu_count % each:
            continue
        split = "true" if degrees[0] > 1 else "false"
        follows = [f"layout.dp={scenario.cluster.gpu_count // each}", "layout.layers_per_stage=even"]
        follows += [f"layout.sequence_parallel={split}"] if "layout.tp" in told else []
        try:
            changed = scenario.with_overrides([*chosen, *follows])
        except InputError:
            continue
        if fits_in_memory(changed):
            found[frozenset(chosen)] = simulate(changed).step_time
    return found


def varied(space: SearchSpace, overrides: tuple[str, ...]) -> frozenset[str]:
    """What of a layout's overrides was varied."""
    (one,) = space.jobs
    return frozenset(override for override in overrides if override.partition("=")[0] in one.values)
