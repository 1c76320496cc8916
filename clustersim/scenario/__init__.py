"""WHAT IS TO BE SIMULATED? Scenario files, checked and turned into what the inside works with."""

from clustersim.scenario.scenario import Scenario
from clustersim.scenario.settings import Contention, CostSettings, Symmetry

__all__ = ["Contention", "CostSettings", "Scenario", "Symmetry"]
