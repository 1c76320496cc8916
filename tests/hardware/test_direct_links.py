"""GPUs without a switch: routes over direct links, link-disjoint rings, and cluster files with link lists."""

from itertools import combinations

import numpy as np
import pytest

from clustersim.common.errors import InputError
from clustersim.hardware.cluster import load_cluster
from clustersim.hardware.degradation import (
    DeadLinkEffect,
    Degradations,
    LinkDegradation,
    SlowLinkEffect,
    degrade_fabric,
)
from clustersim.hardware.direct_links import DirectLinks, max_disjoint_rings

DGX1 = load_cluster("dgx-v100", 8).fabric
TOPO = """
X   NV1 NV1 NV2 NV2 SYS SYS SYS
NV1 X   NV2 NV1 SYS NV2 SYS SYS
NV1 NV2 X   NV2 SYS SYS NV1 SYS
NV2 NV1 NV2 X   SYS SYS SYS NV1
NV2 SYS SYS SYS X   NV1 NV1 NV2
SYS NV2 SYS SYS NV1 X   NV2 NV1
SYS SYS NV1 SYS NV1 NV2 X   NV2
SYS SYS SYS NV1 NV2 NV1 NV2 X
"""
"""What `nvidia-smi topo -m` prints on a DGX-1 with V100."""
LINK_COUNTS = np.array(
    [[int(f"0{word}"[-1]) if "NV" in word else 0 for word in row.split()] for row in TOPO.split("\n")[1:-1]]
)


def route_links(fabric, source, target):
    links = fabric.find_paths(np.array([source]), np.array([target])).links[0]
    return [fabric.link_info(link_id) for link_id in links[links >= 0].tolist()]


def test_the_packaged_cube_mesh_equals_nvidia_smi() -> None:
    assert (DGX1.direct_links.link_matrix == LINK_COUNTS).all()
    assert (LINK_COUNTS == LINK_COUNTS.T).all()
    assert set(LINK_COUNTS.sum(axis=1)) == {6}


def test_pairs_without_a_link_route_over_the_best_gpu() -> None:
    """A link carries 25 GB/s; 0 and 7 have none: by way of 3 there are 2 and 1, by way of 4 there are 2 and 2."""
    for source, target in np.argwhere(LINK_COUNTS > 0).tolist():
        (link,) = route_links(DGX1, source, target)
        assert (link.source, link.target) == (f"gpu{source}", f"gpu{target}")
        assert link.bandwidth == 25e9 * LINK_COUNTS[source, target]
        assert link.latency == pytest.approx(0.6e-6)
    assert [link.target for link in route_links(DGX1, 0, 7)] == ["gpu4", "gpu7"]
    assert [link.bandwidth for link in route_links(DGX1, 0, 7)] == [50e9, 50e9]
    for source, target in np.argwhere((LINK_COUNTS == 0) & ~np.eye(8, dtype=bool)).tolist():
        first, second = route_links(DGX1, source, target)
        assert first.target == second.source


def test_links_are_found_by_the_names_of_their_gpus_in_every_node() -> None:
    fabric = load_cluster("dgx-v100", 64).fabric
    link_id = fabric.find_link("gpu43", "gpu47")  # places 3 and 7 of node 5
    assert (fabric.link_info(link_id).bandwidth, fabric.parallel_link_count(link_id)) == (25e9, 1)
    assert fabric.parallel_link_count(fabric.find_link("gpu47", "gpu44")) == 2
    with pytest.raises(InputError, match=r"no link.*gpu40 to gpu45.*gpu41"):
        fabric.find_link("gpu40", "gpu45")


def test_part_of_a_node_has_the_links_among_its_first_gpus() -> None:
    """Of 5 GPUs the fifth hangs on the first by two links, and the others reach it over that one."""
    fabric = load_cluster("dgx-v100", 5).fabric
    table = fabric.links
    assert table.bandwidth[table.kind == 0].sum() == 2 * 25e9 * np.triu(LINK_COUNTS[:5, :5]).sum()
    assert [link.source for link in route_links(fabric, 3, 4)] == ["gpu3", "gpu0"]


@pytest.mark.parametrize("size", range(2, 9))
def test_rings_pass_all_members_once_and_share_no_link(size: int) -> None:
    """And there are no more than the member with fewest links among the others can have."""
    for group in combinations(range(8), size):
        group_links = LINK_COUNTS[np.ix_(group, group)]
        rings, used = max_disjoint_rings(group_links), np.zeros_like(group_links)
        for ring in rings:
            assert sorted(ring) == list(range(size))
            used[list(ring), [*ring[1:], ring[0]]] += 1
        assert (used <= group_links).all()
        assert len(rings) <= group_links.sum(axis=1).min()


def test_a_dgx1_has_the_published_rings() -> None:
    """Three interwoven rings of single links (NVIDIA WP-08437-002), each used both ways; two in each half."""
    assert len(max_disjoint_rings(LINK_COUNTS)) == 6
    assert len(max_disjoint_rings(LINK_COUNTS[:4, :4])) == len(max_disjoint_rings(LINK_COUNTS[4:, 4:])) == 4


def test_shares_of_a_full_node_use_every_link_equally() -> None:
    """Six rings, as many as a GPU has links: each link carries a sixth of what its GPU sends."""
    shares = DirectLinks(tuple(map(tuple, LINK_COUNTS.tolist()))).ring_shares(0xFF)
    assert shares == pytest.approx(LINK_COUNTS / 6)


def test_equal_links_are_shared_evenly_by_any_members() -> None:
    shares = DirectLinks.fully_connected(8).ring_shares(0b1011)
    assert shares is not None
    assert shares[0, [1, 3]].tolist() == [0.5, 0.5]
    assert shares.sum() == pytest.approx(3)


def test_rings_of_full_meshes() -> None:
    """Complete digraphs divide into directed rings but for 4 and 6 places (Tillson 1980)."""
    for gpus, rings in ((3, 2), (4, 2), (5, 4)):
        assert len(max_disjoint_rings(np.ones((gpus, gpus), np.int64) - np.eye(gpus, dtype=np.int64))) == rings


def test_dead_direct_links_are_rerouted_and_slow_ones_kept() -> None:
    dead = degrade_fabric(DGX1, Degradations(links=(LinkDegradation("gpu0", "gpu1", DeadLinkEffect()),)))
    assert len(route_links(dead, 0, 1)) == 2
    assert set(dead.domain_ids(np.arange(8)).tolist()) == {0}
    half = degrade_fabric(DGX1, Degradations(links=(LinkDegradation("gpu0", "gpu3", DeadLinkEffect()),)))  # one of two
    slow = degrade_fabric(DGX1, Degradations(links=(LinkDegradation("gpu0", "gpu1", SlowLinkEffect(0.5)),)))
    assert (route_links(half, 0, 3)[0].bandwidth, route_links(slow, 0, 1)[0].bandwidth) == (25e9, 12.5e9)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"links": "every"}, r"node\.nvlink\.links: 'every'.*all.*list of pairs"),
        ({"links": [[0, 8]]}, r"links: \[0, 8\].*pair \[i, j\].*0 to 7"),
        ({"links": [[0, 0]]}, r"\[0, 0\] is not a pair"),
        ({"links": [[0, 1, 2]]}, r"\[0, 1, 2\] is not a pair"),
        ({"links": [[0, True]]}, "is not a pair"),
        ({"links": [[0, 1], [0, 2]]}, r"links:.*0 to 2 links.*equally many"),
        (
            {"links": [[slot, (slot + 1) % 8] for slot in range(8)]},
            "join GPUs 0 and 3 neither directly nor over one",
        ),
        ({"gpus": 24, "links": "all"}, r"links:.*at most 16 GPUs.*switch joins 24"),
    ],
)
def test_invalid_links_are_rejected(changes: dict, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as caught:
        load_cluster("mi300x", overrides={"node": {"nvlink": changes}})
    assert "\n" not in str(caught.value)


def test_disconnected_subsets_of_a_node_are_rejected() -> None:
    """In pairs 0-1, 2-3, ... and 0-2, 1-3 over four places, three GPUs are joined; in these, GPUs 0 and 1 are not."""
    square = [[0, 2], [0, 3], [1, 2], [1, 3]]
    node = {"gpus": 4, "nvlink": {"gpus": 4, "links": square}, "nic": {"per_node": 4}}
    assert load_cluster("mi300x", 4, {"node": node}).gpu_count == 4
    with pytest.raises(InputError, match=r"gpus: node\.nvlink\.links.*first 2 GPUs"):
        load_cluster("mi300x", 2, {"node": node})
