"""Imbalanced loads: shares that keep their sum, samples of a record, and the selected cases."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import pstdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrate.collectives.command import imbalanced_calls
from calibrate.collectives.tables import format_collective_sample, imbalance_table
from calibrate.fit.alpha_beta import fit_collectives
from calibrate.imbalanced_shares import VARIATIONS, integer_shares, lognormal_shares
from calibrate.report.imbalance import imbalance_section
from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError
from clustersim.cost.calibration_record import (
    CalibrationRecord,
    CollectiveCall,
    CollectiveSample,
    DeviceInfo,
    ImbalancedGemmSample,
    KernelSample,
    MeasurementConditions,
    TimeStatistics,
    merge_records,
)
from clustersim.cost.record_file import read_record, record_text
from clustersim.model.kernels import Kernel, KernelKind, MatmulLayout, MatmulShape
from clustersim.program.task import CollectiveType
from tests.conftest import examples

BALANCED_CALL = CollectiveCall(CollectiveType.ALL_TO_ALL, 4096.0, 4, 1)
IMBALANCED_CALL = replace(BALANCED_CALL, shares=(0.5, 0.5, 1.0, 2.0))


def _constant_time(seconds: float) -> TimeStatistics:
    return TimeStatistics(seconds, seconds, seconds, 3)


def _grouped_sample(groups: int = 4, seconds: float = 1e-3) -> KernelSample:
    shape = MatmulShape(16, 8, 4, groups)
    return KernelSample("up", KernelKind.GROUPED_MATMUL, DType.FP32, shape, 1.0, 1.0, 1, _constant_time(seconds))


def _record(**sections: Any) -> CalibrationRecord:
    return CalibrationRecord(
        DeviceInfo("cpu-laptop", "a CPU"), MeasurementConditions("2026-11-23", "test", "test"), **sections
    )


@examples(100)
@given(part_count=st.integers(1, 64), variation=st.floats(0.0, 2.0), total=st.integers(0, 10_000))
def test_shares_average_to_one_and_integer_shares_keep_the_sum(part_count: int, variation: float, total: int) -> None:
    fractions, counts = lognormal_shares(part_count, variation), integer_shares(part_count, variation, total)
    assert sum(fractions) == pytest.approx(part_count)
    assert list(fractions) == sorted(fractions)
    assert sum(counts) == total and min(counts) >= 0
    assert all(abs(count - total * share / part_count) <= 1.0 for count, share in zip(counts, fractions, strict=True))


def test_shares_have_the_requested_variation() -> None:
    for variation in VARIATIONS:
        assert pstdev(lognormal_shares(4096, variation)) == pytest.approx(variation, rel=0.05)
    assert set(lognormal_shares(8, 0.0)) == {1.0}


def test_largest_grouped_matmul_per_layout_is_measured() -> None:
    imbalanced_gemm = pytest.importorskip("calibrate.kernels.imbalanced_gemm")

    def kernel(group_rows: int, operands: MatmulLayout) -> Kernel:
        sizes = (8, 4, group_rows) if operands is MatmulLayout.TN else (group_rows, 8, 4)
        shape = MatmulShape(*sizes, 4, operands)
        return Kernel("test", KernelKind.GROUPED_MATMUL, DType.FP32, float(group_rows), 1.0, shape)

    single_group = Kernel("one", KernelKind.GROUPED_MATMUL, DType.FP32, 9e9, 1.0, MatmulShape(99, 8, 4, 1))
    cases = imbalanced_gemm.imbalanced_cases(
        [single_group, *(kernel(rows, matmul_layout) for rows in (16, 32) for matmul_layout in MatmulLayout)]
    )
    assert len(cases) == len(MatmulLayout) * len(VARIATIONS)
    assert {sum(rows) for _, rows in cases} == {4 * 32}
    assert (
        imbalanced_gemm.missing_cases([kernel(16, MatmulLayout.NT)], _record()) == []
    )  # the balanced kernel must be measured first


def test_imbalance_slowdown_is_reported() -> None:
    sample = ImbalancedGemmSample(_grouped_sample(), (8, 8, 16, 32), _constant_time(1.5e-3))
    assert (sample.imbalance, sample.slowdown) == (2.0, pytest.approx(0.5))
    section = imbalance_section(
        _record(
            imbalanced_gemms=(sample,),
            collectives=(
                CollectiveSample(BALANCED_CALL, _constant_time(1e-3)),
                CollectiveSample(IMBALANCED_CALL, _constant_time(2e-3)),
            ),
        )
    )
    assert [cells[-1] for cells in section.rows] == ["+50.0%", "+100.0%"]
    assert [cells[2] for cells in section.rows] == ["2.00 x", "2.00 x"]


def test_record_with_imbalanced_samples_round_trip(tmp_path: Path) -> None:
    samples = (
        ImbalancedGemmSample(_grouped_sample(), (8, 8, 16, 32), _constant_time(1.5e-3)),
        ImbalancedGemmSample(_grouped_sample(), (16, 16, 16, 16), _constant_time(1e-3)),
    )
    record = _record(imbalanced_gemms=samples, collectives=(CollectiveSample(IMBALANCED_CALL, _constant_time(1e-3)),))
    path = tmp_path / "record.json"
    path.write_text(record_text(record))
    assert read_record(path) == record
    newer = replace(samples[0], time=_constant_time(3e-3))
    assert merge_records(record, _record(imbalanced_gemms=(newer,))).imbalanced_gemms == (newer, samples[1])


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("shares", [0.5, 0.5, 1.0], r"collectives\[0\].call.shares: .* no shares of 4 ranks"),
        ("shares", [0.5, 0.5, 1.0, 1.0], r"no shares of 4 ranks, 1 on average"),
        ("shares", [-1.0, 2.0, 1.0, 2.0], r"shares\[0\]: -1.0 is below zero"),
        ("tokens_per_group", [8, 8, 16], r"imbalanced_gemms\[0\]\.tokens_per_group: 3 groups.*4"),
        ("tokens_per_group", [-8, 24, 16, 32], r"imbalanced_gemms\[0\].tokens_per_group\[0\]: -8 is below zero"),
    ],
)
def test_invalid_imbalanced_samples_are_refused(key: str, value: list[Any], sentence: str, tmp_path: Path) -> None:
    samples = (ImbalancedGemmSample(_grouped_sample(), (8, 8, 16, 32), _constant_time(1e-3)),)
    content = json.loads(
        record_text(
            _record(imbalanced_gemms=samples, collectives=(CollectiveSample(IMBALANCED_CALL, _constant_time(1e-3)),))
        )
    )
    section = content["collectives"][0]["call"] if key == "shares" else content["imbalanced_gemms"][0]
    section[key] = value
    path = tmp_path / "record.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=sentence):
        read_record(path)


def test_imbalanced_calls_are_all_to_alls_and_excluded_from_fits() -> None:
    gather = CollectiveCall(CollectiveType.ALL_GATHER, 4096.0, 4, 1)
    calls = imbalanced_calls([BALANCED_CALL, gather])
    assert [call.collective for call in calls] == [CollectiveType.ALL_TO_ALL] * len(VARIATIONS)
    assert all(len(call.shares) == 4 and call.max_share > 1.0 for call in calls)
    balanced = [
        CollectiveSample(replace(BALANCED_CALL, payload=size), _constant_time(1e-3 + size * 1e-9))
        for size in (1e3, 1e6, 1e9)
    ]
    imbalanced = [
        CollectiveSample(replace(IMBALANCED_CALL, payload=size), _constant_time(9.0)) for size in (1e3, 1e6, 1e9)
    ]
    assert fit_collectives([*balanced, *imbalanced]) == fit_collectives(balanced) != ()


def test_imbalance_table_compares_with_balanced_calls() -> None:
    samples = (
        CollectiveSample(BALANCED_CALL, _constant_time(1e-3)),
        CollectiveSample(IMBALANCED_CALL, _constant_time(1.5e-3)),
    )
    assert "2.00 x" in imbalance_table(samples) and "+50%" in imbalance_table(samples)
    assert imbalance_table(samples[:1]) == imbalance_table(samples[1:]) == ""
    assert "2.00 x an even part" in format_collective_sample(samples[1])
