"""What looks wrong at the edges of the physics, and the law behind it."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.collectives.library_files import load_library
from clustersim.collectives.tuner import Tuner, select_variants
from clustersim.hardware.cluster import load_cluster
from clustersim.program.task import CollectiveType
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from tests.conftest import examples

PAYLOAD = 1e10
ALIGNMENT = 1e-3
"""Share of a step by which a collective that meets other kernels may move it (scheduling anomalies)."""


def bus_bandwidth(node_gpus: int, nodes: int, bridges: int) -> float:
    """Bytes/s of an all-reduce as nccl-tests print it, on nodes without NVLink, with a NIC for each GPU."""
    host = {"bridges": bridges, "bandwidth": "30 GB/s", "latency": "0.5 us"}
    node = {"gpus": node_gpus, "nvlink": None, "host": host, "nic": {"per_node": node_gpus}}
    gpus = node_gpus * nodes
    cluster = load_cluster("dgx-h100", gpu_count=gpus, overrides={"node": node})
    library = load_library("nccl")
    costs = Tuner(cluster.fabric, library).evaluate_variants(CollectiveType.ALL_REDUCE, np.arange(gpus)[None])
    return 2.0 * (gpus - 1) / gpus * PAYLOAD / float(select_variants(costs, PAYLOAD).seconds.max())


@pytest.mark.parametrize("node_gpus", [2, 4, 8])
@pytest.mark.parametrize("nodes", [2, 4])
def test_another_node_relieves_a_slow_link_of_one_ring_and_no_more(node_gpus: int, nodes: int) -> None:
    """Without NVLink a ring of one node crosses the link between sockets once in each direction.

    Over several nodes there are k rings, one for each of a node's k GPUs and NICs, each of which leaves the node where
    another one crosses: each pair of neighbours carries k-1 of k. So the bus bandwidth grows by k / (k-1), not more.
    """
    one, many = bus_bandwidth(node_gpus, 1, 2), bus_bandwidth(node_gpus, nodes, 2)
    assert one <= many * 1.01
    assert many <= one * node_gpus / (node_gpus - 1) * 1.001


@pytest.mark.parametrize("nodes", [2, 4])
def test_another_node_never_makes_a_ring_faster_where_every_port_is_as_slow(nodes: int) -> None:
    """Under one bridge GPUs' own PCIe ports are the bottleneck: each carries all that its GPU sends, anywhere."""
    assert bus_bandwidth(8, nodes, 1) <= bus_bandwidth(8, 1, 1) * 1.001


def _draw_launch_bound_plan(draw: st.DrawFn) -> dict[str, Any]:
    """Small layers whose tensor parallelism goes over PCIe, with collectives of data parallelism in flight."""
    tp, dp = draw(st.sampled_from([2, 4])), draw(st.sampled_from([2, 4, 8]))
    bandwidth = draw(st.sampled_from([12, 16, 25, 32]))
    return {
        "model": {"layers": 4, "hidden": 1024, "heads": 8, "kv_heads": 4, "ffn": 4096, "vocab": 32000},
        "cluster": {
            "name": "dgx-h100",
            "gpus": tp * dp,
            "node": {
                "gpus": 8,
                "nvlink": None,
                "host": {"bridges": 2, "bandwidth": "30 GB/s", "latency": "0.5 us"},
                "pcie": {"bandwidth": f"{bandwidth} GB/s", "latency": "0.5 us"},
                "nic": {"per_node": draw(st.sampled_from([2, 8]))},
            },
        },
        "layout": {"tp": tp, "dp": dp, "data": draw(st.sampled_from(["zero1", "zero2", "fsdp"]))},
        "training": {
            "sequence": draw(st.sampled_from([256, 512, 1024, 2048])),
            "global_batch": dp * draw(st.sampled_from([1, 4, 8])),
            "recompute": draw(st.sampled_from(["none", "full"])),
        },
        "cost": {"network": "uncontended"},
    }


@given(st.composite(_draw_launch_bound_plan)(), st.sampled_from([1.1, 1.5, 2.0, 4.0]))
@examples(60)
def test_more_pcie_bandwidth_never_makes_a_launch_bound_step_slower(plan: dict[str, Any], factor: float) -> None:
    """What communication no longer takes is waited for launches, which no collective slows.

    While tp's collectives wait for PCIe, the host gets ahead; with faster ones the GPU waits for the host instead.
    """
    bandwidth = float(plan["cluster"]["node"]["pcie"]["bandwidth"].split()[0])
    slower = Scenario.from_mapping(plan)
    faster = slower.with_overrides(f"cluster.node.pcie.bandwidth={factor * bandwidth} GB/s", suggest=False)
    assert simulate(faster).step_time <= simulate(slower).step_time * (1.0 + ALIGNMENT)
