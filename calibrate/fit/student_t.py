"""How much wider than the normal distribution's is a quantile that few sources have given?"""

from statistics import NormalDist

from clustersim.uncertainty.prediction_interval import INTERVAL_COVERAGE


def student_t_ratio(degrees_of_freedom: int, coverage: float = INTERVAL_COVERAGE) -> float:
    """Ratio of Student's t to the normal quantile, two-sided.

    Abramowitz and Stegun 26.7.5, two terms.

    >>> round(student_t_ratio(11) * 1.645, 2)
    1.8
    """
    z = NormalDist().inv_cdf((1.0 + coverage) / 2.0)
    return (
        1.0
        + (z**2 + 1.0) / (4.0 * degrees_of_freedom)
        + (5.0 * z**4 + 16.0 * z**2 + 3.0) / (96.0 * degrees_of_freedom**2)
    )
