"""One small step of a pipeline, simulated once for each set of changes however many tests ask for it."""

from functools import cache
from typing import Any

from clustersim.answer import Answer
from clustersim.scenario import Scenario
from clustersim.simulation import simulate

PIPELINE: dict[str, Any] = {  # stage 2 is ranks 8 to 11
    "model": {"preset": "llama3-8b", "layers": 8},
    "cluster": {"name": "dgx-h100", "gpus": 16},
    "layout": {"tp": 2, "pp": 4, "dp": 2, "data": "zero1"},
    "training": {"sequence": 4096, "global_batch": 16},
}


def pipeline(*overrides: str) -> Scenario:
    """Two replicas of four stages of two layers on two nodes, changed."""
    return Scenario.from_mapping(PIPELINE, overrides, source="small")


@cache
def simulated(*overrides: str) -> Answer:
    """Its step."""
    return simulate(pipeline(*overrides))
