"""Which parts of a step are longer, and which shorter? Bars to both sides of no change, wherever answers differ."""

from collections.abc import Sequence

import numpy as np

from clustersim.analysis.parts import PARTS
from clustersim.arrays import FloatArray
from clustersim.report.draw.bars import in_parts
from clustersim.report.figure import Scale, Traces
from clustersim.report.keys import signed
from clustersim.report.theme import PART_LOOKS

_LEAST = 1e-3  # of the largest change: what is smaller is not drawn


def part_changes(labels: Sequence[str], changes: FloatArray, scale: Scale) -> Traces:
    """Bars of the parts that differ for each label. changes: [labels, parts] seconds."""
    most = np.abs(changes).max(axis=0, initial=0.0)
    parts = [part for part in PARTS if most[part.place] > _LEAST * most.max()]
    values = changes[:, [part.place for part in parts]]
    told = [map(signed, column) for column in values.T.tolist()]
    return in_parts(labels, [(part.value, PART_LOOKS[part]) for part in parts], values, scale.size, told)
