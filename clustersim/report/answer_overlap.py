"""What does the page say of a result's communication and computation?"""

from typing import TYPE_CHECKING

import numpy as np

from clustersim.analysis.overlap import overlap
from clustersim.report.overlap import StageOverlap
from clustersim.report.wording import row_names

if TYPE_CHECKING:
    from clustersim.answer import Answer


def overlap_of(result: "Answer") -> StageOverlap | None:
    """How communication meets computation on every stage; None where nothing moves."""
    found = overlap(result.rows, result.cost.block, result.breakdown)
    if found.moving.max(initial=0.0) <= 0:
        return None
    kind = result.program.kind[result.rows.ranks]
    mean, total = found.mean(kind, result.rows.weights), found.mean(np.zeros_like(kind), result.rows.weights)
    names = row_names(result.scenario, len(mean.alone))
    return StageOverlap(mean, total, names.labels, names.short, names.word)
