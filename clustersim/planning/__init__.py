"""WHAT SHOULD BE TRIED? Other scenarios than the one that was asked for, simulated.

from clustersim.planning import Space, search
best = search(scenario).choice
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clustersim.planning.layouts import LayoutSearch, SearchSpace, search_layouts

__all__ = ["LayoutSearch", "SearchSpace", "search_layouts"]


def __getattr__(name: str) -> Any:
    """Import the search when it is first asked for: most of what is planned needs none."""
    if name not in __all__:
        raise AttributeError(f"module 'clustersim.planning' has no attribute {name!r}")
    return getattr(import_module("clustersim.planning.layouts"), name)


def __dir__() -> list[str]:
    """The public names, imported or not."""
    return __all__
