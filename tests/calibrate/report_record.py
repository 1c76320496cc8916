"""A record with all sections, of a GPU that is 10 % slower than its packaged file, with telemetry."""

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
    InSituSample,
    InterferenceSample,
    TelemetrySample,
    TimeStatistics,
)
from clustersim.cost.record_kinds import LaunchMode, MeasurementOutcome
from clustersim.cost.roofline import Roofline
from clustersim.hardware.accelerator import load_accelerator
from clustersim.program.task import CollectiveType
from tests.calibrate.synthetic_records import (
    attention_kernels,
    kernel_sample,
    memory_bound_kernels,
    sized_matmul,
    sized_matmuls,
    synthetic_record,
)

PACKAGED_ACCELERATOR = load_accelerator("h100-sxm-80gb")
SLOWDOWN = 1.1
DEVICE_FIELDS: dict[str, Any] = {
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


def time_statistics(seconds: float) -> TimeStatistics:
    return TimeStatistics(seconds, 0.98 * seconds, 1.03 * seconds, 20)


def full_record() -> CalibrationRecord:
    """Samples that take SLOWDOWN times the packaged model's time; one kernel does not fit in memory."""
    kernels = [
        *sized_matmuls((512, 4096, 8192)),
        *attention_kernels((1024, 4096)),
        *memory_bound_kernels((4096,), (4096, 8192)),
    ]
    model, telemetry = Roofline(PACKAGED_ACCELERATOR), DeviceTelemetry(1755.0, 2619.0, 694.0, 67.0, ("sw_power_cap",))
    samples = [
        replace(kernel_sample(kernel, SLOWDOWN * model.time_kernel(kernel).seconds), telemetry=telemetry)
        for kernel in kernels
    ]
    large_sample = kernel_sample(sized_matmul(65536, 65536, 65536), 1.0)
    samples.append(
        replace(
            large_sample,
            time=None,
            outcome=MeasurementOutcome.OUT_OF_MEMORY,
            source="its operands take 24 GiB; 9 GiB are free",
        )
    )
    empty_record = synthetic_record(PACKAGED_ACCELERATOR, [])
    isolated, seconds = next((sample, sample.time.seconds) for sample in samples if sample.time is not None)
    all_reduce = CollectiveCall(CollectiveType.ALL_REDUCE, 2.0**26, 8, 1)
    return replace(
        empty_record,
        device=replace(empty_record.device, **DEVICE_FIELDS),
        kernels=tuple(samples),
        launch_interval=4.2e-6,
        copies=(
            CopySample("device", 2.0**30, time_statistics(8e-4)),
            CopySample("host_to_device", 2.0**30, time_statistics(2e-2)),
        ),
        interference=(
            InterferenceSample(isolated, "copy", time_statistics(2.0 * seconds)),
            InterferenceSample(
                isolated,
                "all_reduce",
                time_statistics(1.25 * seconds),
                all_reduce,
                time_statistics(1e-3),
                time_statistics(1.1e-3),
            ),
        ),
        collectives=tuple(
            CollectiveSample(CollectiveCall(kind, 2.0**power, ranks, 1), time_statistics(1e-5 + 2.0**power / 3e11))
            for kind in (CollectiveType.ALL_REDUCE, CollectiveType.ALL_GATHER)
            for ranks in (2, 8)
            for power in range(10, 31, 4)
        ),
        telemetry=telemetry_samples(),
        in_situ=(
            InSituSample("matmul bf16", 40, isolated=20e-3, in_situ=23e-3),
            InSituSample("rmsnorm fused bf16", 8, isolated=1.0e-3, in_situ=0.8e-3),
            InSituSample("attention_forward bf16", 4, isolated=3e-3, in_situ=3.2e-3),
        ),
        host_launches=(
            HostLaunchSample(LaunchMode.EAGER, 9.2e-6, 14.1e-6, (150, 290)),
            HostLaunchSample(LaunchMode.GRAPH, 3e-5, 3.3e-5, (1, 1)),
        ),
        gpus=tuple(
            GpuSample(f"cuda:{index}", time_statistics(1e-3 * (1.0 + 0.01 * index)), telemetry) for index in range(8)
        ),
        holdout_steps=(HoldoutStep("12 layers", 0.98, 1.0), HoldoutStep("6 layers", 1.013, 1.0)),
    )


def telemetry_samples() -> tuple[TelemetrySample, ...]:
    """Minutes of a session: burn-in with a falling clock 1, kernels 8, kernels in situ 5, host launches 2."""
    samples = []
    for stage, begin, end in (("burn_in", 0, 60), ("kernels", 60, 540), ("in_situ", 540, 840), ("host", 840, 960)):
        for second in range(begin, end, 4):
            clock_drop = min(1.0, second / 50.0)
            is_busy = stage != "host"
            state = DeviceTelemetry(
                sm_clock_mhz=(1980.0 - 225.0 * clock_drop + 15.0 * (second % 3)) if is_busy else 1965.0,
                memory_clock_mhz=2619.0,
                power_w=(600.0 + 95.0 * clock_drop - 10.0 * (second % 5)) if is_busy else 260.0,
                temperature_c=45.0 + 22.0 * clock_drop,
                throttled=("sw_power_cap",) if is_busy and clock_drop > 0.5 else (),
            )
            samples.append(TelemetrySample(float(second), stage, state))
    return tuple(samples)
