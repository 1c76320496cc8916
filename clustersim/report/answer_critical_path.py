"""What does the page say of a result's critical path?"""

from typing import TYPE_CHECKING

from clustersim.analysis.path_pieces import path_pieces
from clustersim.report.critical_path import CriticalPath
from clustersim.report.wording import row_names

if TYPE_CHECKING:
    from clustersim.answer import Answer


def critical_path_of(result: "Answer") -> CriticalPath | None:
    """The path's pieces and parts; None where nothing takes time."""
    if result.trace.makespan <= 0:
        return None
    scenario = result.scenario
    path = path_pieces(result.rows, result.path, result.cost.block)
    count = scenario.microbatches, scenario.steps
    names = row_names(scenario, len(path.parts))
    return CriticalPath(path, names.labels, names.short, names.word, *count)
