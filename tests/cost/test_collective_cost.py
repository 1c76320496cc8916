"""Times of exchanges: all groups of a role at once, never above the links' capacity, remembered."""

import numpy as np
import pytest

from clustersim.collectives.library import load_library
from clustersim.collectives.nccl_overrides import NcclOverrides
from clustersim.common import data_files
from clustersim.common.errors import InputError
from clustersim.cost.collective_cost import CollectiveCost
from clustersim.cost.timing import Bottleneck, Provenance
from clustersim.hardware.clos_fabric import ClosFabric
from clustersim.hardware.clos_spec import LeafSpec, NetworkSpec, NicSpec, NodeSpec, NvlinkSpec, Port, SpineSpec
from clustersim.hardware.cluster import load_cluster
from clustersim.hardware.ecmp import SpreadEcmp
from clustersim.program.program import ProcessGroups
from clustersim.program.task import CollectiveType, CommOp

NODE = NodeSpec(8, Port(64e9, 5e-7), NvlinkSpec(8, Port(450e9, 5e-7)), None, NicSpec(8, Port(50e9, 5e-7)))


def pod(gpus: int, oversubscription: float = 1.0) -> ClosFabric:
    """H100 nodes, four to a leaf unit."""
    network = NetworkSpec(LeafSpec(4, 8, 2e-7, oversubscription), SpreadEcmp(), SpineSpec(1024, 2e-7))
    return ClosFabric(NODE, network, gpus)


def roles(gpus: int) -> dict[str, ProcessGroups]:
    ranks = np.arange(gpus)
    members = {
        "tp": ranks.reshape(-1, 8),
        "dp": np.ascontiguousarray(ranks.reshape(-1, 8).T),
        "one": ranks[:, None],
        "world": ranks[None],
        "pp_next": np.stack([ranks, np.roll(ranks, -8)], axis=1),
    }
    return {role: ProcessGroups(role, array, ordered=role == "pp_next") for role, array in members.items()}


def cost(gpus: int = 64, oversubscription: float = 1.0, library: str = "nccl", **overrides: str) -> CollectiveCost:
    chosen = NcclOverrides(forced={CollectiveType(kind): name for kind, name in overrides.items()})
    return CollectiveCost(pod(gpus, oversubscription), chosen.apply_to(load_library(library)), roles(gpus))


def exchange(kind: CollectiveType, role: str, payload: float) -> CommOp:
    return CommOp("x", kind, role, payload)


def test_every_group_of_the_role_gets_a_time():
    timing = cost().time_comm_op(exchange(CollectiveType.ALL_REDUCE, "tp", 1e8))
    assert timing.seconds.shape == (8,)
    assert timing.seconds == pytest.approx(timing.seconds[0])
    assert timing.tier == "nvlink"
    assert timing.provenance is Provenance.PUBLISHED


def test_a_group_of_one_takes_no_time():
    timing = cost().time_comm_op(exchange(CollectiveType.ALL_REDUCE, "one", 1e9))
    assert timing.seconds.tolist() == [0.0] * 64


def test_small_payloads_are_bound_by_latency_and_large_by_bandwidth():
    model = cost()
    assert model.time_comm_op(exchange(CollectiveType.ALL_GATHER, "dp", 8.0)).bottleneck is Bottleneck.LATENCY
    assert model.time_comm_op(exchange(CollectiveType.ALL_GATHER, "dp", 1e10)).bottleneck is Bottleneck.BANDWIDTH


GATHERING = [
    CollectiveType.ALL_REDUCE,
    CollectiveType.ALL_GATHER,
    CollectiveType.REDUCE_SCATTER,
    CollectiveType.ALL_TO_ALL,
]


@pytest.mark.parametrize("kind", GATHERING)
@pytest.mark.parametrize(("role", "port"), [("tp", 450e9), ("dp", 50e9)])
def test_no_port_runs_above_its_rate(kind, role, port):
    """In groups of 8, each rank must send or take in at least 7/8 of the payload through its port."""
    slowest = cost().time_comm_op(exchange(kind, role, 1e10)).seconds.min()
    assert 7 / 8 * 1e10 / slowest <= port


def test_sibling_groups_share_the_spine():
    """Four units of four nodes; only the last node of a unit sends to the next unit. At 1:4 it keeps its NIC's rate."""
    clean = cost(128).time_comm_op(exchange(CollectiveType.SEND_RECV, "pp_next", 1e9)).seconds
    tight = cost(128, oversubscription=4.0).time_comm_op(exchange(CollectiveType.SEND_RECV, "pp_next", 1e9)).seconds
    assert (tight >= clean - 1e-12).all()
    far = np.arange(128) // 8 % 4 == 3  # the last node of a unit sends to the next unit
    assert tight[~far] == pytest.approx(clean[~far])


def test_a_spine_of_a_tenth_slows_the_only_crossing_flow_of_a_rail():
    """One of four nodes crosses, with one NIC's rate; its leaf's uplinks have 4/10 of a NIC: 2.5 times as long."""
    payload = 1e10
    clean = cost(128).time_comm_op(exchange(CollectiveType.SEND_RECV, "pp_next", payload)).seconds
    tight = (
        cost(128, oversubscription=10.0).time_comm_op(exchange(CollectiveType.SEND_RECV, "pp_next", payload)).seconds
    )
    far = np.arange(128) // 8 % 4 == 3
    assert tight[far] / clean[far] == pytest.approx(2.5, rel=0.01)


def test_the_users_choice_is_taken():
    timing = cost(all_reduce="hierarchical").time_comm_op(exchange(CollectiveType.ALL_REDUCE, "world", 1e9))
    assert timing.algorithm.startswith("hierarchical")


def test_answers_are_remembered_and_equal():
    model = cost()
    first = model.time_comm_op(exchange(CollectiveType.ALL_REDUCE, "dp", 1e8))
    assert model.time_comm_op(exchange(CollectiveType.ALL_REDUCE, "dp", 1e8)) is first
    assert (
        cost().time_comm_op(exchange(CollectiveType.ALL_REDUCE, "dp", 1e8)).seconds.tolist() == first.seconds.tolist()
    )


def test_an_unknown_role_is_refused():
    with pytest.raises(InputError, match=r"no process groups 'dpp'; did you mean dp\?"):
        cost().time_comm_op(exchange(CollectiveType.ALL_REDUCE, "dpp", 1.0))


def test_an_unpublished_library_says_so():
    timing = cost(library="gloo").time_comm_op(exchange(CollectiveType.ALL_REDUCE, "tp", 1e6))
    assert timing.provenance is Provenance.ROOFLINE


@pytest.mark.parametrize("name", data_files.list_names("clusters"))
def test_every_shipped_cluster_times_every_collective(name):
    """Groups inside a node, across nodes, and the whole cluster; larger payloads take longer."""
    cluster = load_cluster(name)
    gpus = min(cluster.fabric.gpu_count, 1024)
    ranks = np.arange(gpus)
    half = 2 if gpus % 2 == 0 else 1
    members = {"near": ranks.reshape(-1, half), "far": ranks.reshape(half, -1).T, "world": ranks[None]}
    groups = {role: ProcessGroups(role, np.ascontiguousarray(array)) for role, array in members.items()}
    model = CollectiveCost(cluster.fabric, load_library(cluster.library), groups)
    for kind in (collective_type for collective_type in CollectiveType if not collective_type.is_token_routing):
        for role in groups:
            if groups[role].members.shape[1] == 2 or kind is not CollectiveType.SEND_RECV:
                small, large = (model.time_comm_op(exchange(kind, role, payload)).seconds for payload in (1e3, 1e9))
                assert (small > 0).all()
                assert (small < large).all()


def demand(kind: CollectiveType, role: str, payload: float, **options):
    return cost(**options).link_demand(exchange(kind, role, payload))


@pytest.mark.parametrize("kind", [CollectiveType.ALL_GATHER, CollectiveType.ALL_REDUCE, CollectiveType.BROADCAST])
def test_groups_that_share_no_link_ask_for_what_they_take(kind):
    """Rails have NICs of their own, and the spine is not oversubscribed: latency and transfer are the whole time."""
    for payload in (1e5, 1e7, 1e9):
        asked = demand(kind, "dp", payload, gpus=32)
        taken = cost(32).time_comm_op(exchange(kind, "dp", payload)).seconds
        assert asked.latency + asked.transfer == pytest.approx(taken, rel=1e-12)
        assert (asked.transfer > 0).all()
        assert (payload * asked.crossings.seconds <= asked.transfer[asked.crossings.group]).all()


def test_messages_that_share_an_uplink_ask_for_what_each_takes_alone():
    """Ranks 0 to 31 send to another unit, four on each uplink: together they take 4 times as long."""
    ranks = np.arange(32)
    pairs = ProcessGroups("pp_next", np.stack([ranks, ranks + 32], axis=1), ordered=True)
    model = CollectiveCost(pod(64, 8.0), load_library("nccl"), {"pp_next": pairs})
    asked = model.link_demand(exchange(CollectiveType.SEND_RECV, "pp_next", 1e9))
    taken = model.time_comm_op(exchange(CollectiveType.SEND_RECV, "pp_next", 1e9)).seconds
    assert taken - asked.latency == pytest.approx(4 * asked.transfer)


def test_what_stays_in_one_rank_takes_no_time_and_crosses_nothing():
    asked = demand(CollectiveType.ALL_REDUCE, "one", 1e9)
    assert not asked.latency.any()
    assert not asked.transfer.any()
    assert len(asked.crossings.group) == 0


def test_what_stays_on_nvlink_takes_as_long_alone_as_beside_its_siblings():
    asked = demand(CollectiveType.ALL_REDUCE, "tp", 1e9)
    taken = cost().time_comm_op(exchange(CollectiveType.ALL_REDUCE, "tp", 1e9)).seconds
    assert asked.latency + asked.transfer == pytest.approx(taken, rel=1e-12)
    assert len(asked.crossings.group) > 0


def test_a_few_bytes_load_no_link():
    asked = demand(CollectiveType.ALL_REDUCE, "world", 4.0)
    assert (
        asked.latency.tolist()
        == cost().time_comm_op(exchange(CollectiveType.ALL_REDUCE, "world", 4.0)).seconds.tolist()
    )
    assert len(asked.crossings.group) == 0


def test_exchanges_that_differ_in_payload_cross_the_same_links():
    model = cost()
    first, second = (model.link_demand(exchange(CollectiveType.ALL_GATHER, "dp", payload)) for payload in (1e9, 2e9))
    assert first.link_loads is second.link_loads
    assert model.link_demand(exchange(CollectiveType.ALL_GATHER, "dp", 1e9)) is first
    assert second.flow.tolist() == (2 * first.flow).tolist()
