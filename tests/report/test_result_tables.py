"""Tables of a result: they agree with the trace, with the JSON, and with each other."""

from collections import Counter
from functools import cache

import numpy as np
import pytest

from clustersim.common.errors import InputError
from clustersim.common.table import Values
from clustersim.memory.footprint import MemoryCategory
from clustersim.program.task import CommOp
from clustersim.report.export import table as span_columns
from clustersim.report.export.rank_selection import count_spans
from clustersim.report.rendered_result import RenderedResult, simulate
from clustersim.scenario import Scenario
from tests.report.small_trace import SMALL_MAPPING

OVERLAPPED = ("layout.sequence_parallel=true", "layout.tp_comm_overlap=true")
EVERY_RANK = "all"


@cache
def result(*overrides: str) -> RenderedResult:
    """8 GPUs, tp 2, pp 2, dp 2, one simulated rank of each stage; collectives overlap with matmuls."""
    overlapped = ("layout.async_tensor_model_parallel_allreduce=true", *overrides)
    return simulate(Scenario.from_mapping(SMALL_MAPPING, overlapped, default_name="small"))


def sum_by(names: Values, values: Values) -> dict[str, float]:
    """Sums of values by name."""
    sums = Counter[str]()
    for name, value in zip(names.tolist(), values.tolist(), strict=True):
        sums[name] += value
    return dict(sums)


def test_span_times_are_those_of_the_trace() -> None:
    spans, trace = result().spans(), result().trace
    tasks = spans["operation"] < 0
    assert spans.row_count == count_spans(result())
    assert set(spans["rank"].tolist()) == set(trace.simulated_ranks.tolist())
    assert np.array_equal(np.sort(spans["queued"][tasks]), np.sort(trace.queued_times(np.arange(len(trace)))))
    for name in ("ready", "start", "end", "waited", "slowed", "contended"):
        assert np.array_equal(np.sort(spans[name][tasks]), np.sort(getattr(trace, name)))
    assert spans["end"].max() == pytest.approx(result().to_json()["step_time_s"])
    operations = result().operation_spans(4)
    of_rank = (spans["rank"] == 4) & ~tasks
    assert np.array_equal(np.sort(spans["start"][of_rank]), np.sort(operations.start))


def test_spans_of_selected_ranks() -> None:
    assert set(result().spans(0, 5)["rank"].tolist()) == {0, 5}
    assert set(result().spans(5, "stage:0")["rank"].tolist()) == {0, 1, 2, 3, 5}
    with pytest.raises(InputError, match=r"8 does not name ranks from 0 to 7"):
        result().spans(8)


def test_too_many_spans_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_columns, "MAX_ROWS", count_spans(result(), [0]))
    assert result().spans(0).row_count == count_spans(result(), [0])
    with pytest.raises(InputError, match=r"at most .*name fewer ranks"):
        result().spans(0, 1)


@pytest.mark.parametrize("overrides", [(), ("steps=2",), ("training.recompute=full",), OVERLAPPED])
def test_kernels_are_the_spans_of_all_ranks(overrides: tuple[str, ...]) -> None:
    """By shape: as many executions, as much FLOP and memory traffic as the spans of kernels."""
    kernels, spans = result(*overrides).kernels, result(*overrides).spans(EVERY_RANK)
    is_kernel = (spans["operation"] >= 0) & ~np.isnan(spans["flop"])
    runs = kernels["runs"]
    for name in ("flop", "memory_bytes"):
        listed = sum_by(kernels["shape"], runs * kernels[name])
        assert listed == pytest.approx(sum_by(spans["shape"][is_kernel], spans[name][is_kernel]))
    assert sum_by(kernels["shape"], runs) == sum_by(spans["shape"][is_kernel], is_kernel[is_kernel])
    pipelined = kernels["runs"][kernels["collective"] != ""].sum()
    assert pipelined == np.count_nonzero((spans["kind"] == "overlap") & (spans["operation"] >= 0)) > 0


def test_kernels_and_communication_are_the_busy_time() -> None:
    """The seconds by provenance, as the JSON has their shares; longest first."""
    kernels, shares = result().kernels, result().to_json()["provenance_share"]
    communication = [item for item in result().busy_time_items if isinstance(item.body, CommOp)]
    seconds = Counter(sum_by(kernels["provenance"], kernels["seconds"]))
    for item in communication:
        seconds[item.provenance.value] += item.seconds
    total = sum(seconds.values())
    assert {name: seconds[name] / total for name in shares} == pytest.approx(shares)
    assert (np.diff(kernels["seconds"]) <= 0).all()


def test_collectives_equal_the_json() -> None:
    collectives, listed = result().collectives, result().to_json()["collectives"]
    assert collectives.row_count == len(listed) > 0
    assert [dict(zip(collectives, row, strict=True)) for row in zip(*collectives.values(), strict=True)] == listed


@pytest.mark.parametrize("overrides", [(), ("training.recompute=full", "layout.data=fsdp")])
def test_memory_over_time_has_the_peaks_of_the_json(overrides: tuple[str, ...]) -> None:
    timeline, answer = result(*overrides).memory.timeline, result(*overrides).to_json()
    for stage in answer["stages"]:
        rows = np.flatnonzero(timeline["pipeline_rank"] == stage["pipeline_rank"])
        peak = rows[timeline["total"][rows].argmax()]
        assert timeline["total"][peak] == pytest.approx(stage["peak_memory_bytes"])
        at_peak = {category.value: float(timeline[category.value][peak]) for category in MemoryCategory}
        assert at_peak == pytest.approx(stage["memory_bytes"])
        assert (np.diff(timeline["time"][rows]) >= 0).all()
    assert timeline["total"] == pytest.approx(sum(timeline[category.value] for category in MemoryCategory))
    assert timeline["total"].max() == pytest.approx(answer["peak_memory_bytes"])


def test_link_loads_as_columns_sum_to_the_links() -> None:
    loads = result("cluster.gpus=16", "layout.dp=4").link_loads(bins=7)
    table = loads.table
    assert table.row_count == loads.bytes_by_bin.size
    assert np.array_equal(table["bytes"].reshape(loads.bytes_by_bin.shape), loads.bytes_by_bin)
    expected = sum_by(np.array([f"{link.source} {link.target}" for link in loads.links]), loads.total_bytes)
    assert sum_by(table["source"] + " " + table["target"], table["bytes"]) == pytest.approx(expected)
    rates = table["bytes"] / (table["end"] - table["start"])
    assert rates == pytest.approx(loads.byte_rates.ravel())
    assert (rates <= table["bandwidth"] * (1 + 1e-9)).all()


def test_all_tables_become_frames() -> None:
    tables = (
        result().spans(), result().kernels, result().collectives, result().memory.timeline, result().link_loads().table,
    )  # fmt: skip
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'clustersim[table]'")
    for table in tables:
        assert (table.to_arrow().column_names, table.to_arrow().num_rows) == (list(table), table.row_count)
    pytest.importorskip("pandas", reason="pandas is not installed: pip install 'clustersim[table]'")
    for table in tables:
        frame = table.to_pandas()
        assert (list(frame), len(frame)) == (list(table), table.row_count)
    spans = result().spans().to_pandas()
    assert spans[spans["operation"].isna()]["end"].max() == result().trace.makespan


def test_changed_result_is_that_of_the_changed_scenario() -> None:
    changed = result().changed({"layout.dp": np.int64(4)}, cluster={"gpus": 16}, training={"global_batch": 16})
    assert (changed.rank_count, changed.scenario.layout.tp) == (16, 2)
    assert changed.step_time == result("layout.dp=4", "cluster.gpus=16", "training.global_batch=16").step_time
    assert 0 < changed.mfu_causal <= changed.mfu <= changed.hfu < 1
