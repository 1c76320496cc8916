"""Which rows are drawn when there are more stages than a page can show, and how high is a figure of them?"""

from typing import Final

import numpy as np

from clustersim.arrays import IntArray

MOST_ROWS: Final = 64
_BESIDE: Final = 130  # pixels: an axis and a legend
_ROW: Final = (18, 28)  # pixels of a row at least and at most
_ROWS: Final = 1400  # pixels of all rows, if those allow


def shown_rows(rows: int, most: int = MOST_ROWS) -> IntArray:
    """All rows, or `most` of them spread evenly from the first to the last, ascending.

    >>> shown_rows(3).tolist(), shown_rows(1000, most=3).tolist()
    ([0, 1, 2], [0, 500, 999])
    """
    if rows <= most:
        return np.arange(rows)
    return np.round(np.linspace(0, rows - 1, most)).astype(np.int64)


def height_of(rows: int) -> int:
    """Pixels of a figure with so many rows of bars: the fewer, the higher each.

    >>> height_of(1), height_of(64)
    (158, 1474)
    """
    least, most = _ROW
    return _BESIDE + max(least, min(most, _ROWS // max(1, rows))) * rows
