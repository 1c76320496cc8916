"""Changes of a run over weeks: fewer failures, faster storage, restart and detection."""

from collections.abc import Callable
from typing import Final

from clustersim.common.units import Seconds
from clustersim.scenario.changes.reliability import (
    with_failure_rate_factor,
    with_immediate_detection,
    with_restart_seconds,
    with_storage_bandwidth_factor,
)
from clustersim.scenario.changes.scenario_change import ChangeSubject, ChangeUse, ScenarioChange, apply_setter
from clustersim.scenario.scenario import Scenario

_FAST_RESTART: Final[Seconds] = 120.0


def _run_change(name: str, label: str, setter: Callable[[Scenario], Scenario]) -> ScenarioChange:
    return ScenarioChange(name, label, ChangeSubject.RELIABILITY, ChangeUse.GOODPUT, apply_setter(setter))


RUN_CHANGES: Final = (
    _run_change("fewer_failures", "half the failures", lambda scenario: with_failure_rate_factor(scenario, 0.5)),
    _run_change(
        "faster_storage", "twice the storage bandwidth", lambda scenario: with_storage_bandwidth_factor(scenario, 2.0)
    ),
    _run_change(
        "fast_restart", "every restart in 2 minutes", lambda scenario: with_restart_seconds(scenario, _FAST_RESTART)
    ),
    _run_change("immediate_detection", "failures detected at once", with_immediate_detection),
)
