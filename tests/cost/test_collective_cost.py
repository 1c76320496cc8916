"""Collective times: all groups of a kind at once, never above the links' capacity, cached."""

import numpy as np
import pytest

from clustersim.collectives.library_files import load_library
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


def pod_fabric(gpus: int, oversubscription: float = 1.0) -> ClosFabric:
    """H100 nodes, four to a leaf unit."""
    network = NetworkSpec(LeafSpec(4, 8, 2e-7, oversubscription), SpreadEcmp(), SpineSpec(1024, 2e-7))
    return ClosFabric(NODE, network, gpus)


def rank_groups(gpus: int) -> dict[str, ProcessGroups]:
    ranks = np.arange(gpus)
    members = {
        "tp": ranks.reshape(-1, 8),
        "dp": np.ascontiguousarray(ranks.reshape(-1, 8).T),
        "one": ranks[:, None],
        "world": ranks[None],
        "pp_next": np.stack([ranks, np.roll(ranks, -8)], axis=1),
    }
    return {
        comm_group: ProcessGroups(comm_group, array, ordered=comm_group == "pp_next")
        for comm_group, array in members.items()
    }


def collective_cost(
    gpus: int = 64, oversubscription: float = 1.0, library: str = "nccl", **overrides: str
) -> CollectiveCost:
    nccl_overrides = NcclOverrides(forced={CollectiveType(kind): name for kind, name in overrides.items()})
    return CollectiveCost(
        pod_fabric(gpus, oversubscription), nccl_overrides.apply_to(load_library(library)), rank_groups(gpus)
    )


def comm_op(kind: CollectiveType, comm_group: str, payload: float) -> CommOp:
    return CommOp("x", kind, comm_group, payload)


def test_every_group_gets_a_time():
    timing = collective_cost().time_comm_op(comm_op(CollectiveType.ALL_REDUCE, "tp", 1e8))
    assert timing.seconds.shape == (8,)
    assert timing.seconds == pytest.approx(timing.seconds[0])
    assert timing.tier == "nvlink"
    assert timing.provenance is Provenance.PUBLISHED


def test_the_share_of_ports_says_what_limits_a_group():
    """Ports inside a node (64 GPUs: eight), NICs between ranks of different nodes, of a ring over all of them both.

    Eight NICs of 50 GB/s take longer than a port of 450 GB/s that is reached to more than 400 / 450.
    """
    model = collective_cost()
    shares = {
        group: model.time_comm_op(comm_op(CollectiveType.ALL_GATHER, group, 1e9)).nvlink_share
        for group in ("tp", "dp", "world")
    }
    assert shares["tp"].tolist() == [1.0] * 8
    assert shares["dp"].tolist() == [0.0] * 8
    assert 0.5 < shares["world"][0] <= 1.0


def test_a_negligible_transfer_is_busy_with_no_port():
    timing = collective_cost().time_comm_op(comm_op(CollectiveType.ALL_REDUCE, "tp", 4.0))
    assert timing.nvlink_share.tolist() == [0.0] * 8


def test_a_group_of_one_takes_no_time():
    timing = collective_cost().time_comm_op(comm_op(CollectiveType.ALL_REDUCE, "one", 1e9))
    assert timing.seconds.tolist() == [0.0] * 64


def test_small_payloads_are_bound_by_latency_and_large_by_bandwidth():
    model = collective_cost()
    assert model.time_comm_op(comm_op(CollectiveType.ALL_GATHER, "dp", 8.0)).bottleneck is Bottleneck.LATENCY
    assert model.time_comm_op(comm_op(CollectiveType.ALL_GATHER, "dp", 1e10)).bottleneck is Bottleneck.BANDWIDTH


COLLECTIVES = [
    CollectiveType.ALL_REDUCE,
    CollectiveType.ALL_GATHER,
    CollectiveType.REDUCE_SCATTER,
    CollectiveType.ALL_TO_ALL,
]


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize(("comm_group", "port"), [("tp", 450e9), ("dp", 50e9)])
def test_no_port_runs_above_its_rate(kind, comm_group, port):
    """In groups of 8, each rank must send or take in at least 7/8 of the payload through its port."""
    slowest = collective_cost().time_comm_op(comm_op(kind, comm_group, 1e10)).seconds.min()
    assert 7 / 8 * 1e10 / slowest <= port


def test_concurrent_groups_share_the_spine():
    """Four units of four nodes; only the last node of a unit sends to the next unit. At 1:4 it keeps its NIC's rate."""
    full_bandwidth = collective_cost(128).time_comm_op(comm_op(CollectiveType.SEND_RECV, "pp_next", 1e9)).seconds
    oversubscribed = (
        collective_cost(128, oversubscription=4.0)
        .time_comm_op(comm_op(CollectiveType.SEND_RECV, "pp_next", 1e9))
        .seconds
    )
    assert (oversubscribed >= full_bandwidth - 1e-12).all()
    crosses_spine = np.arange(128) // 8 % 4 == 3  # the last node of a unit sends to the next unit
    assert oversubscribed[~crosses_spine] == pytest.approx(full_bandwidth[~crosses_spine])


def test_a_10_to_1_oversubscribed_spine_slows_the_only_crossing_flow():
    """One of four nodes crosses, with one NIC's rate; its leaf's uplinks have 4/10 of a NIC: 2.5 times as long."""
    payload = 1e10
    full_bandwidth = collective_cost(128).time_comm_op(comm_op(CollectiveType.SEND_RECV, "pp_next", payload)).seconds
    oversubscribed = (
        collective_cost(128, oversubscription=10.0)
        .time_comm_op(comm_op(CollectiveType.SEND_RECV, "pp_next", payload))
        .seconds
    )
    crosses_spine = np.arange(128) // 8 % 4 == 3
    assert oversubscribed[crosses_spine] / full_bandwidth[crosses_spine] == pytest.approx(2.5, rel=0.01)


def test_a_forced_algorithm_is_used():
    timing = collective_cost(all_reduce="hierarchical").time_comm_op(comm_op(CollectiveType.ALL_REDUCE, "world", 1e9))
    assert timing.algorithm.startswith("hierarchical")


def test_timings_are_cached_and_equal():
    model = collective_cost()
    first = model.time_comm_op(comm_op(CollectiveType.ALL_REDUCE, "dp", 1e8))
    assert model.time_comm_op(comm_op(CollectiveType.ALL_REDUCE, "dp", 1e8)) is first
    assert (
        collective_cost().time_comm_op(comm_op(CollectiveType.ALL_REDUCE, "dp", 1e8)).seconds.tolist()
        == first.seconds.tolist()
    )


def test_an_unknown_process_group_is_rejected():
    with pytest.raises(InputError, match=r"no process groups 'dpp'; did you mean dp\?"):
        collective_cost().time_comm_op(comm_op(CollectiveType.ALL_REDUCE, "dpp", 1.0))


def test_an_unpublished_library_has_roofline_provenance():
    timing = collective_cost(library="gloo").time_comm_op(comm_op(CollectiveType.ALL_REDUCE, "tp", 1e6))
    assert timing.provenance is Provenance.ROOFLINE


@pytest.mark.parametrize("payload", [1e3, 1e6, 1e9])
def test_gloo_reduce_scatters_by_an_all_reduce(payload: float) -> None:
    cost = collective_cost(library="gloo")
    reductions = (CollectiveType.REDUCE_SCATTER, CollectiveType.ALL_REDUCE)
    for group in ("tp", "dp"):
        scattered, reduced = (cost.time_comm_op(comm_op(kind, group, payload)).seconds for kind in reductions)
        assert scattered == pytest.approx(reduced, rel=0.02)  # the fabric has the hops of half as many steps


@pytest.mark.parametrize("name", data_files.list_names("clusters"))
def test_every_shipped_cluster_times_every_collective(name):
    """Groups inside a node, across nodes, and the whole cluster; larger payloads take longer."""
    cluster = load_cluster(name)
    gpus = min(cluster.fabric.gpu_count, 1024)
    ranks = np.arange(gpus)
    near_size = 2 if gpus % 2 == 0 else 1
    members = {"near": ranks.reshape(-1, near_size), "far": ranks.reshape(near_size, -1).T, "world": ranks[None]}
    groups = {
        comm_group: ProcessGroups(comm_group, np.ascontiguousarray(array)) for comm_group, array in members.items()
    }
    model = CollectiveCost(cluster.fabric, load_library(cluster.library), groups)
    for kind in (collective_type for collective_type in CollectiveType if not collective_type.is_token_routing):
        for comm_group in groups:
            if groups[comm_group].members.shape[1] == 2 or kind is not CollectiveType.SEND_RECV:
                small, large = (
                    model.time_comm_op(comm_op(kind, comm_group, payload)).seconds for payload in (1e3, 1e9)
                )
                assert (small > 0).all()
                assert (small < large).all()


def link_demand(kind: CollectiveType, comm_group: str, payload: float, **options):
    return collective_cost(**options).link_demand(comm_op(kind, comm_group, payload))


@pytest.mark.parametrize("kind", [CollectiveType.ALL_GATHER, CollectiveType.ALL_REDUCE, CollectiveType.BROADCAST])
def test_demand_of_groups_without_shared_links_is_their_total_time(kind):
    """Rails have NICs of their own, and the spine is not oversubscribed: latency plus transfer is the whole time."""
    for payload in (1e5, 1e7, 1e9):
        demanded = link_demand(kind, "dp", payload, gpus=32)
        seconds = collective_cost(32).time_comm_op(comm_op(kind, "dp", payload)).seconds
        assert demanded.latency + demanded.transfer == pytest.approx(seconds, rel=1e-12)
        assert (demanded.transfer > 0).all()
        assert (
            payload * demanded.link_loads.seconds_per_byte <= demanded.transfer[demanded.link_loads.group_index]
        ).all()


def test_demand_of_messages_sharing_an_uplink_is_uncontended():
    """Ranks 0 to 31 send to another unit, four on each uplink: contended they take 4 times as long."""
    ranks = np.arange(32)
    pairs = ProcessGroups("pp_next", np.stack([ranks, ranks + 32], axis=1), ordered=True)
    model = CollectiveCost(pod_fabric(64, 8.0), load_library("nccl"), {"pp_next": pairs})
    demanded = model.link_demand(comm_op(CollectiveType.SEND_RECV, "pp_next", 1e9))
    seconds = model.time_comm_op(comm_op(CollectiveType.SEND_RECV, "pp_next", 1e9)).seconds
    assert seconds - demanded.latency == pytest.approx(4 * demanded.transfer)


def test_a_group_of_one_has_no_link_demand():
    demanded = link_demand(CollectiveType.ALL_REDUCE, "one", 1e9)
    assert not demanded.latency.any()
    assert not demanded.transfer.any()
    assert len(demanded.link_loads.group_index) == 0


def test_demand_within_nvlink_equals_the_contended_time():
    demanded = link_demand(CollectiveType.ALL_REDUCE, "tp", 1e9)
    seconds = collective_cost().time_comm_op(comm_op(CollectiveType.ALL_REDUCE, "tp", 1e9)).seconds
    assert demanded.latency + demanded.transfer == pytest.approx(seconds, rel=1e-12)
    assert len(demanded.link_loads.group_index) > 0


def test_a_few_bytes_load_no_link():
    demanded = link_demand(CollectiveType.ALL_REDUCE, "world", 4.0)
    assert (
        demanded.latency.tolist()
        == collective_cost().time_comm_op(comm_op(CollectiveType.ALL_REDUCE, "world", 4.0)).seconds.tolist()
    )
    assert len(demanded.link_loads.group_index) == 0


def test_collectives_of_different_payloads_share_one_link_load_matrix():
    model = collective_cost()
    first, second = (model.link_demand(comm_op(CollectiveType.ALL_GATHER, "dp", payload)) for payload in (1e9, 2e9))
    assert first.link_loads is second.link_loads
    assert model.link_demand(comm_op(CollectiveType.ALL_GATHER, "dp", 1e9)) is first
    assert second.flow.tolist() == (2 * first.flow).tolist()
