"""What tests of disturbed machines share: random dead links, and what networkx says of the rest."""

import networkx as nx
import numpy as np
from hypothesis import strategies as st

from clustersim.hardware.graph_fabric import GraphFabric
from tests.hardware.conftest import MACHINES

HEALTHY = {name: build() for name, build in MACHINES.items()}
GRAPHS = {name: GraphFabric(fabric.to_graph()) for name, fabric in HEALTHY.items()}


@st.composite
def dead_links(draw, fabrics):
    """A machine and up to four of its links, often twins."""
    fabric = fabrics[draw(st.sampled_from(sorted(fabrics)))]
    numbers = draw(st.lists(st.integers(0, len(fabric.links.kind) - 1), min_size=1, max_size=4, unique=True))
    if draw(st.booleans()):
        twins = [fabric.link_info(number) for number in numbers]
        numbers = sorted({*numbers, *(fabric.find_link(link.target, link.source) for link in twins)})
    return fabric, numbers


def without(fabric, numbers):
    """What is left of each link where some are dead."""
    left = np.ones(len(fabric.links.kind))
    left[numbers] = 0.0
    return left


def all_pairs(fabric):
    numbers = np.arange(fabric.gpu_count)
    return np.repeat(numbers, fabric.gpu_count), np.tile(numbers, fabric.gpu_count)


def gpu_names(fabric):
    """Names of the GPUs in the order of their numbers."""
    return [f"gpu{number}" for number in range(fabric.gpu_count)]


def connected(graph, gpus):
    """Whether networkx finds a way from every GPU to every other."""
    reached = [{*nx.descendants(graph, gpu), gpu} for gpu in gpus]
    return all(set(gpus) <= item for item in reached)
