"""What does the page say of a result's critical path?"""

from typing import TYPE_CHECKING

from clustersim.analysis.path_pieces import path_pieces
from clustersim.report.critical_path import CriticalPath
from clustersim.report.wording import row_word, stage_name

if TYPE_CHECKING:
    from clustersim.result import Result


def critical_path_of(result: "Result") -> CriticalPath | None:
    """The path's pieces and parts; None where nothing takes time."""
    if result.trace.makespan <= 0:
        return None
    scenario = result.scenario
    path = path_pieces(result.rows, result.path, result.cost.block)
    if len(path.parts) > scenario.layout.pp:  # torch.nn.DataParallel
        return CriticalPath(path, ("first GPU", "other GPUs"), ("first", "others"), "kind of GPU", scenario.steps)
    numbers = range(len(path.parts))
    labels = tuple(stage_name(scenario, number) for number in numbers)
    return CriticalPath(path, labels, tuple(map(str, numbers)), row_word(scenario), scenario.steps)
