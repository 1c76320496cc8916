"""Sites: numbering, routes, transports, degradations, what a file may say."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from clustersim.common.errors import InputError
from clustersim.hardware.clos_fabric import ClosFabric
from clustersim.hardware.cluster import load_cluster
from clustersim.hardware.connectivity import find_partition
from clustersim.hardware.graph_fabric import GraphFabric
from clustersim.hardware.site_links import SiteLink, Transport, TransportProtocol, find_routes
from clustersim.hardware.sites import Site, SitesFabric
from clustersim.hardware.topology import LINK_KINDS, LinkKind
from tests.hardware.conftest import MACHINES

NETWORKED = [name for name, make in MACHINES.items() if make().network is not None]
GB = 1e9


def two_way(source: int, target: int, latency: float = 5e-3, **keys: object) -> tuple[SiteLink, SiteLink]:
    link = SiteLink(source, target, 100 * GB, latency, **keys)  # type: ignore[arg-type]
    return link, replace(link, source=target, target=source)


def three_sites(machine: Callable[[], ClosFabric] = MACHINES["rails, three pods, last partial"]) -> SitesFabric:
    """A chain a - b - c of equal sites."""
    return SitesFabric(tuple(Site(name, machine()) for name in "abc"), (*two_way(0, 1, 5e-3), *two_way(1, 2, 20e-3)))


@pytest.mark.parametrize("name", NETWORKED)
def test_a_path_inside_a_site_is_the_path_of_the_site(name: str) -> None:
    fabric, alone = three_sites(MACHINES[name]), MACHINES[name]()
    count, first_link = alone.gpu_count, len(alone.links.kind)
    sources, targets = (ids.reshape(-1) for ids in np.meshgrid(np.arange(count), np.arange(count)))
    inside, expected = fabric.find_paths(sources + count, targets + count), alone.find_paths(sources, targets)
    assert np.array_equal(np.where(inside.links < 0, -1, inside.links - first_link), expected.links)
    assert np.array_equal(inside.latency, expected.latency)


@pytest.mark.parametrize("name", NETWORKED)
def test_a_path_between_sites_is_a_way_from_source_to_target(name: str) -> None:
    fabric = three_sites(MACHINES[name])
    rng = np.random.default_rng(0)
    sources, targets = rng.integers(0, fabric.gpu_count, (2, 200))
    paths, ends, table = fabric.find_paths(sources, targets), fabric.link_endpoints, fabric.links
    for source, target, links, latency in zip(sources, targets, paths.links, paths.latency, strict=True):
        vertex = source
        used = links[links >= 0]
        for link in used:
            assert ends.source[link] == vertex
            vertex = ends.target[link]
        assert vertex == target
        assert latency == pytest.approx(table.latency[used].sum(), abs=1e-15)


def test_a_way_without_a_link_of_its_own_passes_other_sites() -> None:
    fabric = three_sites()
    paths = fabric.find_paths(np.array([0]), np.array([fabric.gpu_count - 1]))
    assert paths.site_latency is not None
    assert paths.site_latency[0] == pytest.approx(25e-3)


def test_fewer_links_are_preferred_to_a_shorter_way() -> None:
    links = (*two_way(0, 1, 1e-3), *two_way(1, 2, 1e-3), *two_way(0, 2, 50e-3))
    assert find_routes(3, links)[0, 2] == (4,)


def test_all_sites_reach_each_other_until_a_link_dies() -> None:
    fabric = three_sites()
    gpus, alive = np.arange(fabric.gpu_count), np.ones(len(fabric.links.kind), np.bool_)
    assert find_partition(fabric.link_endpoints, alive, gpus) is None
    alive[[fabric.find_link("b", "c"), fabric.find_link("c", "b")]] = False
    reached, cut_off = find_partition(fabric.link_endpoints, alive, gpus) or ([], [])
    assert len(reached) == 2 * len(cut_off)


def test_around_a_dead_link_traffic_takes_another_way() -> None:
    ring = SitesFabric(
        tuple(Site(name, MACHINES["racks"]()) for name in "abc"), (*two_way(0, 1), *two_way(1, 2), *two_way(0, 2))
    )
    fraction = np.ones(len(ring.links.kind))
    fraction[ring.find_link("a", "c")] = 0.0
    degraded = ring.with_degraded_links(fraction)
    pair = np.array([0]), np.array([ring.gpu_count - 1])
    assert degraded.find_paths(*pair).site_latency == pytest.approx(2 * ring.find_paths(*pair).site_latency)
    assert degraded.find_paths(*pair[::-1]).site_latency == pytest.approx(ring.find_paths(*pair).site_latency)


def test_a_gpu_with_a_dead_nic_leaves_its_site_by_a_neighbour() -> None:
    fabric = three_sites()
    fraction = np.ones(len(fabric.links.kind))
    fraction[fabric.nic_links(np.array([5]))] = 0.0
    paths = fabric.with_degraded_links(fraction).find_paths(np.array([5]), np.array([fabric.gpu_count - 1]))
    used = paths.links[paths.links >= 0]
    assert (fraction[used] > 0.0).all()
    assert fabric.link_endpoints.source[used[0]] == 5


@pytest.mark.parametrize(
    ("transport", "rate"),
    [
        (Transport(), math.inf),
        (Transport(window=20e6), 1e9),  # 20 MB in flight for 20 ms
        (Transport(window=20e6, connections=8), 8e9),
        (Transport(TransportProtocol.TCP, loss=1.5e-4, packet=1000.0), 1000.0 / 20e-3 * 100.0),  # sqrt(1.5/1.5e-4)
        (Transport(window=20e6, loss=1e-3, packet=4000.0), 1e9 / (1.0 + 5.0)),  # 5,000 packets in flight
    ],
)
def test_what_one_gpu_reaches_over_a_transport(transport: Transport, rate: float) -> None:
    assert transport.gpu_rate(20e-3) == pytest.approx(rate)


def test_a_limited_transport_is_a_link_of_each_gpu() -> None:
    links = (*two_way(0, 1, 5e-3, transport=Transport(window=10e6)), *two_way(1, 2, 20e-3))
    fabric = SitesFabric(tuple(Site(name, MACHINES["racks"]()) for name in "abc"), links)
    per_site = fabric.gpu_count // 3
    near, far = (fabric.find_paths(np.array([0]), np.array([target])).links[0] for target in (per_site, 2 * per_site))
    assert fabric.links.bandwidth[near[0]] == pytest.approx(10e6 / 10e-3)
    assert fabric.links.bandwidth[far[0]] == pytest.approx(10e6 / 50e-3)  # the round trip of the whole way
    infos = [fabric.link_info(link) for link in range(len(fabric.links.kind))]
    assert len({(info.source, info.target) for info in infos}) == len(infos)


def test_rotation_orbits_have_equal_links_and_count_them_all() -> None:
    links = (*two_way(0, 1, transport=Transport(window=10e6)), *two_way(1, 2))
    fabric = SitesFabric(tuple(Site(name, MACHINES["racks"]()) for name in "abc"), links)
    alone = MACHINES["racks"]()
    if alone.rotation is None:
        pytest.skip("racks of this size do not rotate")
    rotation = fabric.rotation
    assert rotation is not None
    assert len(rotation.orbit_of_link) == len(fabric.links.kind) + 1
    first = rotation.first_link[rotation.orbit_of_link[:-1]]
    assert np.array_equal(fabric.links.bandwidth, fabric.links.bandwidth[first])
    assert np.array_equal(fabric.links.kind, fabric.links.kind[first])


def test_as_a_graph_it_has_the_same_ways() -> None:
    fabric = three_sites(MACHINES["racks"])
    graph = GraphFabric(fabric.to_graph())
    assert graph.gpu_count == fabric.gpu_count
    sources, targets = np.array([0, 0, 20, 40]), np.array([3, 40, 75, 90])
    assert graph.find_paths(sources, targets).latency == pytest.approx(fabric.find_paths(sources, targets).latency)


def test_tiers_end_with_the_sites() -> None:
    fabric = three_sites()
    *inner, top = fabric.describe_tiers()
    assert (top.kind, top.count) == ("site", 3)
    assert [tier.count for tier in inner] == [3 * tier.count for tier in fabric.sites[0].fabric.describe_tiers()]
    assert fabric.highest_tier([0, fabric.gpu_count - 1]) == "wan"
    assert fabric.highest_tier([0, 1]) == fabric.sites[0].fabric.highest_tier([0, 1])


# --- files


def write_sites(folder: Path, **changes: object) -> str:
    content: dict[str, object] = {
        "sites": [
            {"name": "west", "cluster": "dgx-h100", "gpus": 16},
            {"name": "east", "cluster": "hgx-h200", "gpus": 32},
        ],
        "links": [{"source": "west", "target": "east", "bandwidth": "800 Gbit/s", "distance": "1000 km"}],
    }
    path = folder / "sites.yaml"
    path.write_text(yaml.safe_dump(content | changes), encoding="utf-8")
    return str(path)


def test_a_file_of_unlike_sites(tmp_path: Path) -> None:
    cluster = load_cluster(write_sites(tmp_path))
    accelerators, kind_of_gpu = cluster.accelerator_kinds()
    assert [accelerator.name for accelerator in accelerators] == [
        load_cluster(name).accelerator.name for name in ("dgx-h100", "hgx-h200")
    ]
    assert np.array_equal(kind_of_gpu, np.repeat([0, 1], [16, 32]))
    wan = cluster.fabric.links.latency[cluster.fabric.links.kind == LINK_KINDS.index(LinkKind.WAN)].max()
    assert wan == pytest.approx(4.897e-3, rel=1e-3)  # 1,000 km of fibre at c / 1.4682


def test_a_file_of_sites_with_unlike_nodes(tmp_path: Path) -> None:
    """Nodes of eight and of four GPUs, each with its own accelerator."""
    sites = [{"name": n, "cluster": c, "gpus": 144} for n, c in (("west", "dgx-h100"), ("east", "gb200-nvl72"))]
    cluster = load_cluster(write_sites(tmp_path, sites=sites))
    assert (cluster.gpu_count, cluster.node_count, cluster.gpus_per_node) == (288, 18 + 36, 4)
    accelerators, kinds = cluster.accelerator_kinds()
    assert [accelerator.name for accelerator in accelerators] == ["h100-sxm-80gb", "gb200"]
    assert kinds.tolist() == [0] * 144 + [1] * 144
    assert np.bincount(cluster.fabric.domain_ids(np.arange(288))).tolist() == [8] * 18 + [72] * 2


def test_a_smaller_job_has_the_same_fraction_of_each_site(tmp_path: Path) -> None:
    path = write_sites(tmp_path, sites=[{"name": name, "cluster": "dgx-h100", "gpus": 32} for name in ("west", "east")])
    fabric = load_cluster(path, 32).fabric
    assert isinstance(fabric, SitesFabric)
    assert [site.fabric.gpu_count for site in fabric.sites] == [16, 16]


def test_one_site_is_its_cluster(tmp_path: Path) -> None:
    path = write_sites(tmp_path, sites=[{"name": "a", "cluster": "dgx-h100", "gpus": 32}])
    assert load_cluster(path).fabric == load_cluster("dgx-h100", 32).fabric


LINK = {"source": "west", "target": "east", "bandwidth": "800 Gbit/s"}


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"links": []}, "no way leads from west to east"),
        ({"links": [LINK]}, "round_trip: is missing"),
        ({"links": [LINK | {"distance": "1 km", "round_trip": "1 ms"}]}, "keep one"),
        ({"links": [LINK | {"round_trip": "0 ms"}]}, "zero"),
        ({"links": [LINK | {"distance": "1 km", "both_directions": False}]}, "no way leads from east to west"),
        ({"links": [LINK | {"distance": "1 km"}] * 2}, "already"),
        ({"links": [LINK | {"distance": "1 km", "target": "north"}]}, "north"),
        ({"links": [LINK | {"distance": "1 km", "transport": {"loss": 0.1}}]}, "window: is missing"),
        ({"links": [LINK | {"distance": "1 km", "transport": {"protocol": "tcp", "loss": 1.5}}]}, "fraction"),
        ({"links": [LINK | {"distance": "1 km", "speed": 3}]}, "speed"),
        ({"sites": []}, "1 to 64"),
        ({"sites": [{"name": "west", "cluster": "dgx-h100", "gpus": 16}] * 2}, "already"),
        (
            {"sites": [{"name": n, "cluster": c, "gpus": 16} for n, c in (("west", "dgx-h100"), ("east", "mi300x"))]},
            "collective library rccl",
        ),
    ],
)
def test_mistakes_are_named(tmp_path: Path, changes: dict[str, object], part: str) -> None:
    with pytest.raises(InputError, match=part) as caught:
        load_cluster(write_sites(tmp_path, **changes))
    assert "sites.yaml" in str(caught.value)


def test_an_uneven_share_of_the_sites_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not the same fraction"):
        load_cluster(write_sites(tmp_path), 40)
