"""What a calibration record derives from its samples, and which records can be merged."""

from dataclasses import replace

import pytest

from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError
from clustersim.cost.calibration_record import (
    CalibrationRecord,
    CollectiveCall,
    CopySample,
    DeviceInfo,
    InterferenceSample,
    family_of,
    merge_records,
    signature_of,
)
from clustersim.cost.interference import KernelClass
from clustersim.cost.record_kinds import MeasurementOutcome, RecordOrigin
from clustersim.model.kernels import AttentionShape, MatmulLayout, MatmulShape
from clustersim.program.task import CollectiveType
from tests.cost.records import (
    CONDITIONS,
    DEVICE,
    attention_kernel,
    collective_fit,
    collective_samples,
    kernel_fit_of,
    kernel_sample,
    matmul_kernel,
    norm_kernel,
    spread,
)

FIRST, SECOND = matmul_kernel(MatmulShape(128, 256, 512)), matmul_kernel(MatmulShape(512, 256, 128))


def test_dispersion_is_half_of_what_lies_between_the_percentiles():
    assert replace(spread(2.0), p5=1.9, p95=2.3).dispersion == pytest.approx(0.1)


def test_a_signature_leaves_out_the_name_and_keeps_the_layout():
    assert signature_of(FIRST) == signature_of(replace(FIRST, name="other"))
    transposed = replace(FIRST, shape=MatmulShape(128, 256, 512, operands=MatmulLayout.TN))
    assert signature_of(FIRST) != signature_of(transposed)
    assert signature_of(replace(FIRST, shape=None)) is None
    assert kernel_sample(FIRST, 1.0).signature == signature_of(kernel_sample(FIRST, 1.0).kernel)


def test_families_are_by_kind_or_routine_and_format():
    kernels = {
        "matmul fp8": replace(FIRST, dtype=DType.FP8),
        "attention_forward bf16": attention_kernel(AttentionShape(1, 8, 8, 1, 1, 8, True)),
        "rmsnorm fused bf16": norm_kernel(8, 8),
    }
    for name, kernel in kernels.items():
        kernel_signature = signature_of(kernel)
        assert kernel_signature is not None
        assert family_of(kernel_signature) == name


def test_slowdown_is_relative_and_never_negative():
    assert InterferenceSample(kernel_sample(FIRST, 2.0), "copy", spread(2.5)).kernel_slowdown == pytest.approx(0.25)
    assert InterferenceSample(kernel_sample(FIRST, 2.0), "copy", spread(1.9)).kernel_slowdown == 0.0


def test_merging_keeps_samples_of_both_and_the_latest_duplicate():
    first = CalibrationRecord(
        DEVICE,
        replace(CONDITIONS, before={"clock": 1.0}),
        (kernel_sample(FIRST, 1.0), kernel_sample(SECOND, 2.0)),
        collective_samples({1e6: 1.0}),
        (CopySample("device", 1e9, spread(1.0)),),
        launch_interval=3e-6,
        kernel_fit=kernel_fit_of(),
        collective_fits=(collective_fit(1e-5, 1e9, 0.1),),
    )
    second = CalibrationRecord(
        DEVICE,
        replace(CONDITIONS, date="2025-01-02"),
        (kernel_sample(FIRST, 3.0),),
        collective_samples({1e6: 2.0, 2e6: 3.0}),
    )
    merged_record = merge_records(first, second)
    assert {kernel.shape: kernel.time.seconds for kernel in merged_record.kernels if kernel.time} == {
        FIRST.shape: 3.0,
        SECOND.shape: 2.0,
    }
    assert {collective.call.payload: collective.time.seconds for collective in merged_record.collectives} == {
        1e6: 2.0,
        2e6: 3.0,
    }
    assert merged_record.copies == first.copies
    assert (merged_record.launch_interval, merged_record.conditions.date, merged_record.conditions.before) == (
        3e-6,
        "2025-01-02",
        {"clock": 1.0},
    )
    assert (merged_record.kernel_fit, merged_record.collective_fits) == (None, ())


def test_merging_fills_in_missing_device_information():
    partial = CalibrationRecord(DeviceInfo("h100-sxm-80gb", ""), CONDITIONS)
    complete = CalibrationRecord(replace(DEVICE, torch="2.9", collectives="nccl 2.27.5"), CONDITIONS)
    assert merge_records(partial, complete).device == merge_records(complete, partial).device == complete.device


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (CalibrationRecord(replace(DEVICE, accelerator="h200-sxm-141gb"), CONDITIONS), "accelerator h100-sxm-80gb"),
        (CalibrationRecord(replace(DEVICE, name="GH200"), CONDITIONS), "GH200"),
        (CalibrationRecord(DEVICE, CONDITIONS, origin=RecordOrigin.PUBLISHED), "published"),
        (CalibrationRecord(DEVICE, replace(CONDITIONS, processes=2)), "processes"),
    ],
)
def test_merging_different_devices_is_rejected(other: CalibrationRecord, named: str):
    with pytest.raises(InputError, match=named):
        merge_records(CalibrationRecord(DEVICE, CONDITIONS), other)


def test_interference_uses_samples_overlapping_collectives_only() -> None:
    """Kernels of 1 s that take 1.2 s during an all-reduce, 1.5 s during a copy (which is no collective)."""
    standalone = kernel_sample(matmul_kernel(MatmulShape(64, 64, 64)), 1.0)
    copied, reduced = (
        InterferenceSample(standalone, "copy", spread(1.5)),
        InterferenceSample(standalone, "all_reduce", spread(1.2)),
    )
    record = CalibrationRecord(DEVICE, CONDITIONS)
    assert record.measured_interference is None
    assert replace(record, interference=(copied,)).measured_interference is None
    interference = replace(record, interference=(copied, reduced)).measured_interference
    assert interference is not None
    assert list(interference.kernels.values()) == pytest.approx([0.2] * len(interference.kernels)), (
        "it stands for all others"
    )
    assert not any(interference.collectives.values())


def test_interference_by_collective_and_kernel_class() -> None:
    """Matmuls of 1 s and 3 s take 1.1 and 3.9 s during all-reduces: 0.25 of the 4 s. A norm of 2 s takes 3 s.

    Attention is the mean of them, 0.375. The all-reduce of 1 s takes 1.5 and 2.5 s during matmuls, 4 s for 2 s;
    its time during the norm was not measured.
    """
    call = CollectiveCall(CollectiveType.ALL_REDUCE, 1e6, 8, 1)
    short_sample, long_sample = kernel_sample(FIRST, 1.0), kernel_sample(SECOND, 3.0)
    norm = kernel_sample(norm_kernel(8, 8), 2.0)
    samples = (
        InterferenceSample(short_sample, "all_reduce", spread(1.1), call, spread(1.0), spread(1.5)),
        InterferenceSample(long_sample, "all_reduce", spread(3.9), call, spread(1.0), spread(2.5)),
        InterferenceSample(norm, "all_reduce", spread(3.0), call),
    )
    interference = CalibrationRecord(DEVICE, CONDITIONS, interference=samples).measured_interference
    assert interference is not None
    assert [
        interference.kernels[CollectiveType.ALL_REDUCE, kernel_class] for kernel_class in KernelClass
    ] == pytest.approx([0.25, 0.375, 0.5])
    assert [interference.collectives[CollectiveType.ALL_REDUCE, item] for item in KernelClass] == pytest.approx(
        [1.0, 1.0, 1.0]
    )


def test_a_measured_sample_survives_a_subsequent_failure() -> None:
    """Out of memory the second time: the sample of the first is kept, and so is the derivation of the record."""
    failed = replace(kernel_sample(FIRST, 1.0), time=None, outcome=MeasurementOutcome.OUT_OF_MEMORY)
    before = CalibrationRecord(DEVICE, CONDITIONS, (kernel_sample(FIRST, 1.0),), derivation="made up")
    merged_record = merge_records(before, CalibrationRecord(DEVICE, CONDITIONS, (failed, kernel_sample(SECOND, 2.0))))
    assert [kernel.time for kernel in merged_record.kernels] == [spread(1.0), spread(2.0)]
    assert merged_record.derivation == "made up"
    assert merge_records(CalibrationRecord(DEVICE, CONDITIONS, (failed,)), before).kernels == before.kernels


@pytest.mark.parametrize(("first", "second", "ecc"), [(None, False, False), (False, None, False), (True, None, True)])
def test_merging_fills_in_a_missing_ecc_state(first: bool | None, second: bool | None, ecc: bool | None):
    record = CalibrationRecord(replace(DEVICE, ecc=first), CONDITIONS)
    assert merge_records(record, CalibrationRecord(replace(DEVICE, ecc=second), CONDITIONS)).device.ecc is ecc


def test_environments_are_merged_variable_by_variable() -> None:
    """One was started by torchrun, which sets variables that the other lacks; variables of both must agree."""
    device = DeviceInfo("h100-sxm-80gb", "NVIDIA H100 80GB HBM3", environment={"NCCL_ALGO": "Ring"})
    first = CalibrationRecord(device, CONDITIONS)
    started = CalibrationRecord(replace(device, environment={"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "1"}), CONDITIONS)
    assert merge_records(first, started).device == merge_records(started, first).device == started.device
    other = CalibrationRecord(replace(device, environment={"NCCL_ALGO": "Tree"}), CONDITIONS)
    with pytest.raises(InputError, match="NCCL_ALGO Ring and of NCCL_ALGO Tree cannot be merged"):
        merge_records(first, other)
