"""The topology picture: tiers, and the highest tier that each parallelism axis crosses."""

import numpy as np
import pytest

from clustersim.hardware.cluster import Cluster, load_cluster
from clustersim.hardware.topology import LinkKind
from clustersim.parallel.layout import Layout
from clustersim.program.placement import looped_placement
from clustersim.report.panels.topology import (
    AxisView,
    TierView,
    TopologyView,
    build_topology,
    topology_figure,
    topology_page,
)
from clustersim.results.axis_tiers import AxisLocality, TierCrossing, axis_localities

POD = TopologyView(
    "a pod",
    (
        TierView("GPU", 16_384, "450 GB/s", "8 to a node"),
        TierView("NVSwitch domain", 2_048, "50 GB/s per GPU"),
        TierView("leaf switch", 192, "3.2 TB/s", "1:7 oversubscribed"),
        TierView("core switch", 1),
    ),
)


def annotation_text(drawing: TopologyView) -> str:
    return " ".join(note["text"] for note in topology_figure(drawing).layout["annotations"])


def test_16384_gpus_are_drawn_with_few_boxes() -> None:
    bars = [trace for trace in topology_figure(POD).traces if trace["type"] == "bar"]
    assert [len(trace["x"]) for trace in bars] == [33, 26, 19, 1]


def test_counts_bandwidths_and_notes_are_written() -> None:
    for expected in ("16,384 × GPU", "450 GB/s", "1:7 oversubscribed", "1 × core switch"):
        assert expected in annotation_text(POD)


def test_topology_names_are_escaped() -> None:
    text = topology_page(TopologyView("</title><script>", (TierView("<b>GPU", 1), TierView("</script>", 2))))
    assert "<b>GPU" not in text
    assert "</title><script>" not in text


def test_axis_is_drawn_up_to_its_highest_tier() -> None:
    crossings = TierCrossing(LinkKind.NIC, 0, 1.0), TierCrossing(LinkKind.LEAF, 1, 0.5)
    lane = AxisView(AxisLocality("dp", 128, 4, 8, 16, crossings), (1, 2), ("NIC", "leaf"))
    figure = topology_figure(TopologyView("pod", POD.tiers, (lane,)))
    lines = [trace for trace in figure.traces if trace.get("mode") == "lines" and "fill" not in trace]
    assert {max(y for y in trace["y"] if y is not None) for trace in lines} == {2}
    (dots,) = [trace for trace in figure.traces if trace.get("mode") == "markers"]
    assert dots["y"] == [1, 2]
    full, partial = dots["marker"]["color"]
    assert full != partial == "@surface", "a ring where only some neighbours cross"
    assert "leaf switch" in dots["hovertext"][1]
    wide_notes, narrow_notes = figure.layout["annotations"], figure.narrow["annotations"]
    assert any("128 GPUs" in note["text"] and "stride 8" in note["text"] for note in wide_notes)
    assert any(note["text"] == "128" for note in narrow_notes)


def axis_lanes(cluster: Cluster, layout: Layout, chunks: int = 1) -> dict[str, tuple[str, AxisLocality]]:
    """For each axis the highest tier it reaches, and its span."""
    drawing = build_topology(cluster, axis_localities(layout, cluster.fabric, looped_placement(layout.pp, chunks)))
    return {lane.span.axis: (drawing.tiers[max(lane.tier_levels)].label, lane.span) for lane in drawing.axes}


def test_llama3_axes_cross_increasing_tiers() -> None:
    lanes_by_axis = axis_lanes(load_cluster("llama3-roce", gpu_count=16_384), Layout(tp=8, dp=128, pp=16))
    assert {axis: top for axis, (top, _) in lanes_by_axis.items()} == {
        "tp": "NVLink domain", "dp": "spine switch", "pp": "core switch",
    }  # fmt: skip
    sizes = {
        axis: (span.group_size, span.group_count, span.stride, span.max_nodes)
        for axis, (_, span) in lanes_by_axis.items()
    }
    assert sizes == {"tp": (8, 2048, 1, 1), "dp": (128, 128, 8, 128), "pp": (16, 1024, 1024, 16)}


def test_axis_within_a_multi_node_nvlink_domain() -> None:
    lanes_by_axis = axis_lanes(load_cluster("gb200-nvl72", gpu_count=144), Layout(tp=8, dp=9, pp=2))
    assert lanes_by_axis["dp"][0] == "NVLink domain"
    assert lanes_by_axis["dp"][1].max_nodes == 9 * 8 // 4 // 2, "every second node of four GPUs"
    assert lanes_by_axis["pp"][0] in ("leaf switch", "spine switch")


def test_axes_of_degree_one_are_omitted() -> None:
    assert not axis_lanes(load_cluster("dgx-h100", gpu_count=1), Layout())
    assert set(axis_lanes(load_cluster("dgx-h100", gpu_count=8), Layout(dp=8))) == {"dp"}


def test_expert_axes_use_the_expert_mesh() -> None:
    """Two replicas of eight unsharded experts on the 16 ranks of a stage: EP within a node, EDP with stride eight."""
    layout = Layout(tp=2, dp=8, pp=8, ep=8, etp=1)
    lanes_by_axis = axis_lanes(load_cluster("dgx-h100", gpu_count=128), layout)
    sizes = {
        axis: (span.group_size, span.group_count, span.stride, span.max_nodes)
        for axis, (_, span) in lanes_by_axis.items()
    }
    assert [*sizes] == ["tp", "dp", "pp", "ep", "edp"]
    assert sizes["ep"] == (8, 16, 1, 1)
    assert sizes["edp"] == (2, 64, 8, 2)
    assert [lanes_by_axis[axis][0] for axis in ("ep", "edp")] == ["NVLink domain", "leaf switch"]


@pytest.mark.parametrize("gpus", [8, 16, 64])
def test_crossing_fractions_of_ring_neighbours(gpus: int) -> None:
    """Ranks in order on nodes of eight: one of eight ring neighbours is on another node, with wrap-around."""
    (span,) = axis_localities(Layout(dp=gpus), load_cluster("dgx-h100", gpu_count=gpus).fabric, looped_placement(1))
    nvlink = next(crossing for crossing in span.crossings if crossing.kind is LinkKind.NVLINK)
    assert nvlink.fraction == (1.0 if gpus == 8 else pytest.approx(7 / 8))
    assert sum(
        tier_crossing.fraction for tier_crossing in span.crossings if tier_crossing.kind is LinkKind.NIC
    ) == pytest.approx(0.0 if gpus == 8 else 1 / 8)


def test_pipeline_wraps_around_only_if_interleaved() -> None:
    """Pods of 3,072 GPUs, stages of 1,024: some stage transitions change the pod, and so does the wrap-around."""
    fabric, layout = load_cluster("llama3-roce", gpu_count=16_384).fabric, Layout(tp=8, dp=128, pp=16)
    changes = int(np.count_nonzero(np.diff(np.arange(16) * 1024 // 3072)))
    for chunks, expected in ((1, changes / 15), (4, (changes + 1) / 16)):
        crossings = axis_localities(layout, fabric, looped_placement(layout.pp, chunks))[-1].crossings
        assert crossings[-1].kind is LinkKind.SPINE
        assert crossings[-1].fraction == pytest.approx(expected)


@pytest.mark.parametrize("name", ["laptop", "dgx-h100", "pcie-node", "gb200-nvl72", "mi300x", "dgx-v100"])
def test_packaged_clusters_show_gpu_bandwidth(name: str) -> None:
    drawing = build_topology(load_cluster(name))
    assert drawing.tiers[0].bandwidth.startswith(("NVLink", "PCIe"))
    assert not drawing.tiers[-1].bandwidth
