"""clustersim: how long does a training step take on a cluster, where does the time go, and does it fit?

from clustersim import Scenario, simulate
result = simulate(Scenario.load("examples/llama3_405b_16k.yaml"))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clustersim.report.rendered_result import RenderedResult, simulate
    from clustersim.results.memory_check import check
    from clustersim.scenario import Scenario

__all__ = ["RenderedResult", "Scenario", "check", "simulate"]
_EXPORTED_FROM = {
    "RenderedResult": "clustersim.report.rendered_result",
    "Scenario": "clustersim.scenario",
    "check": "clustersim.results.memory_check",
    "simulate": "clustersim.report.rendered_result",
}


def __getattr__(name: str) -> Any:
    """Import the module of a public name on first access, so that `import clustersim` itself is cheap."""
    if name not in _EXPORTED_FROM:
        raise AttributeError(f"module 'clustersim' has no attribute {name!r}")
    return getattr(import_module(_EXPORTED_FROM[name]), name)


def __dir__() -> list[str]:
    """The public names, whether or not they are imported yet."""
    return __all__
