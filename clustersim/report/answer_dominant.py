"""What does the heatmap take from a result?"""

from typing import TYPE_CHECKING, Final

from clustersim.analysis.dominant import dominant_parts
from clustersim.report.heatmap import Heatmap

if TYPE_CHECKING:
    from clustersim.answer import Answer

_BINS: Final = 720  # about two pixels each on a large screen


def dominant_of(result: "Answer") -> Heatmap | None:
    """What all ranks do over time; None where there is one rank, which the timeline shows, or nothing happens."""
    if result.ranks == 1 or result.trace.makespan <= 0:
        return None
    scenario = result.scenario
    found = dominant_parts(result.rows, result.cost.block, bins=_BINS)
    return Heatmap(found, scenario.layout, scenario.cluster.machine.nodes(scenario.cluster.places))
