"""How are a result's step times and the provenance of its durations described, on pages and in the terminal?"""

from collections.abc import Mapping

from clustersim.common.units import Seconds, format_step_time
from clustersim.cost.timing import Provenance
from clustersim.results.simulation_result import SimulationResult

_PERCENTILE_LABELS: Mapping[str, str] = {"p50": "median"}


def format_percentiles(percentiles: Mapping[str, Seconds]) -> str:
    """Percentiles of the step time in one line.

    >>> format_percentiles({"min": 1.0, "p50": 1.5, "max": 2.0})
    'min 1.000 s · median 1.500 s · max 2.000 s'
    """
    return " · ".join(
        f"{_PERCENTILE_LABELS.get(name, name)} {format_step_time(seconds)}" for name, seconds in percentiles.items()
    )


def nonzero_provenance(result: SimulationResult) -> Mapping[Provenance, float]:
    """Share of busy time by provenance of its durations, nonzero shares only."""
    return {Provenance(source): share for source, share in result.provenance_shares.items() if share > 0}
