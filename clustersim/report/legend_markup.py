"""What stands in tables and legends? The mark of a category, and quantities that stay on one line.

The mark is a square in the category's colour, hatched where its fill is. Text that is not `Markup` is escaped.
"""

from typing import Any

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from clustersim.report.theme import COMM_STYLES, TIME_CATEGORY_STYLES, CategoryStyle
from clustersim.results.time_categories import TIME_CATEGORIES, TimeCategory


def colour_swatch(style: CategoryStyle) -> Markup:
    """The mark."""
    hatched = " hatched" if style.pattern else ""
    return Markup('<i class="key{}" style="background-color:{}"></i>').format(hatched, style.colour)


def swatch_and_label(style: CategoryStyle, label: str) -> Markup:
    """The mark, and words for what it stands for."""
    return colour_swatch(style) + escape(label)


def category_legend(indices: NDArray[np.integer[Any]]) -> Markup:
    """A line of marks and words for the parts of the breakdown at these places, each once."""
    item_markup = Markup('<span class="named">{}</span> ').format
    items = Markup("").join(
        item_markup(category_markup(TIME_CATEGORIES[index])) for index in np.unique(indices).tolist()
    )
    return Markup('<p class="lead">{}</p>').format(items)


def category_markup(category: TimeCategory) -> Markup:
    """The mark and the name of a part of the breakdown."""
    return swatch_and_label(TIME_CATEGORY_STYLES[category], category.value)


def axis_markup(axis: str) -> Markup:
    """The mark and the words of an axis or role, as it is listed."""
    label, style = COMM_STYLES[axis]
    return swatch_and_label(style, label)


def non_breaking(text: str) -> str:
    """Words that stay on one line, such as a number and its unit."""
    return text.replace(" ", "\N{NO-BREAK SPACE}")
