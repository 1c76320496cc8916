"""Quantiles of values of which some come from the same group, and count no more together than those of any other."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray

_TOLERANCE: Final = 1e-9  # of the share


def group_weights(groups: Sequence[str]) -> FloatArray:
    """Weights of values by the group of each, of which those of a group sum to 1: [values]."""
    counts = Counter(groups)
    return np.array([1.0 / counts[group] for group in groups])


def weighted_quantile(values: FloatArray, weights: FloatArray, share: float) -> float:
    """The smallest value that at least a share of the weight does not exceed. values, weights: [values]."""
    order = np.argsort(values)
    cumulative = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][np.searchsorted(cumulative, share - _TOLERANCE)])
