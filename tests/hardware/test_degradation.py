"""Fault injection: which GPUs are slower, the remaining bandwidth of links, and rejected degradations."""

import networkx as nx
import numpy as np
import pytest

from clustersim.common.errors import InputError
from clustersim.hardware.accelerator import load_accelerator
from clustersim.hardware.cluster import load_cluster, with_accelerators
from clustersim.hardware.degradation import (
    DeadLinkEffect,
    Degradations,
    DegradedNics,
    LinkDegradation,
    SlowGpus,
    SlowLinkEffect,
    degrade_fabric,
)
from clustersim.hardware.graph_fabric import GraphFabric
from clustersim.hardware.topology import LINK_KINDS, LinkKind
from tests.hardware.line_counter import count_lines
from tests.sentences import parts

A100 = load_accelerator("a100-sxm-80gb")


def changed_fractions(fabric, changed):
    """Remaining fraction of each changed link's bandwidth, as {(source, target): fraction}."""
    fractions = changed.links.bandwidth / fabric.links.bandwidth
    links = {link_id: fabric.link_info(link_id) for link_id in np.flatnonzero(fractions != 1.0).tolist()}
    return {(link.source, link.target): pytest.approx(fractions[link_id]) for link_id, link in links.items()}


@pytest.fixture
def fabric(build):
    """Nine nodes of four GPUs in three pods; a leaf's two uplinks are one bundle, and a pod's eight."""
    return build["rails, three pods, last partial"]()


def test_speeds_of_several_entries_multiply_and_others_keep_theirs():
    degradations = Degradations(slow_gpus=(SlowGpus((1, 2), 0.5), SlowGpus((2, 2), 0.8)))
    assert degradations.gpu_speeds(np.arange(4)).tolist() == [1.0, 0.5, 0.4, 1.0]
    assert Degradations().gpu_speeds(np.arange(2)).tolist() == [1.0, 1.0]


def test_empty_degradations_leave_the_fabric_unchanged(fabric):
    assert degrade_fabric(fabric, Degradations()) is fabric
    assert degrade_fabric(fabric, Degradations(slow_gpus=(SlowGpus((0,), 0.5),))) is fabric


def test_a_slow_nic_is_slow_in_both_directions_and_counted_once(build, fabric):
    nic = Degradations(nics=(DegradedNics((5,), 0.5),))
    assert changed_fractions(fabric, degrade_fabric(fabric, nic)) == {
        ("nic1.1", "leaf0.1"): 0.5,
        ("leaf0.1", "nic1.1"): 0.5,
    }
    shared_nics = build["rails, shared nics"]()
    two_entries = Degradations(nics=(DegradedNics((4, 5), 0.5),))
    assert changed_fractions(shared_nics, degrade_fabric(shared_nics, two_entries)) == {
        ("nic1.0", "leaf0.0"): 0.5,
        ("leaf0.0", "nic1.0"): 0.5,
    }


def test_traffic_of_a_dead_nic_goes_through_a_neighbour_s(fabric):
    changed = degrade_fabric(fabric, Degradations(nics=(DegradedNics((5,), 0.0),)))
    sources, targets = np.repeat(np.arange(36), 36), np.tile(np.arange(36), 36)
    assert not np.isin(changed.find_paths(sources, targets).links, fabric.nic_links(np.array([5]))).any()
    route = changed.find_paths(np.array([5]), np.array([9])).links[0]
    assert [changed.link_info(link_id).kind for link_id in route[route >= 0][:2]] == [LinkKind.NVLINK, LinkKind.NVLINK]


def test_a_disconnected_node_is_rejected_with_its_gpus(build):
    degradations = Degradations(nics=(DegradedNics((0,), 0.5), DegradedNics((4, 5, 6, 7), 0.0)))
    with pytest.raises(InputError, match=r"nics\.1:.*NICs of GPUs 4-7, GPUs 0-3, 8-\d+ cannot reach GPUs 4-7"):
        degrade_fabric(build["rails, three pods, last partial"](), degradations)


def test_slow_links_may_be_directed_and_entries_multiply(fabric):
    one_way = LinkDegradation("leaf0.1", "spine0.0", SlowLinkEffect(0.5), both_directions=False)
    both_ways = LinkDegradation("spine0.0", "leaf0.1", SlowLinkEffect(0.6))
    fractions = changed_fractions(fabric, degrade_fabric(fabric, Degradations(links=(one_way, both_ways))))
    assert fractions == {("leaf0.1", "spine0.0"): 0.3, ("spine0.0", "leaf0.1"): 0.6}


def test_background_loads_every_link_of_its_tier_and_no_other(fabric):
    changed = degrade_fabric(fabric, Degradations(background_load={LinkKind.LEAF: 0.3, LinkKind.SPINE: 0.2}))
    fractions = changed.links.bandwidth / fabric.links.bandwidth
    for kind, expected in zip(LINK_KINDS, (1.0, 1.0, 1.0, 1.0, 0.7, 0.8, 1.0), strict=True):
        assert fractions[fabric.links.kind == LINK_KINDS.index(kind)] == pytest.approx(expected)


def test_a_bundle_that_loses_members_keeps_the_rest(build, fabric):
    """K links that lose n keep (k - n)/k: a leaf has 2 uplinks, a pod's spines 2 with 4 uplinks each."""
    for source, target, links in (("leaf0.1", "spine0.0", 2), ("spine0.0", "core0.0", 8)):
        change = LinkDegradation(source, target, DeadLinkEffect(1))
        expected = 1 - 1 / links
        assert changed_fractions(fabric, degrade_fabric(fabric, Degradations(links=(change,)))) == {
            (source, target): expected,
            (target, source): expected,
        }
    hashed = build["rails, hashed"]()
    assert {hashed.parallel_link_count(link_id) for link_id in range(len(hashed.links.kind))} == {1}


def test_a_disconnected_cluster_is_rejected_with_links_and_gpus(build):
    racks = build["racks"]()  # two nodes, eight GPUs, under each of five leaves
    harmless = LinkDegradation("gpu3", "nvswitch0", DeadLinkEffect(1))
    all_members = LinkDegradation(
        "leaf1.0", "spine0.0", DeadLinkEffect(racks.parallel_link_count(racks.find_link("leaf1.0", "spine0.0")))
    )
    with pytest.raises(InputError) as caught:
        degrade_fabric(racks, Degradations(links=(harmless, all_members)))
    links, disconnected = (
        f"the {all_members.effect.lost_count} links between leaf1.0 and spine0.0",
        "GPUs 0-7, 16-35 cannot reach GPUs 8-15",
    )
    assert str(caught.value) == f"links.1: without {links}, {disconnected}"
    with pytest.raises(InputError, match=r"leaf1\.0 to spine0\.0, GPUs 8-15.*GPUs 0-7, 16-35"):
        degrade_fabric(
            racks,
            Degradations(links=(LinkDegradation("leaf1.0", "spine0.0", all_members.effect, both_directions=False),)),
        )


def test_unused_gpus_may_be_disconnected():
    graph = nx.DiGraph()
    for gpu in range(3):
        graph.add_node(f"gpu{gpu}", kind="gpu", node=gpu)
    graph.add_node("s", kind="switch")
    for gpu in range(3):
        for ends in ((f"gpu{gpu}", "s"), ("s", f"gpu{gpu}")):
            graph.add_edge(*ends, kind="nic", bandwidth=1e9, latency=1e-6, technology="infiniband")
    fabric = GraphFabric(graph)
    degradations = Degradations(links=(LinkDegradation("gpu2", "s", DeadLinkEffect()),))
    changed = degrade_fabric(fabric, degradations, used_gpus=np.arange(2))
    assert changed.find_paths(np.array([0]), np.array([1])).links.shape == (1, 2)
    with pytest.raises(InputError, match="GPUs 0-1 cannot reach GPU 2"):
        degrade_fabric(fabric, degradations)
    with pytest.raises(ValueError, match="no route"):
        changed.find_paths(np.array([0]), np.array([2]))


@pytest.mark.parametrize(
    ("link", "sentence"),
    [
        (("leaf0", "spine0.0"), "there is no leaf0; there are leaf0.0 to leaf4.3"),
        (("leaf9.0", "spine0.0"), "there is no leaf9.0; there are leaf0.0 to leaf4.3"),
        (("leaf0.4", "spine0.0"), "there is no leaf0.4; there are leaf0.0 to leaf4.3"),
        (("loaf0.0", "spine0.0"), "there is no loaf0.0 ... gpu0, nvswitch0, nic0.0,"),
        (("leaf0.0", "spine1.0"), "no link ... leaf0.0 to spine1.0 ... leaf0.0 ... nic0.0, nic1.0,"),
        (("gpu99", "nvswitch0"), "there is no gpu99; there are gpu0 to gpu35"),
    ],
)
def test_unknown_links_are_rejected_with_suggestions(fabric, link, sentence):
    with pytest.raises(InputError) as caught:
        degrade_fabric(fabric, Degradations(links=(LinkDegradation(*link, SlowLinkEffect(0.5)),)))
    assert parts(f"links.0: {sentence}").search(str(caught.value))


def test_unknown_links_of_a_graph_are_rejected_with_suggestions(fabric):
    graph = GraphFabric(fabric.to_graph())
    for ends, sentence in (
        (("leaf0.9", "spine0.0"), "there is no leaf0.9 in this machine; did you mean"),
        (("leaf0.0", "leaf0.1"), "no link ... leaf0.0 to leaf0.1 ... nic0.0, nic1.0, spine0.0"),
    ):
        with pytest.raises(InputError, match=parts(sentence)):
            graph.find_link(*ends)


def test_degradations_of_missing_hardware_are_rejected(build, fabric):
    node_fabric, rack_fabric = build["one nvlink node"](), build["one rack without spines"]()
    with pytest.raises(InputError, match=r"nics.0: GPU 3 has no NIC"):
        degrade_fabric(node_fabric, Degradations(nics=(DegradedNics((3,), 0.5),)))
    with pytest.raises(InputError, match=r"background.leaf: this cluster has no such links; it has nic$"):
        degrade_fabric(rack_fabric, Degradations(background_load={LinkKind.LEAF: 0.5}))
    with pytest.raises(InputError, match=r"background.leaf: .* it has none beyond its nodes"):
        degrade_fabric(node_fabric, Degradations(background_load={LinkKind.LEAF: 0.5}))
    too_many = Degradations(links=(LinkDegradation("leaf0.0", "spine0.0", DeadLinkEffect(3)),))
    with pytest.raises(InputError, match="a bundle of 2 links, of which 3 cannot be dead"):
        degrade_fabric(fabric, too_many)


def test_mixed_clusters_list_the_accelerator_of_each_gpu():
    cluster = load_cluster("dgx-h100", 32)
    assert cluster.accelerator_kinds()[0] == (cluster.accelerator,)
    assert not cluster.accelerator_kinds()[1].any()
    mixed = with_accelerators(cluster, [((1,), A100), ((3,), load_accelerator("h200-sxm-141gb")), ((2,), A100)])
    accelerators, accelerator_index = mixed.accelerator_kinds()
    assert [accelerator.name for accelerator in accelerators] == ["h100-sxm-80gb", "a100-sxm-80gb", "h200-sxm-141gb"]
    assert accelerator_index.tolist() == [0] * 8 + [1] * 16 + [2] * 8
    assert (mixed.accelerator, mixed.fabric, mixed.library) == (cluster.accelerator, cluster.fabric, cluster.library)
    assert not mixed.is_measured
    assert "a100-sxm-80gb.yaml" in {path.name for path in mixed.files}


def test_replacing_all_accelerators_leaves_one_kind():
    accelerators, accelerator_index = with_accelerators(
        load_cluster("dgx-h100", 16), [((0, 1), A100)]
    ).accelerator_kinds()
    assert [accelerator.name for accelerator in accelerators] == ["a100-sxm-80gb"]
    assert not accelerator_index.any()


def test_degrading_131072_gpus_runs_in_arrays():
    """Hundreds of thousands of links and 16,384 nodes: Python runs fewer lines than there are leaf switches, 4,096."""
    fabric = load_cluster("dgx-h100", 2**17, {"fabric.core.pods": 128}).fabric
    assert len(fabric.links.kind) > 500_000
    changes = (
        LinkDegradation("nic1.4", "leaf0.4", DeadLinkEffect()),
        LinkDegradation("leaf9.0", "spine2.0", SlowLinkEffect(0.5)),
    )

    def degrade_and_route():
        sources = np.arange(fabric.gpu_count)
        degrade_fabric(fabric, Degradations(links=changes)).find_paths(sources, (sources + 8) % fabric.gpu_count)

    assert 0 < count_lines(degrade_and_route) < 4096
