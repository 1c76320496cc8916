"""Several data centres as one fabric: which links does a transfer from one site to another take?

Inside a site, those of its own fabric. Between sites, up to the highest switches of its site, over the site's border
to the links between sites (`site_links`), and down again. GPUs, nodes and NVLink domains are numbered site by site, so
ranks in order fill one site after the other. Links are numbered likewise, followed by those of the borders, between
sites, and one stream for each GPU and other site whose rate the transport limits: the most that this GPU sends there.

Assumptions: a border passes whatever the links between sites carry; a GPU sends to one peer in another site at a time,
so its connections to several of them share a stream's rate.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.errors import InputError
from clustersim.common.pickling import FieldPickling
from clustersim.hardware.direct_links import DirectLinks, HasDirectLinks
from clustersim.hardware.rotation import FabricRotation, HasRotation
from clustersim.hardware.site_links import Route, SiteLink, find_routes, route_gpu_rate
from clustersim.hardware.topology import (
    LINK_KINDS,
    Fabric,
    FabricTier,
    HasBorder,
    LinkEndpoints,
    LinkInfo,
    LinkKind,
    LinkTable,
    Paths,
)

if TYPE_CHECKING:
    import networkx as nx

_WAN: Final = LINK_KINDS.index(LinkKind.WAN)
WAN_TIER: Final = "wan"


@dataclass(frozen=True, slots=True)
class Site:
    """One data centre. fabric: of a kind with a border (`HasBorder`)."""

    name: str
    fabric: Fabric


@dataclass(frozen=True, slots=True)
class _Extent:
    """Ids of one site: its first GPU, node, domain, link and vertex (without GPUs) in the whole."""

    gpu: int
    node: int
    domain: int
    link: int
    vertex: int


@dataclass(frozen=True)
class SitesFabric(FieldPickling):
    """Sites and the links between them, each direction a `SiteLink`. Not slotted: cached properties."""

    sites: tuple[Site, ...]
    site_links: tuple[SiteLink, ...]

    @cached_property
    def gpu_count(self) -> int:
        """Number of GPUs of all sites."""
        return sum(site.fabric.gpu_count for site in self.sites)

    @cached_property
    def _extents(self) -> tuple[_Extent, ...]:
        sizes = np.array([_site_sizes(site.fabric) for site in self.sites], np.int64)
        starts = np.vstack([np.zeros(sizes.shape[1], np.int64), np.cumsum(sizes, axis=0)])
        starts[:, 4] += self.gpu_count
        return tuple(_Extent(*start) for start in starts.tolist())

    @cached_property
    def _site_of_gpu(self) -> IntArray:
        counts = [site.fabric.gpu_count for site in self.sites]
        return np.repeat(np.arange(len(self.sites)), counts)

    def site_ids(self, gpus: IntArray) -> IntArray | None:
        """The site of each GPU (any shape)."""
        return self._site_of_gpu[gpus]

    @cached_property
    def routes(self) -> dict[tuple[int, int], Route]:
        """Route over the links between sites from each site to each other."""
        return find_routes(len(self.sites), self.site_links)

    @cached_property
    def _tops(self) -> tuple[IntArray, ...]:
        """For each site, its highest switches: vertex ids in the site's own numbering."""
        return tuple(
            np.unique(site.fabric.link_endpoints.target[_last_links(exits.links)])
            for site, (exits, _) in zip(self.sites, self._site_borders, strict=True)
        )

    @cached_property
    def _site_borders(self) -> tuple[tuple[Paths, Paths], ...]:
        """For each site, the routes of all of its GPUs to its highest switches, and back."""
        return tuple((_border_paths(site, outwards=True), _border_paths(site, outwards=False)) for site in self.sites)

    @cached_property
    def _border_table(self) -> list[tuple[int, int, bool]]:
        """Border links: site, its highest switch, and whether it leads out."""
        return [
            (index, int(top), outwards)
            for index, tops in enumerate(self._tops)
            for outwards in (True, False)
            for top in tops.tolist()
        ]

    @cached_property
    def _streams(self) -> dict[tuple[int, int], tuple[int, float]]:
        """First link id, and bytes/s of each, of the streams from a site to another whose rate is limited."""
        first = self._first_site_link + len(self.site_links)
        streams: dict[tuple[int, int], tuple[int, float]] = {}
        for pair, route in self.routes.items():
            rate = route_gpu_rate(route, self.site_links)
            if np.isfinite(rate):
                streams[pair] = (first, rate)
                first += self.sites[pair[0]].fabric.gpu_count
        return streams

    @cached_property
    def _first_border(self) -> int:
        return self._extents[-1].link

    @cached_property
    def _first_site_link(self) -> int:
        return self._first_border + len(self._border_table)

    @property
    def site_link_ids(self) -> range:
        """Ids of the links between sites, in the order of `site_links`."""
        return range(self._first_site_link, self._first_site_link + len(self.site_links))

    @cached_property
    def links(self) -> LinkTable:
        """Properties of every link: of sites, borders, between sites, streams."""
        tables = [site.fabric.links for site in self.sites]
        networks = [
            int(table.technology[_last_links(exits.links)][0])
            for table, (exits, _) in zip(tables, self._site_borders, strict=True)
        ]
        border = [(self._border_bandwidth(site), 0.0, networks[site]) for site, _, _ in self._border_table]
        between = [(link.bandwidth, link.latency, networks[link.source]) for link in self.site_links]
        rows = np.array([*border, *between], np.float64).reshape(-1, 3)
        stream_counts = [self.sites[source].fabric.gpu_count for source, _ in self._streams]
        stream_rates = np.repeat([rate for _, rate in self._streams.values()], stream_counts)
        stream_networks = np.repeat([networks[source] for source, _ in self._streams], stream_counts)
        wan_count = len(rows) + len(stream_rates)
        return LinkTable(
            kind=np.concatenate([*(table.kind for table in tables), np.full(wan_count, _WAN, np.int8)]),
            bandwidth=np.concatenate([*(table.bandwidth for table in tables), rows[:, 0], stream_rates]),
            latency=np.concatenate([*(table.latency for table in tables), rows[:, 1], np.zeros(len(stream_rates))]),
            technology=np.concatenate(
                [*(table.technology for table in tables), rows[:, 2].astype(np.int8), stream_networks.astype(np.int8)]
            ),
        )

    def _border_bandwidth(self, site: int) -> float:
        """Bytes/s that a border passes: all that the links of the site carry, in the direction with more."""
        out = sum(link.bandwidth for link in self.site_links if link.source == site)
        back = sum(link.bandwidth for link in self.site_links if link.target == site)
        return max(out, back)

    def domain_ids(self, gpus: IntArray) -> IntArray:
        """The NVLink domain of each GPU (any shape)."""
        return self._domain_of_gpu[gpus]

    def node_ids(self, gpus: IntArray) -> IntArray:
        """The node of each GPU (any shape)."""
        return self._node_of_gpu[gpus]

    @cached_property
    def _domain_of_gpu(self) -> IntArray:
        return np.concatenate(
            [
                extent.domain + site.fabric.domain_ids(np.arange(site.fabric.gpu_count))
                for extent, site in zip(self._extents, self.sites, strict=False)
            ]
        )

    @cached_property
    def _node_of_gpu(self) -> IntArray:
        return np.concatenate(
            [
                extent.node + site.fabric.node_ids(np.arange(site.fabric.gpu_count))
                for extent, site in zip(self._extents, self.sites, strict=False)
            ]
        )

    def find_paths(self, sources: IntArray, targets: IntArray) -> Paths:
        """Routes of transfers from sources[i] to targets[i], both [n]."""
        sources, targets = np.asarray(sources, np.int64), np.asarray(targets, np.int64)
        pairs = self._site_of_gpu[sources] * len(self.sites) + self._site_of_gpu[targets]
        groups = [(np.flatnonzero(pairs == pair), *divmod(pair, len(self.sites))) for pair in np.unique(pairs).tolist()]
        paths_by_pair = [
            (indices, source, target, self._pair_paths(source, target, sources[indices], targets[indices]))
            for indices, source, target in groups
        ]
        width = max((paths.links.shape[1] for _, _, _, paths in paths_by_pair), default=0)
        links = np.full((len(sources), width), -1, np.int64)
        latency, site_latency = np.zeros(len(sources)), np.zeros(len(sources))
        for indices, source, target, paths in paths_by_pair:
            links[indices[:, None], np.arange(paths.links.shape[1])] = paths.links
            latency[indices] = paths.latency
            site_latency[indices] = self._route_latency(source, target)
        return Paths(links, latency, site_latency)

    def _route_latency(self, source: int, target: int) -> float:
        return 0.0 if source == target else sum(self.site_links[index].latency for index in self.routes[source, target])

    def _pair_paths(self, source: int, target: int, sources: IntArray, targets: IntArray) -> Paths:
        """Paths from GPUs of one site to GPUs of one site."""
        start, end = self._extents[source], self._extents[target]
        if source == target:
            paths = self.sites[source].fabric.find_paths(sources - start.gpu, targets - start.gpu)
            return Paths(_shift(paths.links, start.link), paths.latency)
        exits, entries = self._site_borders[source][0], self._site_borders[target][1]
        exit_links, entry_links = exits.links[sources - start.gpu], entries.links[targets - end.gpu]
        route = self.routes[source, target]
        columns = [
            *self._stream_columns(source, target, sources - start.gpu),
            *_shift(exit_links, start.link).T,
            self._border_ids(source, exit_links, outwards=True),
            *(np.full(len(sources), self._first_site_link + index) for index in route),
            self._border_ids(target, entry_links, outwards=False),
            *_shift(entry_links, end.link).T,
        ]
        latency = exits.latency[sources - start.gpu] + self._route_latency(source, target)
        return Paths(np.stack(columns, axis=1), latency + entries.latency[targets - end.gpu])

    def _stream_columns(self, source: int, target: int, local_gpus: IntArray) -> list[IntArray]:
        stream = self._streams.get((source, target))
        return [] if stream is None else [stream[0] + local_gpus]

    def _border_ids(self, site: int, links: IntArray, *, outwards: bool) -> IntArray:
        """Ids of the border links at the outer ends of routes: [n]."""
        endpoints, tops = self.sites[site].fabric.link_endpoints, self._tops[site]
        top = endpoints.target[_last_links(links)] if outwards else endpoints.source[_first_links(links)]
        first = self._first_border + self._border_table.index((site, int(tops[0]), outwards))
        return first + np.searchsorted(tops, top)

    @cached_property
    def link_endpoints(self) -> LinkEndpoints:
        """Endpoint vertices of every link; a stream begins at a vertex of its own, which nothing leads to."""
        sources, targets = [], []
        for site, extent in zip(self.sites, self._extents, strict=False):
            endpoints = site.fabric.link_endpoints
            sources.append(_shift_vertices(endpoints.source, site.fabric.gpu_count, extent))
            targets.append(_shift_vertices(endpoints.target, site.fabric.gpu_count, extent))
        gateway = self._extents[-1].vertex
        for site_index, top, outwards in self._border_table:
            site, extent = self.sites[site_index], self._extents[site_index]
            vertex = _shift_vertices(np.array([top]), site.fabric.gpu_count, extent)
            border = np.array([gateway + site_index])
            sources.append(vertex if outwards else border)
            targets.append(border if outwards else vertex)
        sources.append(np.array([gateway + link.source for link in self.site_links], np.int64))
        targets.append(np.array([gateway + link.target for link in self.site_links], np.int64))
        next_vertex = gateway + len(self.sites)
        for source, _ in self._streams:
            count = self.sites[source].fabric.gpu_count
            sources.append(next_vertex + np.arange(count))
            targets.append(np.full(count, gateway + source))
            next_vertex += count
        return LinkEndpoints(np.concatenate(sources), np.concatenate(targets), next_vertex)

    def link_info(self, link_id: int) -> LinkInfo:
        """One link, for display."""
        for site, extent, end in zip(self.sites, self._extents, self._extents[1:], strict=False):
            if link_id < end.link:
                link = site.fabric.link_info(link_id - extent.link)
                return replace(link, source=f"{site.name}/{link.source}", target=f"{site.name}/{link.target}")
        source, target = self._wan_names(link_id)
        bandwidth, latency = float(self.links.bandwidth[link_id]), float(self.links.latency[link_id])
        return LinkInfo(LinkKind.WAN, source, target, bandwidth, latency)

    def _wan_names(self, link_id: int) -> tuple[str, str]:
        """Endpoints of a link of a border or between sites, or of a stream."""
        if link_id < self._first_site_link:
            site, top, outwards = self._border_table[link_id - self._first_border]
            endpoints = self.sites[site].fabric.link_endpoints
            inner = int(np.flatnonzero(endpoints.target == top)[0])
            names = f"{self.sites[site].name}/{self.sites[site].fabric.link_info(inner).target}", self.sites[site].name
            return names if outwards else names[::-1]
        if link_id < self._first_site_link + len(self.site_links):
            link = self.site_links[link_id - self._first_site_link]
            return self.sites[link.source].name, self.sites[link.target].name
        for (source, target), (first, _) in self._streams.items():
            if link_id < first + self.sites[source].fabric.gpu_count:
                return f"{self.sites[source].name}/stream{link_id - first}", self.sites[target].name
        raise IndexError(f"link {link_id} is not among the {len(self.links.kind)} links of this fabric")

    def find_link(self, source: str, target: str) -> int:
        """Id of the link between two endpoints, named as by `link_info`; raise InputError with a suggestion."""
        names = [site.name for site in self.sites]
        for index, (site, extent) in enumerate(zip(self.sites, self._extents, strict=False)):
            prefix = f"{site.name}/"
            if source.startswith(prefix) and target.startswith(prefix):
                return extent.link + site.fabric.find_link(source.removeprefix(prefix), target.removeprefix(prefix))
            if source == site.name and target in names:
                return self._find_site_link(index, names.index(target))
        raise InputError(
            f"there is no link from {source} to {target}; links between sites are such as {names[0]} and {names[1]}, "
            f"those inside of one such as {names[0]}/{self.sites[0].fabric.link_info(0).source} and "
            f"{names[0]}/{self.sites[0].fabric.link_info(0).target}"
        )

    def _find_site_link(self, source: int, target: int) -> int:
        for index, link in enumerate(self.site_links):
            if (link.source, link.target) == (source, target):
                return self._first_site_link + index
        linked = [self.sites[link.target].name for link in self.site_links if link.source == source]
        raise InputError(
            f"no link leads from {self.sites[source].name} to {self.sites[target].name}; from "
            f"{self.sites[source].name} links lead to {', '.join(linked)}"
        )

    def parallel_link_count(self, link_id: int) -> int:
        """Number of physical links that one link stands for; one between sites."""
        for site, extent, end in zip(self.sites, self._extents, self._extents[1:], strict=False):
            if link_id < end.link:
                return site.fabric.parallel_link_count(link_id - extent.link)
        return 1

    def nic_links(self, gpus: IntArray) -> IntArray:
        """Links of the NICs that serve GPUs, both directions, each link once."""
        gpus = np.asarray(gpus, np.int64)
        sites = self._site_of_gpu[gpus]
        return np.concatenate(
            [
                self._extents[site].link
                + self.sites[site].fabric.nic_links(gpus[sites == site] - self._extents[site].gpu)
                for site in np.unique(sites).tolist()
            ]
        )

    def with_degraded_links(self, bandwidth_fraction: FloatArray) -> "SitesFabric":
        """The same sites with every link's bandwidth scaled by bandwidth_fraction, [links]; 0: not routed over.

        Borders and streams follow the links between sites, so their own fractions do not count.
        """
        sites = []
        for site, extent, end in zip(self.sites, self._extents, self._extents[1:], strict=False):
            fractions = bandwidth_fraction[extent.link : end.link]
            is_healthy = bool((fractions == 1.0).all())
            sites.append(site if is_healthy else replace(site, fabric=site.fabric.with_degraded_links(fractions)))
        site_links = tuple(
            replace(link, bandwidth=link.bandwidth * (fraction or 1.0), is_alive=link.is_alive and fraction > 0.0)
            for link, fraction in zip(
                self.site_links, bandwidth_fraction[self._first_site_link :].tolist(), strict=False
            )
        )
        return SitesFabric(tuple(sites), site_links)

    def highest_tier(self, gpus: Sequence[int] | IntArray) -> str:
        """The highest tier that traffic among these GPUs crosses."""
        gpu_ids = np.asarray(gpus, np.int64)
        sites = self._site_of_gpu[gpu_ids]
        if not (sites == sites[0]).all():
            return WAN_TIER
        first = int(sites[0])
        return self.sites[first].fabric.highest_tier(gpu_ids - self._extents[first].gpu)

    def describe_tiers(self) -> tuple[FabricTier, ...]:
        """The tiers of all sites, from the GPUs up, with averages where these differ; at the top the sites."""
        tiers: dict[str, list[FabricTier]] = {}
        for site in self.sites:
            for tier in site.fabric.describe_tiers():
                tiers.setdefault(tier.kind, []).append(tier)
        egress = [
            sum(link.bandwidth for link in self.site_links if link.source == site) for site in range(len(self.sites))
        ]
        merged = sorted((_merge_tiers(members) for members in tiers.values()), key=_tier_position)
        return (*merged, FabricTier("site", len(self.sites), sum(egress) / len(egress), None))

    def to_graph(self) -> "nx.DiGraph[str]":
        """All sites as one graph: vertices are named `site/vertex`, borders as their site; streams are left out."""
        import networkx as nx  # takes 0.15 s, which a simulation does not need

        graph: nx.DiGraph[str] = nx.DiGraph()
        for site in self.sites:
            inside = site.fabric.to_graph()
            names = nx.relabel_nodes(inside, {name: f"{site.name}/{name}" for name in inside})
            nodes = {name: f"{site.name}/{node}" for name, node in names.nodes(data="node") if node is not None}
            nx.set_node_attributes(names, nodes, "node")
            graph.update(names)
            graph.add_node(site.name, kind="site")
        for link_id in range(self._first_border, self._first_site_link + len(self.site_links)):
            if link_id >= self._first_site_link and not self.site_links[link_id - self._first_site_link].is_alive:
                continue
            graph.add_edge(*self._wan_names(link_id), **self._edge_attributes(link_id))
        return graph

    def _edge_attributes(self, link_id: int) -> dict[str, Any]:
        from clustersim.hardware.link_technology import TECHNOLOGIES

        table = self.links
        return {
            "kind": LinkKind.WAN.value,
            "bandwidth": float(table.bandwidth[link_id]),
            "latency": float(table.latency[link_id]),
            "technology": TECHNOLOGIES[int(table.technology[link_id])].value,
        }

    @property
    def direct_links(self) -> DirectLinks | None:
        """Direct links between GPUs of an NVLink domain, the same in all sites."""
        fabric = self.sites[0].fabric
        return fabric.direct_links if isinstance(fabric, HasDirectLinks) else None

    def domain_slots(self, gpus: IntArray) -> IntArray:
        """Position of GPUs, domain by domain (any shape): equal to the GPU ids."""
        return gpus

    def gpus_at_slots(self, slots: IntArray) -> IntArray:
        """GPUs at these positions (any shape)."""
        return slots

    @cached_property
    def rotation(self) -> FabricRotation | None:
        """Rotation of local ranks within all nodes, where every site has one of the same period."""
        rotations = [site.fabric.rotation if isinstance(site.fabric, HasRotation) else None for site in self.sites]
        periods = {None if rotation is None else rotation.period for rotation in rotations}
        if len(periods) > 1 or None in periods or any(len(tops) > 1 for tops in self._tops):
            return None
        return self._compose_rotation([rotation for rotation in rotations if rotation is not None])

    def _compose_rotation(self, rotations: Sequence[FabricRotation]) -> FabricRotation:
        """Orbits of all sites' links; a link between sites is one by itself, the streams of a node are one together."""
        period = rotations[0].period
        starts = np.cumsum([0, *(len(rotation.first_link) for rotation in rotations)])
        first_wan, link_count = self._first_border, len(self.links.kind)
        first_stream = self._first_site_link + len(self.site_links)
        singles, streams = np.arange(first_wan, first_stream), np.arange(first_stream, link_count, period)
        orbits = [rotation.orbit_of_link[:-1] + start for rotation, start in zip(rotations, starts, strict=False)]
        stream_orbits = int(starts[-1]) + len(singles) + np.arange(link_count - first_stream) // period
        return FabricRotation(
            period=period,
            orbit_of_link=np.concatenate([*orbits, int(starts[-1]) + np.arange(len(singles)), stream_orbits, [-1]]),
            first_link=np.concatenate(
                [
                    *(
                        rotation.first_link + extent.link
                        for rotation, extent in zip(rotations, self._extents, strict=False)
                    ),
                    singles,
                    streams,
                ]
            ),
            multiplicity=np.concatenate(
                [
                    *(rotation.multiplicity for rotation in rotations),
                    np.full(len(singles), float(period)),
                    np.ones(len(streams)),
                ]
            ),
        )


def _border_paths(site: Site, *, outwards: bool) -> Paths:
    """Routes of all GPUs of a site to its highest switches, or back."""
    if not isinstance(site.fabric, HasBorder):
        raise InputError(f"site {site.name} has no border")
    return site.fabric.border_paths(np.arange(site.fabric.gpu_count), outwards=outwards)


def _site_sizes(fabric: Fabric) -> tuple[int, ...]:
    """GPUs, nodes, domains, links, and vertices that are no GPUs."""
    gpus = np.arange(fabric.gpu_count)
    return (
        fabric.gpu_count,
        int(fabric.node_ids(gpus).max()) + 1,
        int(fabric.domain_ids(gpus).max()) + 1,
        len(fabric.links.kind),
        fabric.link_endpoints.vertex_count - fabric.gpu_count,
    )


def _shift(links: IntArray, first: int) -> IntArray:
    return np.where(links < 0, -1, links + first)


def _shift_vertices(vertices: IntArray, gpu_count: int, extent: _Extent) -> IntArray:
    """Vertex ids of a site in the whole, where all GPUs come first."""
    return np.where(vertices < gpu_count, vertices + extent.gpu, vertices - gpu_count + extent.vertex)


def _last_links(links: IntArray) -> IntArray:
    """[n] the last link of each route."""
    last = links.shape[1] - 1 - (links[:, ::-1] >= 0).argmax(axis=1)
    ends: IntArray = links[np.arange(len(links)), last]
    return ends


def _first_links(links: IntArray) -> IntArray:
    """[n] the first link of each route."""
    ends: IntArray = links[np.arange(len(links)), (links >= 0).argmax(axis=1)]
    return ends


def _merge_tiers(members: Sequence[FabricTier]) -> FabricTier:
    """One tier for those of several sites: counts add up, bandwidths are averages, the worst oversubscription."""
    count = sum(tier.count for tier in members)
    bandwidth = sum(tier.count * tier.bandwidth for tier in members) / count
    ratios = [tier.oversubscription for tier in members if tier.oversubscription is not None]
    return FabricTier(members[0].kind, count, bandwidth, max(ratios, default=None))


def _tier_position(tier: FabricTier) -> int:
    from clustersim.hardware.topology import VERTEX_KINDS

    return VERTEX_KINDS.index(tier.kind)


def unconnected_sites(fabric: SitesFabric) -> Iterator[tuple[int, int]]:
    """Pairs of sites that nothing connects."""
    count = len(fabric.sites)
    yield from (
        (source, target)
        for source in range(count)
        for target in range(count)
        if source != target and (source, target) not in fabric.routes
    )
