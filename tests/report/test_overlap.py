"""Bars and percentages of communication."""

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

SCENARIO: dict[str, Any] = {
    "model": {"preset": "gpt-tiny", "vocab": 50432}, "cluster": {"name": "dgx-a100", "gpus": 16},
    "layout": {"tp": 2, "pp": 2, "dp": 4}, "schedule": "1f1b",
    "training": {"sequence": 512, "global_batch": 32, "microbatch": 2, "precision": "bf16"},
}  # fmt: skip


def made(stages: int, hidden: float, exposed: float, beside: float, word: str = "stage") -> StageOverlapView:
    """Each stage moves data of one axis, dp, and computes longer than the one before by more than is seen as equal."""

    def column(seconds: float, rows: int) -> np.ndarray:
        return np.where(np.arange(len(COMM_AXES)) == DENSE_AXIS_NAMES.index("dp"), seconds, np.zeros((rows, 1)))

    def rows(count: int) -> AxisOverlap:
        alone, *moving = (column(item, count) for item in (5.0, hidden, exposed, beside))
        return AxisOverlap(alone + np.arange(count)[:, None], *moving, step_time=20.0)

    labels = tuple(f"{word} {number}" for number in range(stages))
    return StageOverlapView(rows(stages), rows(1), PipelineRowLabels(labels, tuple(map(str, range(stages))), word))


def numbers(packed: dict[str, str]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(packed["bdata"]), dtype=packed["dtype"])


def bars(stages: StageOverlapView) -> dict[str, dict[str, Any]]:
    return {trace["name"]: trace for trace in overlap_figure(stages).traces if trace["type"] == "bar"}


def test_bars_stand_one_after_the_other() -> None:
    found = bars(made(3, 2.0, 1.0, 0.5))
    edges = {name: (numbers(bar["base"]).tolist(), numbers(bar["x"]).tolist()) for name, bar in found.items()}
    assert edges == {
        "compute only": ([0.0] * 3, [5.0, 6.0, 7.0]),
        "dp hidden": ([5.0, 6.0, 7.0], [2.0] * 3),
        "dp exposed": ([7.0, 8.0, 9.0], [1.0] * 3),
        "dp beside a wait": ([8.0, 9.0, 10.0], [0.5] * 3),
    }


def test_stages_that_are_alike_share_their_bars_and_the_card_says_so() -> None:
    """Of 20 s, times that differ by less than 0.2 s are one bar: the first stage stands alone, the others together."""
    stages = made(4, 2.0, 1.0, 0.5)
    alone = np.where(stages.overlap.hidden > 0, np.array([[5.0], [9.0], [9.05], [9.1]]), 0.0)
    stages = replace(stages, overlap=replace(stages.overlap, no_overlap=alone))
    card = overlap_panel(stages)
    assert numbers(bars(stages)["compute only"]["x"]).tolist() == pytest.approx([5.0, 9.05])
    assert [text.strip() for text in card.figures[0].layout["yaxis"]["ticktext"]] == ["stage 0", "stages 1 to 3"]
    assert "less than 1% of the step" in card.html
    assert "share a bar" not in overlap_panel(made(3, 2.0, 1.0, 0.5)).html


def test_kinds_of_an_axis_differ_by_more_than_colour() -> None:
    found = bars(made(1, 2.0, 1.0, 0.5))
    patterns = [found[f"dp {kind}"]["marker"].get("pattern", {}).get("shape", "") for kind in ("hidden", "exposed")]
    assert patterns == ["/", ""]
    assert found["dp beside a wait"]["marker"]["pattern"]["shape"] == "."
    assert "<b>stage 0</b>, dp<br>dp hidden: 2 s" in found["dp hidden"]["hovertext"]


def test_the_table_says_how_much_hides() -> None:
    cells = re.findall(r"<td>(.*?)</td>", overlap_panel(made(2, 3.0, 1.0, 0.0)).html)
    assert cells == ["4\N{NO-BREAK SPACE}s", "75.0%", "25.0%", "0.0%"]


def test_a_results_stages_have_a_bar_for_each_axis_that_moves() -> None:
    result = simulate(Scenario.from_mapping(SCENARIO))
    found = build_overlap(result)
    assert found is not None
    assert [COMM_AXES[place].name for place in found.active_axes] == ["tp", "dp", "pp"]
    exposed = [result.breakdown.mean_seconds()[f"exposed {axis.name}"] for axis in COMM_AXES]
    assert found.total.exposed[0].tolist() == pytest.approx(exposed)


def test_without_communication_there_is_nothing_to_say() -> None:
    alone = {**SCENARIO, "cluster": {"name": "laptop", "gpus": 1}, "layout": {}, "schedule": "gpipe"}
    assert build_overlap(simulate(Scenario.from_mapping(alone))) is None


def test_of_many_stages_some_are_shown_and_names_are_escaped() -> None:
    card = overlap_panel(made(16384, 1.0, 1.0, 1.0, word="<stage>"))
    assert len(numbers(card.figures[0].traces[0]["x"])) == MAX_ROWS
    assert "64 of 16,384 &lt;stage&gt;s are shown" in card.html
    assert "<stage>" not in card.html
