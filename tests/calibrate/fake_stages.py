"""Fakes of the measurements of in-situ kernels, host launches and steps: constant samples, and call counts."""

import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from clustersim.cost.calibration_record import (
    CalibrationRecord,
    DeviceTelemetry,
    HoldoutStep,
    HostLaunchSample,
    InSituSample,
    TelemetrySample,
)
from clustersim.cost.record_kinds import LaunchMode

IN_SITU_SAMPLES = (
    InSituSample("matmul fp32", 20, isolated=2e-3, in_situ=1.8e-3),
    InSituSample("rmsnorm fp32", 4, 1e-3, 1.2e-3),
)
HOST_SAMPLES = (HostLaunchSample(LaunchMode.EAGER, 9e-6, 14e-6, (50, 100)),)
HOLDOUT_STEPS = (HoldoutStep("2 layers", predicted=0.98, measured=1.0), HoldoutStep("microbatch 1", 1.03, 1.0))
BURN_IN_SAMPLES = tuple(
    TelemetrySample(
        float(second),
        "burn_in",
        DeviceTelemetry(1980.0 - 40.0 * second, 2619.0, 600.0 + 10.0 * second, 60.0, throttled),
    )
    for second, throttled in enumerate([(), (), ("sw_power_cap",), ("sw_power_cap",)])
)


class FakeStages:
    """The entry points of the stages.

    call_counts: calls per stage; seconds: time budget per stage; records: from which steps were predicted;
    errors: to raise, by stage.
    """

    def __init__(self) -> None:
        self.call_counts: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}
        self.records: list[CalibrationRecord] = []
        self.errors: dict[str, Exception] = {}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "FakeStages":
        for package, name in (
            ("in_situ", "measure_in_situ"),
            ("host", "measure_host_launches"),
            ("holdout", "measure_holdout_steps"),
        ):
            module = SimpleNamespace(**{name: getattr(self, name)})
            monkeypatch.setitem(sys.modules, f"calibrate.{package}.measure", module)
            if f"calibrate.{package}" not in sys.modules:
                monkeypatch.setitem(sys.modules, f"calibrate.{package}", SimpleNamespace(measure=module))
        monkeypatch.setattr("calibrate.stages.burn_in_stage.burn_in", self.burn_in)
        return self

    def burn_in(self, _device: Any, seconds: float, _notify: Any) -> tuple[TelemetrySample, ...]:
        self._count_call("burn_in", seconds)
        return BURN_IN_SAMPLES

    def measure_in_situ(self, _scenario: Any, _device: Any, seconds: float, **_: Any) -> tuple[InSituSample, ...]:
        self._count_call("in_situ", seconds)
        return IN_SITU_SAMPLES

    def measure_host_launches(
        self, _scenario: Any, _device: Any, seconds: float, **_: Any
    ) -> tuple[HostLaunchSample, ...]:
        self._count_call("host", seconds)
        return HOST_SAMPLES

    def measure_holdout_steps(
        self, _scenario: Any, _device: Any, record: CalibrationRecord, seconds: float
    ) -> tuple[HoldoutStep, ...]:
        self._count_call("holdout", seconds)
        self.records.append(record)
        return HOLDOUT_STEPS

    def _count_call(self, stage: str, seconds: float) -> None:
        self.call_counts[stage] += 1
        self.seconds[stage] = seconds
        if stage in self.errors:
            raise self.errors[stage]
