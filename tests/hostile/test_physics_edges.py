"""What looks wrong at the edges of the physics, and the law behind it."""

import numpy as np
import pytest

from clustersim.collectives.library_files import load_library
from clustersim.collectives.tuner import Tuner, select_variants
from clustersim.hardware.cluster import load_cluster
from clustersim.program.task import CollectiveType

PAYLOAD = 1e10


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
