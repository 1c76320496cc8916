"""Data of the rank heatmap; its script is tested in tests/browser."""

import base64
import zlib
from typing import Any

import numpy as np
import pytest

from clustersim import Scenario, simulate
from clustersim.parallel.layer_partition import BehindEncoder
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import DATA, DENSE_MESH, EXPERT, MESHES, PIPELINE, TENSOR
from clustersim.report.draw.rank_heatmap import RankHeatmap, build_heatmap, heatmap_figure, heatmap_panel
from clustersim.report.figure import Figure
from clustersim.results.dominant_categories import DominantCategories
from clustersim.results.time_categories import TIME_CATEGORIES, TimeCategory

LAYOUT = Layout(tp=2, pp=3, dp=4)
LAPTOP_MAPPING: dict[str, Any] = {
    "model": "gpt-tiny", "cluster": {"name": "laptop", "gpus": 2}, "layout": {"dp": 2},
    "training": {"sequence": 512, "global_batch": 8, "microbatch": 4, "precision": "fp32"},
}  # fmt: skip


def synthetic_heatmap(
    representative: np.ndarray, ranks: np.ndarray, layout: Layout = LAYOUT, bins: int = 10
) -> RankHeatmap:
    category = np.full((len(ranks), bins), TimeCategory.WAIT.index, dtype=np.uint8)
    seconds = np.zeros((len(ranks), len(TIME_CATEGORIES)))
    return RankHeatmap(
        DominantCategories(ranks, representative, seconds, category, 1.0), layout, np.arange(layout.world_size) // 8
    )


def decode_array(figure: Figure, name: str) -> list[float]:
    packed = figure.arrays[name]
    return np.frombuffer(zlib.decompress(base64.b64decode(packed["z"])), dtype=packed["dtype"]).tolist()


def test_rank_to_class_row_index() -> None:
    """Of the equivalence classes of ranks 0, 5 and 7 that of 5 is left out."""
    representative = np.array([0, 5, 7] * 8)
    heatmap = synthetic_heatmap(representative, np.array([0, 7]))
    assert decode_array(heatmap_figure(heatmap), "classOf") == [0, 65535, 1] * 8
    assert heatmap_figure(heatmap).layout["yaxis"]["range"] == [15.5, -0.5]
    assert "Those of 2 classes are shown" in heatmap_panel(heatmap).html


@pytest.mark.parametrize("order", [("tp", "cp", "dp", "pp"), ("pp", "dp", "cp", "tp")])
def test_degrees_and_strides_give_every_ranks_coordinates(order: tuple[str, ...]) -> None:
    layout = Layout(tp=2, pp=3, dp=4, order=order)
    axes = heatmap_figure(synthetic_heatmap(np.arange(24), np.arange(24), layout)).script_data["axes"]
    for axis in MESHES[DENSE_MESH]:
        degree, stride = axes[axis.name]
        assert (np.arange(24) // stride % degree == layout.mesh.rank_coordinates(axis)).all()


def test_ranks_of_an_encoder_on_its_own_are_before_the_others() -> None:
    layout = Layout(tp=2, pp=3, dp=2, encoder_tp=1, encoder_dp=4, layers_per_stage=BehindEncoder(None))
    facts = heatmap_figure(synthetic_heatmap(np.arange(12), np.arange(12), layout)).script_data
    assert facts["first"] == 4
    model_ranks = np.arange(4, 12)
    for axis, first in ((TENSOR, 0), (DATA, 0), (PIPELINE, 1)):
        degree, stride = facts["axes"][axis.name]
        coordinates = layout.rank_coordinates(axis)
        assert (first + (model_ranks - 4) // stride % degree == coordinates[4:]).all()
    assert (layout.rank_coordinates(DATA)[:4] == np.arange(4)).all()
    assert not layout.rank_coordinates(PIPELINE)[:4].any()


def test_heatmap_axes_include_expert_parallel() -> None:
    layout = Layout(tp=2, pp=2, dp=4, ep=2, etp=2)
    script_data = heatmap_figure(synthetic_heatmap(np.arange(16), np.arange(16), layout)).script_data
    degree, stride = script_data["axes"]["ep"]
    assert (np.arange(16) // stride % degree == layout.rank_coordinates(EXPERT)).all()
    assert script_data["axisLabels"] == [
        ("pp", "dp", "cp", "tp", "ep"),
        ("dp", "pp", "cp", "tp", "ep"),
        script_data["orders"][2],
    ]
    coordinates = [
        np.arange(16) // script_data["axes"][axis][1] % script_data["axes"][axis][0]
        for axis in script_data["orders"][2]
    ]
    assert len(set(zip(*(coordinate.tolist() for coordinate in coordinates), strict=True))) == 16, (
        "every rank stands once"
    )


def test_heatmap_axes_of_dense_model() -> None:
    script_data = heatmap_figure(synthetic_heatmap(np.arange(24), np.arange(24))).script_data
    assert set(script_data["axes"]) == {"tp", "cp", "dp", "pp"}
    assert script_data["axisLabels"] == script_data["orders"]


def test_legend_lists_only_visible_categories() -> None:
    html = heatmap_panel(synthetic_heatmap(np.arange(24), np.arange(24))).html
    assert "</i>wait</span>" in html
    assert "</i>compute</span>" not in html


def test_heatmap_needs_two_ranks() -> None:
    single_rank = Scenario.from_mapping({**LAPTOP_MAPPING, "cluster": {"name": "laptop", "gpus": 1}, "layout": {}})
    assert build_heatmap(simulate(single_rank)) is None
    heatmap = build_heatmap(simulate(Scenario.from_mapping(LAPTOP_MAPPING)))
    assert heatmap is not None
    assert "All 2 ranks have equal timelines." in heatmap_panel(heatmap).html


def test_largest_heatmap_data_size() -> None:
    """Random data is incompressible: 2,048 classes of 13 random categories, on 131,072 ranks."""
    layout = Layout(tp=8, pp=16, dp=1024)
    ranks = np.arange(0, 131072, 64)
    category = np.random.default_rng(0).integers(0, len(TIME_CATEGORIES), (2048, 720)).astype(np.uint8)
    dominant = DominantCategories(ranks, np.arange(131072), np.zeros((2048, len(TIME_CATEGORIES))), category, 1.0)
    figure = heatmap_figure(RankHeatmap(dominant, layout, np.arange(layout.world_size) // 8))
    assert sum(len(packed["z"]) for packed in figure.arrays.values()) < 2e6
