"""Helpers of tests of degraded clusters: random dead links, and connectivity by networkx."""

import networkx as nx
import numpy as np
from hypothesis import strategies as st

from clustersim.hardware.graph_fabric import GraphFabric
from tests.hardware.conftest import MACHINES

HEALTHY = {name: build() for name, build in MACHINES.items()}
GRAPHS = {name: GraphFabric(fabric.to_graph()) for name, fabric in HEALTHY.items()}


@st.composite
def dead_links(draw, fabrics):
    """A cluster and up to four of its links, often with their reverse links."""
    fabric = fabrics[draw(st.sampled_from(sorted(fabrics)))]
    link_ids = draw(st.lists(st.integers(0, len(fabric.links.kind) - 1), min_size=1, max_size=4, unique=True))
    if draw(st.booleans()):
        links = [fabric.link_info(link_id) for link_id in link_ids]
        link_ids = sorted({*link_ids, *(fabric.find_link(link.target, link.source) for link in links)})
    return fabric, link_ids


def remaining_fractions(fabric, dead_link_ids):
    """Remaining bandwidth fraction of each link where some are dead."""
    fractions = np.ones(len(fabric.links.kind))
    fractions[dead_link_ids] = 0.0
    return fractions


def all_pairs(fabric):
    gpus = np.arange(fabric.gpu_count)
    return np.repeat(gpus, fabric.gpu_count), np.tile(gpus, fabric.gpu_count)


def gpu_names(fabric):
    """Names of the GPUs in the order of their ids."""
    return [f"gpu{gpu}" for gpu in range(fabric.gpu_count)]


def is_strongly_connected(graph, gpus):
    """Whether networkx finds a path from every GPU to every other."""
    reachable = [{*nx.descendants(graph, gpu), gpu} for gpu in gpus]
    return all(set(gpus) <= item for item in reachable)
