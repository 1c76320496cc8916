"""What does `clustersim check` do? Everything that needs no simulation: is the scenario legal, and does it fit?"""

from collections.abc import Sequence
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
    from clustersim.reliability.replica_places import exchange_crossings
    from clustersim.uncertainty.memory_error import fits_surely

    report = _memory_report(scenario)
    peak, capacity = format_bytes(report.peak_memory_bytes), format_bytes(report.memory_capacity_bytes)
    probability = format_probability(report.fit_probability)
    is_sure = fits_surely(report.fit_probability)
    fits = f"valid and {'fits' if is_sure else 'may fit'} (probability {probability})"
    verdict = fits if report.fits else "valid, but does not fit"
    if scenario.diloco is not None:
        verdict = f"{verdict} (the replica with least room, outer state included)"
    if not (quiet and report.fits and is_sure and not report.warnings):
        print(f"{file}: {verdict}: {peak} of {capacity} on the peak-memory GPU{_format_host_memory(report)}")
    if not quiet:
        for line in (*_crossings(scenario), *exchange_crossings(scenario)):
            print(f"  {line}")
    for warning in report.warnings:
        print(f"  warning: {warning}")
    for suggestion in report.suggestions:
        print(f"  suggestion: {suggestion.description}")
    return report.fits


def _memory_report(scenario: Scenario) -> "MemoryCheckReport":
    """Memory of the step, or of the replicas of local training."""
    from clustersim.reliability.replica_memory import check_replicas
    from clustersim.results.memory_check import check

    return check(scenario) if scenario.diloco is None else check_replicas(scenario)


def _crossings(scenario: Scenario) -> list[str]:
    """Which axis crosses which link between sites, within a replica of local training."""
    from clustersim.reliability.replica_places import replica_scenarios
    from clustersim.scenario.validation_rules.sites import site_crossings

    jobs = [scenario] if scenario.diloco is None else replica_scenarios(scenario)
    crossings = (crossing for job in jobs for crossing in site_crossings(job.layout, job.cluster))
    return list(dict.fromkeys(crossing.description for crossing in crossings))


def _format_host_memory(report: "MemoryCheckReport") -> str:
    """Memory of the host with the highest use, as text; empty where nothing is offloaded."""
    host = report.host
    return (
        ""
        if host is None
        else f", {format_bytes(host.total_bytes)} of {format_bytes(host.capacity)} on the peak-memory host"
    )
