"""What measures a layer, the host and steps, without a model: made-up rows, and how often they were asked for."""

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
    HostState,
    InSituSample,
    TelemetrySample,
)

CHAIN = (InSituSample("matmul fp32", 20, isolated=2e-3, in_chain=1.8e-3), InSituSample("rmsnorm fp32", 4, 1e-3, 1.2e-3))
HOST = (HostLaunchSample(HostState.EAGER, 9e-6, 14e-6, (50, 100)),)
STEPS = (HoldoutStep("2 layers", predicted=0.98, measured=1.0), HoldoutStep("microbatch 1", 1.03, 1.0))
SOAKED = tuple(
    TelemetrySample(
        float(second), "soak", DeviceTelemetry(1980.0 - 40.0 * second, 2619.0, 600.0 + 10.0 * second, 60.0, throttled)
    )
    for second, throttled in enumerate([(), (), ("sw_power_cap",), ("sw_power_cap",)])
)


class StandIns:
    """The entry points of the parts. asked: how often each was; records: from which steps were predicted."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}
        self.records: list[CalibrationRecord] = []
        self.fails: dict[str, Exception] = {}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "StandIns":
        for part, name in (("chain", "chain_rows"), ("host", "host_rows"), ("residual", "step_rows")):
            module = SimpleNamespace(**{name: getattr(self, name)})
            monkeypatch.setitem(sys.modules, f"calibrate.{part}.measure", module)
            if f"calibrate.{part}" not in sys.modules:
                monkeypatch.setitem(sys.modules, f"calibrate.{part}", SimpleNamespace(measure=module))
        monkeypatch.setattr("calibrate.stages.burn_in_stage.burn_in", self.soak)
        return self

    def soak(self, _device: Any, seconds: float, _say: Any) -> tuple[TelemetrySample, ...]:
        self._count("soak", seconds)
        return SOAKED

    def chain_rows(self, _scenario: Any, _device: Any, seconds: float, **_: Any) -> tuple[InSituSample, ...]:
        self._count("chain", seconds)
        return CHAIN

    def host_rows(self, _scenario: Any, _device: Any, seconds: float, **_: Any) -> tuple[HostLaunchSample, ...]:
        self._count("host", seconds)
        return HOST

    def step_rows(
        self, _scenario: Any, _device: Any, record: CalibrationRecord, seconds: float
    ) -> tuple[HoldoutStep, ...]:
        self._count("residual", seconds)
        self.records.append(record)
        return STEPS

    def _count(self, part: str, seconds: float) -> None:
        self.asked[part] += 1
        self.seconds[part] = seconds
        if part in self.fails:
            raise self.fails[part]
