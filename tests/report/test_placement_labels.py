"""Placement labels: which GPUs a job has."""

from typing import Any

import pytest

from clustersim import Scenario, simulate
from clustersim.planning.what_if import run_what_ifs
from clustersim.report.draw.rank_heatmap import build_heatmap
from clustersim.report.export.rank_selection import describe_trace_ranks
from clustersim.report.placement_labels import describe_gpu_of_rank, describe_placement
from tests.sentences import parts

BASE_MAPPING: dict[str, Any] = {
    "model": "llama-tiny",
    "cluster": {"name": "dgx-h100", "gpus": 12},
    "layout": {"tp": 2, "dp": 6},
    "training": {"sequence": 1024, "global_batch": 12},
}


def scenario_with_placement(placement: str) -> Scenario:
    return Scenario.from_mapping(BASE_MAPPING, ["layout.dp=6", f"cluster.placement={placement}"])


@pytest.mark.parametrize(
    ("placement", "line"),
    [
        ("{per_node: 6}", "2 of 2 nodes, 6 of the 8 GPUs of each"),
        ("{per_node: 6, spare: 1}", "2 of 3 nodes, 6 of the 8 GPUs of each"),
        ("{order: [8-15, 0-3]}", "2 of 2 nodes, 4 to 8 ... 8 GPUs ... nodes in another order"),
        ("{order: [0-3, 8-15]}", "2 of 2 nodes, 4 to 8 of the 8 GPUs of each"),
        ("{order: [15, 0-10]}", "2 of 2 nodes, 4 to 8 ... 8 GPUs ... GPUs in another order"),
        ("{order: [0-3, 8-11, 4-7]}", "2 of 2 nodes, 4 to 8 ... 8 GPUs ... GPUs in another order"),
    ],
)
def test_placement_line(placement: str, line: str) -> None:
    assert parts(line).fullmatch(describe_placement(scenario_with_placement(placement).cluster))


def test_placement_line_of_partial_nvlink_domains() -> None:
    racks = {
        **BASE_MAPPING,
        "cluster": {"name": "gb200-nvl72", "gpus": 128, "placement": {"per_domain": 64}},
        "layout": {},
    }
    cluster = Scenario.from_mapping({**racks, "training": {"sequence": 1024, "global_batch": 128}}).cluster
    assert describe_placement(cluster) == "32 of 36 nodes, 64 of the 72 GPUs of an NVLink domain"


def test_identity_placement_has_no_label() -> None:
    plain = Scenario.from_mapping(
        {
            **BASE_MAPPING,
            "cluster": {"name": "dgx-h100", "gpus": 16},
            "layout": {"tp": 2, "dp": 8},
            "training": {"sequence": 1024, "global_batch": 16},
        }
    )
    assert describe_placement(plain.cluster) == describe_gpu_of_rank(plain.cluster, 3) == ""


def test_outputs_name_cluster_gpus_and_nodes() -> None:
    """Rank 6 is the first on the second node, which is node 0; a slow GPU has its id in `degradations`."""
    result = simulate(scenario_with_placement("{per_node: 6, nodes: [3, 0]}"))
    assert describe_gpu_of_rank(result.scenario.cluster, 6) == "GPU 0 on node 0"
    (rank,) = describe_trace_ranks(result, [6])
    assert rank.name.startswith("rank 6 (tp 0, GPU 0 on node 0")
    heatmap = build_heatmap(result)
    assert heatmap is not None
    assert heatmap.node_ids.tolist() == [3] * 6 + [0] * 6
    slow = next(case for case in run_what_ifs(result).cases if case.name == "slow_rank")
    assert slow.description == "one rank at 0.9x speed: GPU 24"
