"""The flat span table: its contents against the trace, and round trips of its file formats."""

import csv
import io
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clustersim.common.errors import InputError, OutputError
from clustersim.common.table import Columns, ColumnType
from clustersim.program.task import ComputeTask
from clustersim.report.export.rank_selection import count_spans, describe_trace_ranks
from clustersim.report.export.span_table import TraceExport
from clustersim.report.export.table import COLUMNS, build_columns, table_writer, write_csv
from clustersim.report.export.write_traces import write_table_file
from clustersim.results.simulation_result import SimulationResult
from tests.report.small_trace import simulated

NO_OPERATION = -1  # operation index of table rows of tasks


def span_columns(result: SimulationResult, *ranks: int) -> Columns:
    rank_columns = [
        build_columns(result, *export) for export in TraceExport(result, describe_trace_ranks(result, ranks))
    ]
    return {name: np.concatenate([columns[name] for columns in rank_columns]) for name in rank_columns[0]}


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_table_has_all_tasks_and_operations() -> None:
    result = simulated()
    rows = span_columns(result, *range(8))
    assert len(rows["rank"]) == count_spans(result, range(8))
    names = list(zip(rows["rank"].tolist(), rows["task"].tolist(), rows["operation"].tolist(), strict=True))
    assert len(set(names)) == len(names)
    program = result.program.programs[1]
    expected = [
        (task_id, operation_index)
        for task_id, task in enumerate(program.tasks)
        for operation_index in (
            NO_OPERATION,
            *(range(len(task.segment.operations)) if isinstance(task, ComputeTask) else ()),
        )
    ]
    assert sorted((task, operation) for rank, task, operation in names if rank == 6) == expected


def test_times_equal_the_trace(tmp_path: Path) -> None:
    result = simulated()
    write_table_file(result, tmp_path / "spans.csv", range(8))
    tasks = [row for row in read_csv(tmp_path / "spans.csv") if row["rank"] == "7" and not row["operation"]]
    trace = result.trace
    rows = trace.rank_events(4)
    assert {row["simulated_rank"] for row in tasks} == {"4"}
    assert sorted(float(row["queued"]) for row in tasks) == sorted(trace.queued_times(rows).tolist())
    for name in ("ready", "start", "end", "waited", "slowed", "contended"):
        assert sorted(float(row[name]) for row in tasks) == sorted(getattr(trace, name)[rows].tolist())


def test_operations_are_sequential_within_their_pass() -> None:
    rows = span_columns(simulated(), 0, 4)
    passes = {}
    for rank, task, operation, start, end in zip(
        *(rows[name].tolist() for name in ("rank", "task", "operation", "start", "end")), strict=True
    ):
        if operation == NO_OPERATION:
            passes[rank, task] = (start, end)
        else:
            begin, stop = passes[rank, task]
            assert begin - 1e-12 <= start <= end <= stop + 1e-12
            passes[rank, task] = (end, stop)


def test_pass_totals_equal_operation_sums() -> None:
    rows = span_columns(simulated(), 4)
    for name in ("flop", "memory_bytes", "bytes"):
        inside, outside = Counter[int](), Counter[int]()
        for task, operation, kind, value in zip(
            *(rows[key].tolist() for key in ("task", "operation", "kind", name)), strict=True
        ):
            if not math.isnan(value) and (operation >= 0 or kind == "pass"):
                (inside if operation >= 0 else outside)[task] += value
        assert inside
        for task, value in inside.items():
            assert outside[task] == pytest.approx(value)


def test_coordinates_equal_the_layout() -> None:
    rows = span_columns(simulated(), *range(8))
    assert (rows["tp"] + 2 * rows["dp"] + 4 * rows["pp"] == rows["rank"]).all()
    assert (rows["stage"] == rows["pp"]).all()
    assert (rows["cp"] == 0).all()


def test_causes_end_before_their_dependents_start() -> None:
    """For tasks of the rank itself, identified by (rank, task) in the table."""
    rows = span_columns(simulated("steps=2"), *range(8))
    task = rows["operation"] == NO_OPERATION
    ends = dict(zip(zip(rows["rank"][task], rows["task"][task], strict=True), rows["end"][task], strict=True))
    caused = task & (rows["predecessor_task"] >= 0)
    for rank, task_id, start in zip(
        rows["predecessor_rank"][caused], rows["predecessor_task"][caused], rows["start"][caused], strict=True
    ):
        assert ends[rank, task_id] <= start + 1e-12
    assert np.count_nonzero(caused & (rows["predecessor_rank"] == 7)) > 0  # of a rank that was not simulated
    assert set(rows["step"].tolist()) == {0, 1}


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_arrow_and_parquet_equal_csv(tmp_path: Path, suffix: str) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'clustersim[table]'")
    from pyarrow import parquet

    result = simulated()
    for name in (".csv", suffix):
        assert write_table_file(result, tmp_path / f"spans{name}", [0, 4, 5]) == 3
    path = tmp_path / f"spans{suffix}"
    arrow_table = parquet.read_table(path) if suffix == ".parquet" else arrow.ipc.open_file(path).read_all()
    assert arrow_table.schema.names == list(COLUMNS)
    assert arrow_table.schema.field("flop").metadata[b"meaning"].decode() == COLUMNS["flop"][1]
    rows = read_csv(tmp_path / "spans.csv")
    for name, (kind, _) in COLUMNS.items():
        column = arrow_table.column(name).to_pylist()
        read_as: Any = int if kind is ColumnType.INTEGER else float if kind is ColumnType.NUMBER else str
        assert column == [read_as(row[name]) if row[name] else None for row in rows]


def test_csv_quoting_round_trip() -> None:
    rows = {name: values[:1].copy() for name, values in span_columns(simulated(), 0).items()}
    rows["name"] = np.array(['a "b",\nc \ud800'], dtype=object)  # a lone surrogate
    file = io.BytesIO()
    write_csv([rows], file)
    [row] = csv.DictReader(io.StringIO(file.getvalue().decode(), newline=""))
    assert row["name"] == 'a "b",\nc ?'


@pytest.mark.parametrize("name", ["spans", "spans.txt", "spans.json", "", "-", "spans.CSV"])
def test_unsupported_table_suffix_is_rejected(name: str) -> None:
    with pytest.raises(InputError, match=r"--spans .*name a file that ends in \.csv, \.parquet or \.arrow"):
        table_writer(name)


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".arrow"])
def test_missing_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    if suffix == ".csv":
        assert write_table_file(simulated(), tmp_path / "spans.csv") == 2
        return
    with pytest.raises(InputError, match=r"pip install .clustersim\[table\].*\.csv"):
        write_table_file(simulated(), tmp_path / f"spans{suffix}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", [".csv", ".arrow"])
def test_too_large_table_is_rejected_with_its_size(tmp_path: Path, suffix: str) -> None:
    if suffix == ".arrow":
        pytest.importorskip("pyarrow")
    result, path = simulated(), tmp_path / f"spans{suffix}"
    write_table_file(result, path, range(8))
    size = path.stat().st_size
    write_table_file(result, path, range(8), max_bytes=1.3 * size)
    with pytest.raises(OutputError, match=r"on 8 ranks would be about .*--ranks.*--force"):
        write_table_file(result, path, range(8), max_bytes=0.7 * size)


def test_input_and_weight_gradient_have_categories() -> None:
    rows = span_columns(simulated("schedule=zb-1p"), 0)
    assert {"backward: input gradient", "backward: weight gradient"} <= set(rows["category"].tolist())


def test_chunk_column() -> None:
    rows = span_columns(simulated("schedule={interleaved: {chunks: 2}}"), 0)
    assert set(rows["chunk"].tolist()) == {-1, 0, 1}
