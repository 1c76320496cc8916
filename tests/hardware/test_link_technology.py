"""Files name the link technology; nothing is guessed from bandwidth."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.collectives.library import LinkTechnologies
from clustersim.collectives.library_files import load_library
from clustersim.collectives.tuner import Tuner, select_variants
from clustersim.common.errors import InputError
from clustersim.hardware.cluster import load_cluster
from clustersim.hardware.graph_fabric import GraphFabric
from clustersim.hardware.link_technology import NETWORK_TECHNOLOGIES, SCALE_UP_TECHNOLOGIES, LinkTechnology
from clustersim.program.task import CollectiveType
from tests.conftest import examples

NCCL = load_library("nccl")


def collective_seconds(overrides, payload, collective=CollectiveType.ALL_REDUCE, gpus=16):
    fabric = load_cluster("dgx-h100", gpus, overrides).fabric
    return float(
        select_variants(Tuner(fabric, NCCL).evaluate_variants(collective, np.arange(gpus)[None]), payload).seconds.max()
    )


@examples(30)
@given(
    generation=st.sampled_from([name for name in SCALE_UP_TECHNOLOGIES if name.startswith("nvlink")]),
    rate=st.integers(50, 1500),
    more=st.integers(1, 500),
    payload=st.sampled_from([1e3, 1e6, 1e8, 1e10]),
    kind=st.sampled_from([CollectiveType.ALL_REDUCE, CollectiveType.ALL_GATHER, CollectiveType.ALL_TO_ALL]),
)
def test_more_bandwidth_of_one_generation_is_never_slower(generation, rate, more, payload, kind):
    """676 GB/s was slower than 674, which was taken for another generation."""
    override = {"node.nvlink.generation": generation}
    slower, faster = (override | {"node.nvlink.bandwidth": f"{item} GB/s"} for item in (rate, rate + more))
    assert collective_seconds(faster, payload, kind) <= collective_seconds(slower, payload, kind) * (1 + 1e-9)


def test_the_default_generation_is_the_accelerator_s():
    fabric = load_cluster("dgx-h100", 16, {"node.nvlink.generation": None, "accelerator": "a100-sxm-80gb"}).fabric
    assert LinkTechnologies.from_links(fabric.links).nvlink_generations == (LinkTechnology.NVLINK3,)


def test_missing_and_unknown_generations_are_rejected():
    with pytest.raises(InputError, match=r"node\.nvlink\.generation: is missing, .* nvlink2, nvlink3, nvlink4"):
        load_cluster("dgx-h100", 16, {"node.nvlink.generation": None, "accelerator": "cpu-laptop"})
    with pytest.raises(InputError, match=r"node\.nvlink\.generation: 'nvlink44'.*nvlink4"):
        load_cluster("dgx-h100", 16, {"node.nvlink.generation": "nvlink44"})
    with pytest.raises(InputError, match=r"node\.nic\.network: 'efaa' is unknown; did you mean efa"):
        load_cluster("dgx-h100", 16, {"node.nic.network": "efaa"})


def test_a_library_without_constants_names_the_supported_links():
    with pytest.raises(InputError, match="library rccl has no constants of nvlink4 links; it has xgmi4"):
        load_library("rccl").nvlink_constants(LinkTechnology.NVLINK4)
    assert load_library("gloo").nvlink_constants(LinkTechnology.NVLINK4) == load_library("gloo").nvlink_constants(
        LinkTechnology.XGMI4
    )


def test_networks_differ_only_by_their_constants():
    """The same ports: a message over EFA takes longer, over TCPX much longer, and TCPX has no low-latency protocols."""
    seconds_by_network = {name: collective_seconds({"node.nic.network": name}, 8.0) for name in NETWORK_TECHNOLOGIES}
    assert (
        seconds_by_network["infiniband"]
        < seconds_by_network["efa"]
        < seconds_by_network["efa1"]
        < seconds_by_network["tcpx"]
    )
    assert NCCL.unsupported_on(LinkTechnologies((LinkTechnology.NVLINK4,), (LinkTechnology.TCPX,))) == {
        "LL",
        "LL128",
        "tree",
        "nvls",
    }


def test_mixed_nvlink_generations():
    """Two nodes of H100 and A100 links: nvls needs every switch to add, the launch is the slower one's."""
    graph = load_cluster("dgx-h100", 16).fabric.to_graph().copy()
    for source, target, edge in graph.edges(data=True):
        if edge["kind"] == "nvlink" and "nvswitch1" in (source, target):
            edge["technology"], edge["bandwidth"] = "nvlink3", 300e9
    mixed = LinkTechnologies.from_links(GraphFabric(graph).links)
    assert mixed.nvlink_generations == (LinkTechnology.NVLINK3, LinkTechnology.NVLINK4)
    assert not NCCL.has_nvls(mixed)
    launches = [
        NCCL.nvlink_by_technology[nvlink_generation].launch_seconds for nvlink_generation in mixed.nvlink_generations
    ]
    assert NCCL.launch_seconds_on(mixed) == max(launches)
    choice = select_variants(
        Tuner(GraphFabric(graph), NCCL).evaluate_variants(CollectiveType.ALL_REDUCE, np.arange(16).reshape(2, 8)), 1e9
    )
    assert choice.seconds[1] > 1.3 * choice.seconds[0]
