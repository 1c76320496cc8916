"""Type aliases of numpy arrays by element type, for annotations."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
SmallIntArray = NDArray[np.int8]
"""Indices in a short list, of very many things; to be widened before any arithmetic."""
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
IndexArray = NDArray[np.signedinteger[Any]]
"""Integers of the least width that holds them: for columns of which there may be many millions."""
HashArray = NDArray[np.uint64]
