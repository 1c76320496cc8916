"""How are categories and quantities marked up in tables and legends?

Colour swatches, and text that stays on one line.

A swatch is a square in the category's colour, hatched if its style has a pattern. Text that is not `Markup`
is escaped.
"""

from typing import Any

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from clustersim.report.theme import COMM_STYLES, TIME_CATEGORY_STYLES, CategoryStyle
from clustersim.results.time_categories import TIME_CATEGORIES, TimeCategory


def colour_swatch(style: CategoryStyle) -> Markup:
    """Colour swatch of a style."""
    hatched = " hatched" if style.pattern else ""
    return Markup('<i class="key{}" style="background-color:{}"></i>').format(hatched, style.colour)


def swatch_and_label(style: CategoryStyle, label: str) -> Markup:
    """Swatch followed by a label."""
    return colour_swatch(style) + escape(label)


def category_legend(indices: NDArray[np.integer[Any]]) -> Markup:
    """Legend line of the time categories with these indices, each once."""
    item_markup = Markup('<span class="named">{}</span> ').format
    items = Markup("").join(
        item_markup(category_markup(TIME_CATEGORIES[index])) for index in np.unique(indices).tolist()
    )
    return Markup('<p class="lead">{}</p>').format(items)


def category_markup(category: TimeCategory) -> Markup:
    """Swatch and name of a time category."""
    return swatch_and_label(TIME_CATEGORY_STYLES[category], category.value)


def axis_markup(axis: str) -> Markup:
    """Swatch and label of an axis or process group, by its name in reports."""
    label, style = COMM_STYLES[axis]
    return swatch_and_label(style, label)


def non_breaking(text: str) -> str:
    """Text with non-breaking spaces, such as a number and its unit."""
    return text.replace(" ", "\N{NO-BREAK SPACE}")
