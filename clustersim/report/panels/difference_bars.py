"""Which time categories are longer, and which shorter? Diverging bars, wherever results are compared."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.units import format_signed_seconds
from clustersim.report.draw.charts import bar_figure, stacked_bar_traces
from clustersim.report.figure import AxisScale, Figure, Traces, axis_layout, time_scale
from clustersim.report.theme import TIME_CATEGORY_STYLES
from clustersim.results.time_categories import TIME_CATEGORIES

_MIN_RELATIVE_CHANGE = 1e-3  # relative to the largest change: smaller ones are not drawn


def category_change_traces(labels: Sequence[str], changes: FloatArray, scale: AxisScale) -> Traces:
    """Bars of the categories that differ, for each label. changes: [labels, categories] seconds."""
    max_changes = np.abs(changes).max(axis=0, initial=0.0)
    categories = [
        category
        for category in TIME_CATEGORIES
        if max_changes[category.index] > _MIN_RELATIVE_CHANGE * max_changes.max()
    ]
    values = changes[:, [category.index for category in categories]]
    hover_texts = [map(format_signed_seconds, column) for column in values.T.tolist()]
    return stacked_bar_traces(
        labels,
        [(category.value, TIME_CATEGORY_STYLES[category]) for category in categories],
        values,
        scale.unit_size,
        hover_texts,
    )


def category_change_figure(
    name: str, labels: Sequence[str], changes: FloatArray, axis_title: str, **extra: Any
) -> Figure:
    """Figure of category changes. axis_title: title of the value axis, without the unit."""
    scale = time_scale(float(np.abs(changes).max(initial=0.0)))
    x = axis_layout(f"{axis_title} [{scale.unit}]", zeroline=True)
    return bar_figure(name, category_change_traces(labels, changes, scale), x, barmode="relative", bargap=0.3, **extra)
