"""A small step of two stages, as the tests of all that is written span by span simulate it."""

from functools import cache

from clustersim.result import Result
from clustersim.scenario import Scenario
from clustersim.simulation import simulate

SMALL = {
    "model": {"preset": "llama3-8b", "layers": 8},
    "cluster": {"name": "dgx-h100", "gpus": 8},
    "layout": {"tp": 2, "pp": 2, "dp": 2, "data": "zero1"},
    "schedule": "1f1b",
    "training": {"sequence": 4096, "global_batch": 8, "microbatch": 1, "precision": "bf16", "recompute": "none"},
}


@cache
def simulated(*overrides: str) -> Result:
    """8 GPUs, of which 2 are simulated."""
    return simulate(Scenario.from_mapping(SMALL, source="small", overrides=list(overrides)))
