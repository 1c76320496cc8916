"""Which parts of a step are longer, and which shorter? Bars to both sides of no change, wherever answers differ."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.units import format_signed_seconds
from clustersim.report.draw.charts import chart, in_parts
from clustersim.report.figure import Figure, Scale, Traces, axis, time_scale
from clustersim.report.theme import PART_LOOKS
from clustersim.results.time_categories import PARTS

_LEAST = 1e-3  # of the largest change: what is smaller is not drawn


def part_changes(labels: Sequence[str], changes: FloatArray, scale: Scale) -> Traces:
    """Bars of the parts that differ for each label. changes: [labels, parts] seconds."""
    most = np.abs(changes).max(axis=0, initial=0.0)
    parts = [part for part in PARTS if most[part.place] > _LEAST * most.max()]
    values = changes[:, [part.place for part in parts]]
    told = [map(format_signed_seconds, column) for column in values.T.tolist()]
    return in_parts(labels, [(part.value, PART_LOOKS[part]) for part in parts], values, scale.size, told)


def changed_parts(name: str, labels: Sequence[str], changes: FloatArray, words: str, **more: Any) -> Figure:
    """A figure of them. words: of its axis."""
    scale = time_scale(float(np.abs(changes).max(initial=0.0)))
    x = axis(f"{words} [{scale.unit}]", zeroline=True)
    return chart(name, part_changes(labels, changes, scale), x, stacked="relative", bargap=0.3, **more)
