"""What does the heatmap take from a result?"""

from typing import TYPE_CHECKING, Final

from clustersim.analysis.activity import activity
from clustersim.analysis.rows import read_rows
from clustersim.report.heatmap import Heatmap

if TYPE_CHECKING:
    from clustersim.result import Result

_BINS: Final = 720  # about two pixels each on a large screen


def activity_of(result: "Result") -> Heatmap | None:
    """What all ranks do over time; None where there is one rank, which the timeline shows, or nothing happens."""
    if result.ranks == 1 or result.trace.makespan <= 0:
        return None
    rows = read_rows(result.trace, result.program, result.scenario.steps)
    scenario = result.scenario
    found = activity(rows, result.cost.block, bins=_BINS)
    return Heatmap(found, scenario.layout, scenario.cluster.gpus_per_node)
