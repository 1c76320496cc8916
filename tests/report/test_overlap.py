"""The overlap panel: bars and percentages of hidden and exposed communication."""

import base64
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from clustersim import Scenario, simulate
from clustersim.parallel.mesh import COMM_AXES, DENSE_AXIS_NAMES
from clustersim.report.labels import PipelineRowLabels
from clustersim.report.panels.overlap import StageOverlapView, build_overlap, overlap_figure, overlap_panel
from clustersim.report.row_selection import MAX_ROWS
from clustersim.results.comm_overlap import AxisOverlap

BASE_MAPPING: dict[str, Any] = {
    "model": {"preset": "gpt-tiny", "vocab": 50432}, "cluster": {"name": "dgx-a100", "gpus": 16},
    "layout": {"tp": 2, "pp": 2, "dp": 4}, "schedule": "1f1b",
    "training": {"sequence": 512, "global_batch": 32, "microbatch": 2, "precision": "bf16"},
}  # fmt: skip


def build_stage_overlap(
    stages: int, hidden: float, exposed: float, during_wait: float, stage_label: str = "stage"
) -> StageOverlapView:
    """Stages that communicate on the dp axis only; compute time grows per stage by more than the merge tolerance."""

    def axis_column(seconds: float, rows: int) -> np.ndarray:
        return np.where(np.arange(len(COMM_AXES)) == DENSE_AXIS_NAMES.index("dp"), seconds, np.zeros((rows, 1)))

    def build_overlap(count: int) -> AxisOverlap:
        compute_only, *comm_columns = (axis_column(seconds, count) for seconds in (5.0, hidden, exposed, during_wait))
        return AxisOverlap(compute_only + np.arange(count)[:, None], *comm_columns, step_time=20.0)

    labels = tuple(f"{stage_label} {stage}" for stage in range(stages))
    return StageOverlapView(
        build_overlap(stages), build_overlap(1), PipelineRowLabels(labels, tuple(map(str, range(stages))), stage_label)
    )


def decode_numbers(packed: dict[str, str]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(packed["bdata"]), dtype=packed["dtype"])


def bar_traces(stages: StageOverlapView) -> dict[str, dict[str, Any]]:
    return {trace["name"]: trace for trace in overlap_figure(stages).traces if trace["type"] == "bar"}


def test_bars_are_stacked() -> None:
    traces = bar_traces(build_stage_overlap(3, 2.0, 1.0, 0.5))
    edges = {
        name: (decode_numbers(bar["base"]).tolist(), decode_numbers(bar["x"]).tolist()) for name, bar in traces.items()
    }
    assert edges == {
        "compute only": ([0.0] * 3, [5.0, 6.0, 7.0]),
        "dp hidden": ([5.0, 6.0, 7.0], [2.0] * 3),
        "dp exposed": ([7.0, 8.0, 9.0], [1.0] * 3),
        "dp during idle": ([8.0, 9.0, 10.0], [0.5] * 3),
    }


def test_similar_stages_share_a_bar() -> None:
    """Of a 20 s step, times within 0.2 s share a bar: the first stage is separate, the others are merged."""
    stages = build_stage_overlap(4, 2.0, 1.0, 0.5)
    compute_only = np.where(stages.overlap.hidden > 0, np.array([[5.0], [9.0], [9.05], [9.1]]), 0.0)
    stages = replace(stages, overlap=replace(stages.overlap, no_overlap=compute_only))
    card = overlap_panel(stages)
    assert decode_numbers(bar_traces(stages)["compute only"]["x"]).tolist() == pytest.approx([5.0, 9.05])
    assert [text.strip() for text in card.figures[0].layout["yaxis"]["ticktext"]] == ["stage 0", "stages 1 to 3"]
    assert "less than 1% of the step" in card.html
    assert "share a bar" not in overlap_panel(build_stage_overlap(3, 2.0, 1.0, 0.5)).html


def test_overlap_kinds_have_distinct_patterns() -> None:
    traces = bar_traces(build_stage_overlap(1, 2.0, 1.0, 0.5))
    patterns = [traces[f"dp {kind}"]["marker"].get("pattern", {}).get("shape", "") for kind in ("hidden", "exposed")]
    assert patterns == ["/", ""]
    assert traces["dp during idle"]["marker"]["pattern"]["shape"] == "."
    assert "<b>stage 0</b>, dp<br>dp hidden: 2 s" in traces["dp hidden"]["hovertext"]


def test_table_of_hidden_fractions() -> None:
    cells = re.findall(r"<td>(.*?)</td>", overlap_panel(build_stage_overlap(2, 3.0, 1.0, 0.0)).html)
    assert cells == ["4\N{NO-BREAK SPACE}s", "75.0%", "25.0%", "0.0%"]


def test_result_has_a_bar_for_all_communicating_axes() -> None:
    result = simulate(Scenario.from_mapping(BASE_MAPPING))
    stage_overlap = build_overlap(result)
    assert stage_overlap is not None
    assert [COMM_AXES[axis_index].name for axis_index in stage_overlap.active_axes] == ["tp", "dp", "pp"]
    exposed = [result.breakdown.mean_seconds()[f"exposed {axis.name}"] for axis in COMM_AXES]
    assert stage_overlap.total.exposed[0].tolist() == pytest.approx(exposed)


def test_no_overlap_panel_without_communication() -> None:
    single_gpu = {**BASE_MAPPING, "cluster": {"name": "laptop", "gpus": 1}, "layout": {}, "schedule": "gpipe"}
    assert build_overlap(simulate(Scenario.from_mapping(single_gpu))) is None


def test_shown_stages_are_limited_and_escaped() -> None:
    card = overlap_panel(build_stage_overlap(1024, 1.0, 1.0, 1.0, stage_label="<stage>"))
    assert len(decode_numbers(card.figures[0].traces[0]["x"])) == MAX_ROWS
    assert "64 of 1,024 &lt;stage&gt;s are shown" in card.html
    assert "<stage>" not in card.html
