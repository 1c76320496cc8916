"""What should be tried? Simulation of scenarios other than the given one: layout search, what-if, explorer.

from clustersim.planning import SearchSpace, search_layouts
best = search_layouts(scenario).choice
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clustersim.planning.layouts import LayoutSearch, SearchSpace, search_layouts

__all__ = ["LayoutSearch", "SearchSpace", "search_layouts"]


def __getattr__(name: str) -> Any:
    """Import the search on first access; most planning code does not need it."""
    if name not in __all__:
        raise AttributeError(f"module 'clustersim.planning' has no attribute {name!r}")
    return getattr(import_module("clustersim.planning.layouts"), name)


def __dir__() -> list[str]:
    """The public names, imported or not."""
    return __all__
