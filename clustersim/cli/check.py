"""What does `clustersim check` do? Everything that needs no simulation: is the scenario legal, and does it fit?"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clustersim.common.plugins import code_permission
from clustersim.common.units import format_bytes, format_probability
from clustersim.scenario import Scenario

if TYPE_CHECKING:
    from clustersim.results.memory_check import MemoryCheckReport


def check_scenario(file: Path, overrides: Sequence[str], *, quiet: bool = False) -> bool:
    """Print the verdict and return whether the scenario fits. Raises InputError for an illegal scenario.

    quiet: print problems only: warnings, and that it does not fit.
    """
    with code_permission("`check` never runs; `clustersim run --allow-code` does, once you have looked at it"):
        scenario = Scenario.load(file, overrides)
    from clustersim.results.memory_check import check
    from clustersim.scenario.validation_rules.sites import exchange_crossings, site_crossings
    from clustersim.uncertainty.memory_error import fits_surely

    jobs = [scenario] if scenario.diloco is None else list(_distinct_replicas(scenario))
    checked, report = max(
        ((job, check(job)) for job in jobs), key=lambda pair: pair[1].peak_memory_bytes / pair[1].memory_capacity_bytes
    )
    peak, capacity = format_bytes(report.peak_memory_bytes), format_bytes(report.memory_capacity_bytes)
    probability = format_probability(report.fit_probability)
    is_sure = fits_surely(report.fit_probability)
    fits = f"valid and {'fits' if is_sure else 'may fit'} (probability {probability})"
    verdict = fits if report.fits else "valid, but does not fit"
    if scenario.diloco is not None:
        verdict = f"{verdict} (the replica with least room, without its outer state, which `clustersim diloco` counts)"
    if not (quiet and report.fits and is_sure and not report.warnings):
        print(f"{file}: {verdict}: {peak} of {capacity} on the peak-memory GPU{_format_host_memory(report)}")
    if not quiet:
        for crossing in site_crossings(checked.layout, checked.cluster.fabric):
            print(f"  {crossing.description}")
        for exchange in exchange_crossings(scenario):
            print(f"  {exchange}")
    for warning in report.warnings:
        print(f"  warning: {warning}")
    for suggestion in report.suggestions:
        print(f"  suggestion: {_of_whole_job(suggestion, scenario.layout.dp // checked.layout.dp)}")
    return report.fits


def _distinct_replicas(scenario: Scenario) -> Iterator[Scenario]:
    """One replica of each site, in which all have the same GPUs."""
    from clustersim.reliability.replica_places import replica_places, replica_scenarios

    seen: set[tuple[str, ...]] = set()
    for slot, replica in zip(replica_places(scenario), replica_scenarios(scenario), strict=True):
        if slot.sites not in seen:
            seen.add(slot.sites)
            yield replica


def _of_whole_job(suggestion: str, replicas: int) -> str:
    """A suggestion for one replica, with the dp of all of them, which the file states."""
    return re.sub(r"(?<=layout\.dp=)\d+", lambda match: str(int(match[0]) * replicas), suggestion)


def _format_host_memory(report: "MemoryCheckReport") -> str:
    """Memory of the host with the highest use, as text; empty where nothing is offloaded."""
    host = report.host
    return (
        ""
        if host is None
        else f", {format_bytes(host.total_bytes)} of {format_bytes(host.capacity)} on the peak-memory host"
    )
