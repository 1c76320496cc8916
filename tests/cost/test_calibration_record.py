"""What a record says of its rows, and which records are one."""

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
    MeasurementOutcome,
    RecordOrigin,
    family_of,
    merge_records,
    signature_of,
)
from clustersim.cost.interference import KernelClass
from clustersim.model.kernels import AttentionShape, MatmulLayout, MatmulShape
from clustersim.program.task import CollectiveType
from tests.cost.records import CONDITIONS, DEVICE, attention, calls, fit, line, product, row, spread, streamed

FIRST, SECOND = product(MatmulShape(128, 256, 512)), product(MatmulShape(512, 256, 128))


def test_dispersion_is_half_of_what_lies_between_the_percentiles():
    assert replace(spread(2.0), p5=1.9, p95=2.3).dispersion == pytest.approx(0.1)


def test_a_signature_leaves_out_the_name_and_keeps_the_layout():
    assert signature_of(FIRST) == signature_of(replace(FIRST, name="other"))
    turned = replace(FIRST, shape=MatmulShape(128, 256, 512, operands=MatmulLayout.TN))
    assert signature_of(FIRST) != signature_of(turned)
    assert signature_of(replace(FIRST, shape=None)) is None
    assert row(FIRST, 1.0).signature == signature_of(row(FIRST, 1.0).kernel)


def test_families_are_by_kind_or_routine_and_format():
    kernels = {
        "matmul fp8": replace(FIRST, dtype=DType.FP8),
        "attention_forward bf16": attention(AttentionShape(1, 8, 8, 1, 1, 8, True)),
        "rmsnorm fused bf16": streamed(8, 8),
    }
    for name, kernel in kernels.items():
        sought = signature_of(kernel)
        assert sought is not None
        assert family_of(sought) == name


def test_slowing_is_the_part_by_which_a_kernel_took_longer_and_never_below_zero():
    assert InterferenceSample(row(FIRST, 2.0), "copy", spread(2.5)).kernel_slowdown == pytest.approx(0.25)
    assert InterferenceSample(row(FIRST, 2.0), "copy", spread(1.9)).kernel_slowdown == 0.0


def test_merging_keeps_rows_of_both_and_the_later_of_two_of_the_same():
    first = CalibrationRecord(
        DEVICE,
        replace(CONDITIONS, before={"clock": 1.0}),
        (row(FIRST, 1.0), row(SECOND, 2.0)),
        calls({1e6: 1.0}),
        (CopySample("device", 1e9, spread(1.0)),),
        launch_interval=3e-6,
        kernel_fit=fit(),
        collective_fits=(line(1e-5, 1e9, 0.1),),
    )
    second = CalibrationRecord(
        DEVICE, replace(CONDITIONS, date="2025-01-02"), (row(FIRST, 3.0),), calls({1e6: 2.0, 2e6: 3.0})
    )
    both = merge_records(first, second)
    assert {kernel.shape: kernel.time.seconds for kernel in both.kernels if kernel.time} == {
        FIRST.shape: 3.0,
        SECOND.shape: 2.0,
    }
    assert {collective.call.payload: collective.time.seconds for collective in both.collectives} == {1e6: 2.0, 2e6: 3.0}
    assert both.copies == first.copies
    assert (both.launch_interval, both.conditions.date, both.conditions.before) == (3e-6, "2025-01-02", {"clock": 1.0})
    assert (both.kernel_fit, both.collective_fits) == (None, ())


def test_what_one_record_does_not_know_of_the_device_the_other_does():
    short = CalibrationRecord(DeviceInfo("h100-sxm-80gb", ""), CONDITIONS)
    whole = CalibrationRecord(replace(DEVICE, torch="2.9", collectives="nccl 2.27.5"), CONDITIONS)
    assert merge_records(short, whole).device == merge_records(whole, short).device == whole.device


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (CalibrationRecord(replace(DEVICE, accelerator="h200-sxm-141gb"), CONDITIONS), "accelerator h100-sxm-80gb"),
        (CalibrationRecord(replace(DEVICE, name="GH200"), CONDITIONS), "GH200"),
        (CalibrationRecord(DEVICE, CONDITIONS, origin=RecordOrigin.PUBLISHED), "published"),
        (CalibrationRecord(DEVICE, replace(CONDITIONS, processes=2)), "processes"),
    ],
)
def test_records_of_different_things_are_refused(other: CalibrationRecord, named: str):
    with pytest.raises(InputError, match=named):
        merge_records(CalibrationRecord(DEVICE, CONDITIONS), other)


def test_interference_is_that_beside_collectives() -> None:
    """Kernels of 1 s that take 1.2 s beside an all-reduce, 1.5 s beside a copy (which is no collective)."""
    alone = row(product(MatmulShape(64, 64, 64)), 1.0)
    copied, reduced = (
        InterferenceSample(alone, "copy", spread(1.5)),
        InterferenceSample(alone, "all_reduce", spread(1.2)),
    )
    record = CalibrationRecord(DEVICE, CONDITIONS)
    assert record.interference is None
    assert replace(record, beside=(copied,)).interference is None
    found = replace(record, beside=(copied, reduced)).interference
    assert found is not None
    assert list(found.kernels.values()) == pytest.approx([0.2] * len(found.kernels)), "it stands for all others"
    assert not any(found.collectives.values())


def test_interference_is_of_kinds_of_collectives_and_classes_of_kernels() -> None:
    """A product of 1 s and one of 3 s take 1.1 and 3.9 s beside all-reduces: 0.25 of the 4 s. A norm of 2 s takes 3 s.

    Attention is the mean of them, 0.375. The all-reduce of 1 s takes 1.5 and 2.5 s beside products, 4 s for 2 s; what
    it takes beside the norm was not measured.
    """
    call = CollectiveCall(CollectiveType.ALL_REDUCE, 1e6, 8, 1)
    short, long = row(FIRST, 1.0), row(SECOND, 3.0)
    norm = row(streamed(8, 8), 2.0)
    rows = (
        InterferenceSample(short, "all_reduce", spread(1.1), call, spread(1.0), spread(1.5)),
        InterferenceSample(long, "all_reduce", spread(3.9), call, spread(1.0), spread(2.5)),
        InterferenceSample(norm, "all_reduce", spread(3.0), call),
    )
    found = CalibrationRecord(DEVICE, CONDITIONS, beside=rows).interference
    assert found is not None
    assert [found.kernels[CollectiveType.ALL_REDUCE, kernel_class] for kernel_class in KernelClass] == pytest.approx(
        [0.25, 0.375, 0.5]
    )
    assert [found.collectives[CollectiveType.ALL_REDUCE, item] for item in KernelClass] == pytest.approx(
        [1.0, 1.0, 1.0]
    )


def test_what_was_measured_stays_where_a_later_session_could_not_measure_it() -> None:
    """Out of memory the second time: the row of the first is kept, and so is how the record came about."""
    failed = replace(row(FIRST, 1.0), time=None, outcome=MeasurementOutcome.OUT_OF_MEMORY)
    before = CalibrationRecord(DEVICE, CONDITIONS, (row(FIRST, 1.0),), derivation="made up")
    found = merge_records(before, CalibrationRecord(DEVICE, CONDITIONS, (failed, row(SECOND, 2.0))))
    assert [kernel.time for kernel in found.kernels] == [spread(1.0), spread(2.0)]
    assert found.derivation == "made up"
    assert merge_records(CalibrationRecord(DEVICE, CONDITIONS, (failed,)), before).kernels == before.kernels


@pytest.mark.parametrize(("first", "second", "ecc"), [(None, False, False), (False, None, False), (True, None, True)])
def test_what_one_device_does_not_know_is_the_others(first: bool | None, second: bool | None, ecc: bool | None):
    ours = CalibrationRecord(replace(DEVICE, ecc=first), CONDITIONS)
    assert merge_records(ours, CalibrationRecord(replace(DEVICE, ecc=second), CONDITIONS)).device.ecc is ecc


def test_environments_are_merged_variable_by_variable() -> None:
    """One was started by torchrun, which sets what the other does not say; what both say must agree."""
    device = DeviceInfo("h100-sxm-80gb", "NVIDIA H100 80GB HBM3", environment={"NCCL_ALGO": "Ring"})
    first = CalibrationRecord(device, CONDITIONS)
    started = CalibrationRecord(replace(device, environment={"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "1"}), CONDITIONS)
    assert merge_records(first, started).device == merge_records(started, first).device == started.device
    other = CalibrationRecord(replace(device, environment={"NCCL_ALGO": "Tree"}), CONDITIONS)
    with pytest.raises(InputError, match="NCCL_ALGO Ring and of NCCL_ALGO Tree cannot be merged"):
        merge_records(first, other)
