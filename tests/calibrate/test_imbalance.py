"""Uneven loads: shares that keep their sum, rows of a record, and what is asked for."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import pstdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrate.collectives.command import imbalanced_calls as uneven_calls
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

CALL = CollectiveCall(CollectiveType.ALL_TO_ALL, 4096.0, 4, 1)
UNEVEN = replace(CALL, shares=(0.5, 0.5, 1.0, 2.0))


def _spread(seconds: float) -> TimeStatistics:
    return TimeStatistics(seconds, seconds, seconds, 3)


def _row(groups: int = 4, seconds: float = 1e-3) -> KernelSample:
    shape = MatmulShape(16, 8, 4, groups)
    return KernelSample("up", KernelKind.GROUPED_MATMUL, DType.FP32, shape, 1.0, 1.0, 1, _spread(seconds))


def _record(**rows: Any) -> CalibrationRecord:
    return CalibrationRecord(
        DeviceInfo("cpu-laptop", "a CPU"), MeasurementConditions("2026-11-23", "test", "test"), **rows
    )


@examples(100)
@given(parts=st.integers(1, 64), variation=st.floats(0.0, 2.0), total=st.integers(0, 10_000))
def test_shares_are_one_on_average_and_rows_keep_their_sum(parts: int, variation: float, total: int) -> None:
    found, rows = lognormal_shares(parts, variation), integer_shares(parts, variation, total)
    assert sum(found) == pytest.approx(parts)
    assert list(found) == sorted(found)
    assert sum(rows) == total and min(rows) >= 0
    assert all(abs(many - total * share / parts) <= 1.0 for many, share in zip(rows, found, strict=True))


def test_many_parts_vary_as_stated() -> None:
    for variation in VARIATIONS:
        assert pstdev(lognormal_shares(4096, variation)) == pytest.approx(variation, rel=0.05)
    assert set(lognormal_shares(8, 0.0)) == {1.0}


def test_the_heaviest_product_of_each_layout_is_asked_for() -> None:
    torch_uneven = pytest.importorskip("calibrate.kernels.imbalanced_gemm")

    def kernel(rows: int, operands: MatmulLayout) -> Kernel:
        sizes = (8, 4, rows) if operands is MatmulLayout.TN else (rows, 8, 4)
        shape = MatmulShape(*sizes, 4, operands)
        return Kernel("test", KernelKind.GROUPED_MATMUL, DType.FP32, float(rows), 1.0, shape)

    alone = Kernel("one", KernelKind.GROUPED_MATMUL, DType.FP32, 9e9, 1.0, MatmulShape(99, 8, 4, 1))
    asked = torch_uneven.imbalanced_cases(
        [alone, *(kernel(rows, matmul_layout) for rows in (16, 32) for matmul_layout in MatmulLayout)]
    )
    assert len(asked) == len(MatmulLayout) * len(VARIATIONS)
    assert {sum(rows) for _, rows in asked} == {4 * 32}
    assert torch_uneven.missing_cases([kernel(16, MatmulLayout.NT)], _record()) == []  # the even one comes first


def test_a_row_says_how_much_longer_uneven_groups_take() -> None:
    row = ImbalancedGemmSample(_row(), (8, 8, 16, 32), _spread(1.5e-3))
    assert (row.imbalance, row.slowdown) == (2.0, pytest.approx(0.5))
    section = imbalance_section(_record(uneven=(row,), collectives=(CollectiveSample(CALL, _spread(1e-3)),
                                                                 CollectiveSample(UNEVEN, _spread(2e-3)))))  # fmt: skip
    assert [cells[-1] for cells in section.rows] == ["+50.0%", "+100.0%"]
    assert [cells[2] for cells in section.rows] == ["2.00 x", "2.00 x"]


def test_a_record_with_uneven_rows_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = (
        ImbalancedGemmSample(_row(), (8, 8, 16, 32), _spread(1.5e-3)),
        ImbalancedGemmSample(_row(), (16, 16, 16, 16), _spread(1e-3)),
    )
    record = _record(uneven=rows, collectives=(CollectiveSample(UNEVEN, _spread(1e-3)),))
    path = tmp_path / "record.json"
    path.write_text(record_text(record))
    assert read_record(path) == record
    newer = replace(rows[0], time=_spread(3e-3))
    assert merge_records(record, _record(uneven=(newer,))).uneven == (newer, rows[1])


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("shares", [0.5, 0.5, 1.0], r"collectives\[0\].call.shares: .* no shares of 4 ranks"),
        ("shares", [0.5, 0.5, 1.0, 1.0], r"no shares of 4 ranks, 1 on average"),
        ("shares", [-1.0, 2.0, 1.0, 2.0], r"shares\[0\]: -1.0 is below zero"),
        ("rows", [8, 8, 16], r"uneven\[0\].rows: 3 groups, and the kernel has 4"),
        ("rows", [-8, 24, 16, 32], r"uneven\[0\].rows\[0\]: -8 is below zero"),
    ],
)
def test_what_cannot_have_been_measured_is_refused(key: str, value: list[Any], sentence: str, tmp_path: Path) -> None:
    uneven = (ImbalancedGemmSample(_row(), (8, 8, 16, 32), _spread(1e-3)),)
    content = json.loads(record_text(_record(uneven=uneven, collectives=(CollectiveSample(UNEVEN, _spread(1e-3)),))))
    place = content["collectives"][0]["call"] if key == "shares" else content["uneven"][0]
    place[key] = value
    path = tmp_path / "record.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=sentence):
        read_record(path)


def test_uneven_calls_are_all_to_alls_and_no_part_of_a_fit() -> None:
    gather = CollectiveCall(CollectiveType.ALL_GATHER, 4096.0, 4, 1)
    asked = uneven_calls([CALL, gather])
    assert [call.collective for call in asked] == [CollectiveType.ALL_TO_ALL] * len(VARIATIONS)
    assert all(len(call.shares) == 4 and call.max_share > 1.0 for call in asked)
    even = [CollectiveSample(replace(CALL, payload=size), _spread(1e-3 + size * 1e-9)) for size in (1e3, 1e6, 1e9)]
    wild = [CollectiveSample(replace(UNEVEN, payload=size), _spread(9.0)) for size in (1e3, 1e6, 1e9)]
    assert fit_collectives([*even, *wild]) == fit_collectives(even) != ()


def test_uneven_calls_are_shown_beside_even_ones() -> None:
    rows = CollectiveSample(CALL, _spread(1e-3)), CollectiveSample(UNEVEN, _spread(1.5e-3))
    assert "2.00 x" in imbalance_table(rows) and "+50%" in imbalance_table(rows)
    assert imbalance_table(rows[:1]) == imbalance_table(rows[1:]) == ""
    assert "2.00 x an even part" in format_collective_sample(rows[1])
