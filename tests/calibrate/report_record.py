"""A record that has everything: a GPU that is a tenth slower than its shipped file, with what it did meanwhile."""

from dataclasses import replace
from typing import Any

from clustersim.cost.calibration_record import (
    CalibrationRecord,
    CollectiveCall,
    CollectiveSample,
    CopySample,
    DeviceTelemetry,
    GpuSample,
    HoldoutStep,
    HostLaunchSample,
    HostState,
    InSituSample,
    InterferenceSample,
    MeasurementOutcome,
    TelemetrySample,
    TimeStatistics,
)
from clustersim.cost.roofline import Roofline
from clustersim.hardware.accelerator import load_accelerator
from clustersim.program.task import CollectiveType
from tests.calibrate.synthetic_records import attentions, matmul, matmuls, record_of, row, streams

SHIPPED = load_accelerator("h100-sxm-80gb")
LONGER = 1.1
FACTS: dict[str, Any] = {
    "name": "NVIDIA H100 80GB HBM3",
    "torch": "2.13.0",
    "cuda": "12.9",
    "collectives": "nccl 2.27.5",
    "host": "AMD EPYC 9654",
    "power_limit_w": 700.0,
    "ecc": True,
    "mig": False,
    "environment": {"NCCL_ALGO": "Ring"},
}


def spread(seconds: float) -> TimeStatistics:
    return TimeStatistics(seconds, 0.98 * seconds, 1.03 * seconds, 20)


def full_record() -> CalibrationRecord:
    """Rows that take LONGER times the shipped model's; one kernel does not fit, one is not there."""
    kernels = [*matmuls((512, 4096, 8192)), *attentions((1024, 4096)), *streams((4096,), (4096, 8192))]
    model, under = Roofline(SHIPPED), DeviceTelemetry(1755.0, 2619.0, 694.0, 67.0, ("sw_power_cap",))
    rows = [replace(row(kernel, LONGER * model.time_kernel(kernel).seconds), under=under) for kernel in kernels]
    lost = row(matmul(65536, 65536, 65536), 1.0)
    rows.append(
        replace(
            lost, time=None, outcome=MeasurementOutcome.OUT_OF_MEMORY, source="its operands take 24 GiB; 9 GiB are free"
        )
    )
    plain = record_of(SHIPPED, [])
    alone, seconds = next(
        (kernel_sample, kernel_sample.time.seconds) for kernel_sample in rows if kernel_sample.time is not None
    )
    reduce = CollectiveCall(CollectiveType.ALL_REDUCE, 2.0**26, 8, 1)
    return replace(
        plain,
        device=replace(plain.device, **FACTS),
        kernels=tuple(rows),
        launch_interval=4.2e-6,
        copies=(CopySample("device", 2.0**30, spread(8e-4)), CopySample("host_to_device", 2.0**30, spread(2e-2))),
        beside=(
            InterferenceSample(alone, "copy", spread(2.0 * seconds)),
            InterferenceSample(alone, "all_reduce", spread(1.25 * seconds), reduce, spread(1e-3), spread(1.1e-3)),
        ),
        collectives=tuple(
            CollectiveSample(CollectiveCall(kind, 2.0**power, ranks, 1), spread(1e-5 + 2.0**power / 3e11))
            for kind in (CollectiveType.ALL_REDUCE, CollectiveType.ALL_GATHER)
            for ranks in (2, 8)
            for power in range(10, 31, 4)
        ),
        moments=moments(),
        chain=(
            InSituSample("matmul bf16", 40, isolated=20e-3, in_chain=23e-3),
            InSituSample("rmsnorm fused bf16", 8, isolated=1.0e-3, in_chain=0.8e-3),
            InSituSample("attention_forward bf16", 4, isolated=3e-3, in_chain=3.2e-3),
        ),
        host=(
            HostLaunchSample(HostState.EAGER, 9.2e-6, 14.1e-6, (150, 290)),
            HostLaunchSample(HostState.GRAPH, 3e-5, 3.3e-5, (1, 1)),
        ),
        gpus=tuple(GpuSample(f"cuda:{place}", spread(1e-3 * (1.0 + 0.01 * place)), under) for place in range(8)),
        steps=(HoldoutStep("12 layers", 0.98, 1.0), HoldoutStep("6 layers", 1.013, 1.0)),
    )


def moments() -> tuple[TelemetrySample, ...]:
    """Two minutes of soak in which the clock falls, eight of kernels, five of a chain."""
    found = []
    for part, begin, end in (("soak", 0, 60), ("kernels", 60, 540), ("chain", 540, 840), ("host", 840, 960)):
        for second in range(begin, end, 4):
            fallen = min(1.0, second / 50.0)
            busy = part != "host"
            state = DeviceTelemetry(
                sm_clock_mhz=(1980.0 - 225.0 * fallen + 15.0 * (second % 3)) if busy else 1965.0,
                memory_clock_mhz=2619.0,
                power_w=(600.0 + 95.0 * fallen - 10.0 * (second % 5)) if busy else 260.0,
                temperature_c=45.0 + 22.0 * fallen,
                throttled=("sw_power_cap",) if busy and fallen > 0.5 else (),
            )
            found.append(TelemetrySample(float(second), part, state))
    return tuple(found)
