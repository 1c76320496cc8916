"""Which axes of a layout cross which links between sites, and which of them should not?

Ranks are placed site by site, so an axis crosses sites where its groups have members in several. Axes whose ranks
communicate between the kernels of a layer wait for a long link in every layer.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.common.units import format_seconds
from clustersim.hardware.cluster import Cluster
from clustersim.hardware.site_links import route_latency
from clustersim.hardware.sites import SitesFabric
from clustersim.hardware.topology import find_site_ids
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import DATA, MESHES, Axis
from clustersim.scenario.resolved import ResolvedScenario


@dataclass(frozen=True, slots=True)
class SiteCrossing:
    """An axis between two sites. group_count: of those with members in both; latency: one way, seconds."""

    axis: Axis
    degree: int
    source: str
    target: str
    group_count: int
    latency: float

    @property
    def description(self) -> str:
        """One clause for people."""
        groups = "group crosses" if self.group_count == 1 else "groups cross"
        return (
            f"{self.group_count:,} {self.axis.name} {groups} between {self.source} and {self.target} "
            f"({format_seconds(2.0 * self.latency)} round trip)"
        )


def site_crossings(layout: Layout, cluster: Cluster) -> tuple[SiteCrossing, ...]:
    """Each axis with each pair of sites in which one of its groups has members; empty on a single site."""
    site_ids = find_site_ids(cluster.fabric, np.arange(layout.world_size))
    return () if site_ids is None or cluster.sites is None else tuple(_crossings(layout, cluster.sites, site_ids))


def _crossings(layout: Layout, fabric: SitesFabric, site_ids: IntArray) -> Iterator[SiteCrossing]:
    for axis, groups in _axis_groups(layout):
        members = site_ids[groups]
        for (source, target), route in fabric.routes.items():
            is_crossing = (members == source).any(axis=1) & (members == target).any(axis=1)
            if source < target and is_crossing.any():
                yield SiteCrossing(
                    axis,
                    groups.shape[1],
                    fabric.sites[source].name,
                    fabric.sites[target].name,
                    int(np.count_nonzero(is_crossing)),
                    route_latency(route, fabric.site_links),
                )


def _axis_groups(layout: Layout) -> Iterator[tuple[Axis, IntArray]]:
    """Each axis with more than one rank once, and its groups: [groups, members]."""
    seen: set[str] = set()
    for name, mesh in layout.meshes.items():
        for axis in MESHES[name]:
            is_split = axis is DATA and layout.is_hybrid_sharded  # then its sub-axes communicate
            if mesh.degrees.get(axis.name, 1) > 1 and axis.name not in seen and not is_split:
                seen.add(axis.name)
                yield axis, mesh.groups_along(axis)


def site_warnings(scenario: ResolvedScenario) -> Iterator[str]:
    """Warnings about axes that communicate within layers and cross sites."""
    for crossing in site_crossings(scenario.layout, scenario.cluster):
        if crossing.axis.within_layer:
            yield (
                f"layout: {crossing.axis.name} {crossing.degree} crosses from {crossing.source} to {crossing.target}, "
                f"so each of its messages in every layer takes {format_seconds(crossing.latency)} more; put axes that "
                "communicate within layers inside a site (layout.order, or whole groups in each site)"
            )
