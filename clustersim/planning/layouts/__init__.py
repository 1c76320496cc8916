"""Which layout of a job is the fastest on its cluster? Exactly what trying all of them would say, with fewer tries.

    enumerate (space) -> legal? -> fits? -> a bound that no simulation undercuts (bounds) -> simulate, best bound first

Simulation ends where no bound is below the best times found. Whatever is set aside is counted, with its reason.
"""

from clustersim.planning.layouts.branch_and_bound import LayoutSearch, search_layouts
from clustersim.planning.layouts.search_space import SearchSpace

__all__ = ["LayoutSearch", "SearchSpace", "search_layouts"]
