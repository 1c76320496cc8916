"""The network panel: utilization of tiers, busiest links and traffic per parallelism axis."""

import re
from dataclasses import replace
from html import unescape

import numpy as np
import pytest

from clustersim import Scenario, simulate
from clustersim.hardware.topology import LinkInfo, LinkKind
from clustersim.report.panels.network import (
    MERGE_TOLERANCE,
    NetworkView,
    build_network,
    colour_scale,
    network_panel,
    utilisation_figure,
)
from clustersim.report.panels.topology import result_topology
from clustersim.results.network_utilization import AxisTraffic, BusyLink, NetworkUtilization, TierUtilization


def tier_use(kind: LinkKind, *over_time: float) -> TierUtilization:
    return TierUtilization(kind, 16, 16e9, np.array(over_time), 0.5)


NETWORK_USE = NetworkUtilization(
    makespan=2.0,
    gpu_count=4,
    tiers=(
        tier_use(LinkKind.NVLINK, 0.0, 0.1, 0.3, 0.4),
        tier_use(LinkKind.NIC, 0.0, 0.0, 0.5, 1.5),
        tier_use(LinkKind.LEAF, 0.0, 0.0, 0.0, 0.0),
    ),
    busiest_links=(
        BusyLink(
            LinkInfo(LinkKind.NIC, "<nic0>", "leaf0", 50e9, 1e-6),
            equivalent_count=8,
            cable_count=2,
            transfer_seconds=1.0,
            utilization=0.5,
            bytes_by_axis={"dp": 3e9, "pp": 1e9},
        ),
    ),
    axis_traffic=(
        AxisTraffic("dp", 4 * 2**30, np.array([0.0, 4 * 2**30, 0.0])),
        AxisTraffic("tp", 8 * 2**30, np.array([8 * 2**30, 0.0, 0.0])),
        AxisTraffic("pp", 4 * 2**20, np.array([0.0, 4 * 2**20, 2**20])),
    ),
)


def panel_html(
    use: NetworkUtilization = NETWORK_USE, *, shared: bool = False, recorded: bool = False, hosts: bool = False
) -> str:
    return network_panel(NetworkView(use, shared, recorded, hosts)).html


def table_cells(html: str, title: str) -> dict[str, list[str]]:
    """The cells of the table under a title, by the first cell's text of each table row."""
    table = html.split(f">{title}<")[1].split("</table>")[0].split("<tbody>")[1]
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in table.split("</tr>") if row.startswith("<tr>")]
    return {first.split("<")[0]: [split_text(cell) for cell in values] for first, *values in cells}


def split_text(html: str) -> list[str]:
    return unescape(re.sub(r"<[^>]+>", " ", html)).split()


def test_tiers_have_mean_and_peak_utilization() -> None:
    cells = table_cells(panel_html(), "Tiers")
    assert cells["NVLink"] == [["20.0%"], ["40.0%"], ["50.0%"]]
    assert cells["NIC"] == [["50.0%"], ["150.0%"], ["50.0%"]]
    notes = [note["text"] for note in utilisation_figure(NETWORK_USE).layout["annotations"]]
    assert notes == ["mean 20.0%, peak 40.0%", "mean 50.0%, peak 150.0%", "mean 0.0%, peak 0.0%"]


def test_host_copies_are_noted_as_excluded() -> None:
    assert "Copies to and from hosts" in panel_html(hosts=True)
    assert "Copies to hosts" not in panel_html()


def test_axes_are_ordered_with_bytes_per_gpu_and_tier() -> None:
    html = panel_html()
    cells = table_cells(html, "Which axis crosses which tier")
    header = split_text(html.split("Which axis")[1].split("</thead>")[0])
    assert header[-3:] == ["tp", "dp", "pp"]
    assert cells["sent in total"] == [["2", "GiB"], ["1", "GiB"], ["1", "MiB"]]
    assert cells["NVLink"] == [["2", "GiB"], ["–"], ["–"]]
    assert cells["NIC"] == [["stays", "below"], ["1", "GiB"], ["1", "MiB"]]
    assert cells["leaf to spine"] == [["stays", "below"], ["stays", "below"], ["256", "KiB", "25.0%"]]


def test_busiest_link_lists_axes_and_escapes_names() -> None:
    html = panel_html()
    assert "<nic0>" not in html
    assert "&lt;nic0&gt; → leaf0" in html
    assert "and 7 equivalent" in html
    assert "2 cables" in html
    (cells,) = table_cells(html, "Busiest links").values()
    assert cells == [["1", "s"], ["50.0%"], ["dp", "75.0%", "pp", "25.0%"]]


def test_utilization_above_one_is_explained_without_contention() -> None:
    assert "cost.network: shared" in panel_html()
    assert "cost.network: shared" not in panel_html(shared=True)
    assert "record" in panel_html(recorded=True)
    assert "record" not in panel_html()


def test_utilization_heatmap_axis_and_colour_scale() -> None:
    (trace,) = utilisation_figure(NETWORK_USE).traces
    assert [len(row) for row in trace["z"]] == [4, 4, 4]
    assert trace["x0"] == pytest.approx(0.25)
    assert trace["dx"] == pytest.approx(0.5)
    assert trace["zmax"] == 1.5
    stops = [stop for stop, _ in colour_scale(1.5)]
    assert stops == sorted(stops)
    assert (stops[0], stops[-1]) == (0.0, 1.0)


BASE_MAPPING = {
    "model": "llama3-8b",
    "cluster": {"name": "dgx-h100", "gpus": 16},
    "layout": {"tp": 2, "pp": 2, "dp": 4},
    "training": {"sequence": 1024, "global_batch": 16, "microbatch": 1},
}


def test_result_has_a_network_panel() -> None:
    result = simulate(Scenario.from_mapping(BASE_MAPPING))
    network = build_network(result)
    assert network is not None
    assert network.is_shared
    cells = table_cells(network_panel(network).html, "Which axis crosses which tier")
    assert cells["NIC"][0] == ["stays", "below"], "tensor parallelism stays in the node"
    assert [lane.span.axis for lane in result_topology(result).axes] == ["tp", "dp", "pp"]


def test_single_rank_has_no_network_panel() -> None:
    single_gpu = {**BASE_MAPPING, "model": "gpt2-small", "layout": {}, "cluster": {"name": "dgx-h100", "gpus": 1}}
    result = simulate(Scenario.from_mapping(single_gpu))
    assert build_network(result) is None
    assert result_topology(result).axes == ()


def test_similar_consecutive_bins_share_a_colour() -> None:
    nvlink_tier = replace(NETWORK_USE.tiers[0], utilization_over_time=np.array([0.1, 0.12, 0.1, 0.5]))
    figure = utilisation_figure(replace(NETWORK_USE, tiers=(nvlink_tier,)))
    (trace,) = figure.traces
    (colours,) = trace["z"]
    assert len(set(colours[:3])) == 1 and colours[3] == 0.5
    assert trace["customdata"] == [[0.1, 0.12, 0.1, 0.5]]  # hover values stay exact
    assert f"{MERGE_TOLERANCE:.0%}" in trace["colorbar"]["title"]["text"]
