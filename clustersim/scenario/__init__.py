"""WHAT IS TO BE SIMULATED? Scenario files: parsed, validated and resolved into the simulator's inputs."""

from clustersim.scenario.scenario import Scenario
from clustersim.scenario.settings import Contention, CostSettings, Symmetry

__all__ = ["Contention", "CostSettings", "Scenario", "Symmetry"]
