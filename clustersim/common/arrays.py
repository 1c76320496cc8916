"""Type aliases of numpy arrays by element type, for annotations."""

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
SmallIntArray = NDArray[np.int8]
"""Indices in a short list, of very many things; to be widened before any arithmetic."""
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
HashArray = NDArray[np.uint64]
