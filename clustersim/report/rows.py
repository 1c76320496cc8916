"""Which rows are drawn when there are more stages than a page can show?"""

from typing import Final

import numpy as np

from clustersim.trace.store import IntArray

MOST_ROWS: Final = 64


def shown_rows(rows: int, most: int = MOST_ROWS) -> IntArray:
    """All rows, or `most` of them spread evenly from the first to the last, ascending.

    >>> shown_rows(3).tolist(), shown_rows(1000, most=3).tolist()
    ([0, 1, 2], [0, 500, 999])
    """
    if rows <= most:
        return np.arange(rows)
    return np.round(np.linspace(0, rows - 1, most)).astype(np.int64)
