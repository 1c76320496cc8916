"""Which layout of a job is the fastest on its cluster? Branch and bound: exact, with fewer simulations.

    enumerate (search_space) -> legal? -> fits? -> lower bound (bounds) -> simulate, best bound first

Simulation ends when no bound is below the best times found. Every pruned layout is counted, with its reason.
"""

from clustersim.planning.layouts.branch_and_bound import LayoutSearch, search_layouts
from clustersim.planning.layouts.search_space import SearchSpace

__all__ = ["LayoutSearch", "SearchSpace", "search_layouts"]
