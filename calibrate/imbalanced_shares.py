"""How unequal are the loads of experts, or of ranks?

Shares with a given coefficient of variation, reproducible on every machine: equally spaced quantiles of a
log-normal distribution over their mean. A small number of shares varies less than stated, because the tails
of the distribution are cut off.
"""

from itertools import pairwise
from math import exp, log, sqrt
from statistics import NormalDist
from typing import Final

VARIATIONS: Final = (0.5, 1.0)  # measured: up to 0.55 between ranks of poorly balanced routers, more between experts
_DECIMALS: Final = 6  # decimals of a share in records


def lognormal_shares(count: int, variation: float) -> tuple[float, ...]:
    """[count] shares relative to their mean, ascending.

    >>> lognormal_shares(2, 0.0), [round(share, 2) for share in lognormal_shares(4, 1.0)]
    ((1.0, 1.0), [0.33, 0.66, 1.12, 1.89])
    """
    spread, normal = sqrt(log(1.0 + variation**2)), NormalDist()
    quantiles = [exp(spread * normal.inv_cdf((index + 0.5) / count)) for index in range(count)]
    return tuple(round(quantile * count / sum(quantiles), _DECIMALS) for quantile in quantiles)


def integer_shares(count: int, variation: float, total: int) -> tuple[int, ...]:
    """[count] integer shares that sum to `total` (cumulative rounding).

    >>> integer_shares(4, 1.0, 100)
    (8, 17, 28, 47)
    """
    ends, cumulative = [0], 0.0
    for share in lognormal_shares(count, variation):
        cumulative += share
        ends.append(round(total * cumulative / count))
    ends[-1] = total
    return tuple(end - begin for begin, end in pairwise(ends))
