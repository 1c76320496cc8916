"""How much more than others do some experts, or ranks, get?

Shares with a stated coefficient of variation, the same on every machine: quantiles of a log-normal distribution in
equal steps, over their mean. Few parts vary less than was stated, as the distribution's ends are beyond them.
"""

from itertools import pairwise
from math import exp, log, sqrt
from statistics import NormalDist
from typing import Final

VARIATIONS: Final = (0.5, 1.0)  # ranks of hardly balanced routers were measured up to 0.55, experts vary more
_DECIMALS: Final = 6  # of a share, as records keep it


def lognormal_shares(count: int, variation: float) -> tuple[float, ...]:
    """Of each part, over the mean one, the smallest first.

    >>> shares(2, 0.0), [round(share, 2) for share in shares(4, 1.0)]
    ((1.0, 1.0), [0.33, 0.66, 1.12, 1.89])
    """
    spread, normal = sqrt(log(1.0 + variation**2)), NormalDist()
    quantiles = [exp(spread * normal.inv_cdf((index + 0.5) / count)) for index in range(count)]
    return tuple(round(quantile * count / sum(quantiles), _DECIMALS) for quantile in quantiles)


def integer_shares(count: int, variation: float, total: int) -> tuple[int, ...]:
    """Rows of each part that are `total` together: those of a part begin where those of the one before end.

    >>> whole_rows(4, 1.0, 100)
    (8, 17, 28, 47)
    """
    ends, cumulative = [0], 0.0
    for share in lognormal_shares(count, variation):
        cumulative += share
        ends.append(round(total * cumulative / count))
    ends[-1] = total
    return tuple(end - begin for begin, end in pairwise(ends))
