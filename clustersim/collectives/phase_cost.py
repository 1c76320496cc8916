"""How long do the concurrent flows of a phase take?

A flow advances with its slowest link, and every link is shared in proportion to what its flows carry: seconds
per byte of payload are the largest load / bandwidth along the route. A group's phase lasts as long as its
slowest flow. Chunks follow each other, so with payload S, chunk c and `fill_stages` the bottleneck link works
for S + fill_stages * c. Latency is the number of dependent steps times the latency of one, the longest in the
group; that of links between sites counts only for the steps that are between sites, because it is longer than all
others by orders of magnitude and few steps have it.

Assumption: all groups of a communicator kind communicate in step. Contention with other communicators at the
same time is left to the engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Final

import numpy as np
from numpy.typing import NDArray

from clustersim.collectives.flow_routes import FlowPaths, FlowRoutes, LinkClasses
from clustersim.collectives.library import AlgorithmVariant, Library, LinkTechnologies, Medium, NvlinkConstants
from clustersim.collectives.phase import LatencySteps
from clustersim.common.arrays import BoolArray, FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.hardware.link_technology import TECHNOLOGIES
from clustersim.hardware.topology import LINK_KINDS, LinkKind, LinkTable

MEDIUM_OF_KIND: Final[Mapping[LinkKind, Medium]] = {
    LinkKind.NVLINK: Medium.NVLINK,
    LinkKind.PCIE: Medium.PCIE,
    LinkKind.HOST: Medium.PCIE,
    LinkKind.NIC: Medium.NETWORK,
    LinkKind.LEAF: Medium.NETWORK,
    LinkKind.SPINE: Medium.NETWORK,
    LinkKind.WAN: Medium.NETWORK,
}
_MEDIA: Final = (Medium.NVLINK, Medium.PCIE, Medium.NETWORK)  # a route's medium is the last of these that it touches
_MEDIUM_INDEX: Final = np.array([_MEDIA.index(MEDIUM_OF_KIND[kind]) for kind in LINK_KINDS], dtype=np.int8)


@dataclass(frozen=True, slots=True)
class BottleneckLoad:
    """Bottleneck loads of a phase's flows in each group.

    max_load: [link classes, groups] the largest load on links of each class that the group crosses; uses_pcie,
    uses_network: [groups] whether any flow has that medium; local_latency, network_latency: [groups] largest
    excess latency of routes (beyond what the steps include) that stay off the network, and of those over it;
    site_latency: [groups] largest additional latency of routes between sites.
    """

    max_load: FloatArray
    uses_pcie: BoolArray
    uses_network: BoolArray
    local_latency: FloatArray
    network_latency: FloatArray
    site_latency: FloatArray

    @property
    def feature_columns(self) -> list[FloatArray]:
        """All features by which groups are distinguished: [groups] each."""
        return [
            *self.max_load,
            self.uses_pcie.astype(np.float64),
            self.uses_network.astype(np.float64),
            self.local_latency,
            self.network_latency,
            *([self.site_latency] if self.site_latency.any() else []),
        ]

    def select(self, group_indices: IntArray) -> "BottleneckLoad":
        """Those of some of the groups."""
        return BottleneckLoad(
            self.max_load[:, group_indices],
            self.uses_pcie[group_indices],
            self.uses_network[group_indices],
            self.local_latency[group_indices],
            self.network_latency[group_indices],
            self.site_latency[group_indices],
        )

    def merge_max(self, other: "BottleneckLoad") -> "BottleneckLoad":
        """Element-wise maximum with the load of other, concurrent flows."""
        return BottleneckLoad(
            max_load=np.maximum(self.max_load, other.max_load),
            uses_pcie=self.uses_pcie | other.uses_pcie,
            uses_network=self.uses_network | other.uses_network,
            local_latency=np.maximum(self.local_latency, other.local_latency),
            network_latency=np.maximum(self.network_latency, other.network_latency),
            site_latency=np.maximum(self.site_latency, other.site_latency),
        )


def bottleneck_load(flow_routes: FlowRoutes, classes: LinkClasses, library: Library) -> BottleneckLoad:
    """Bottleneck load of a routed phase in each group."""
    return reduce(
        BottleneckLoad.merge_max,
        (_path_bottleneck_load(paths, flow_routes.link_load, classes, library) for paths in flow_routes.paths),
    )


def _path_bottleneck_load(paths: FlowPaths, load: FloatArray, classes: LinkClasses, library: Library) -> BottleneckLoad:
    max_load = np.zeros((len(classes.table.kind), len(paths.latency)))
    medium = np.zeros(paths.latency.shape, dtype=np.int8)
    network_delay, delay = _network_delays(classes.table, library), np.zeros(paths.latency.shape)
    for links in paths.links:
        hop_load, hop_classes = load[links], classes.classes_among(links)
        for link_class in hop_classes:
            crossed, class_load = links >= 0, hop_load
            if len(hop_classes) > 1:
                crossed &= classes.class_of(links) == link_class
                class_load = np.where(crossed, hop_load, 0.0)
            np.maximum(max_load[link_class], class_load.max(axis=1, initial=0.0), out=max_load[link_class])
            np.maximum(medium, crossed * _MEDIUM_INDEX[classes.table.kind[link_class]], out=medium)
            np.maximum(delay, crossed * network_delay[link_class], out=delay)
    included = _included_latency(medium, library)
    near_latency = paths.latency if paths.site_latency is None else paths.latency - paths.site_latency
    near_excess = np.maximum(near_latency - included, 0.0)
    site_excess = np.maximum(paths.latency - included, 0.0) - near_excess
    extra_latency = near_excess + delay
    network = medium == _MEDIA.index(Medium.NETWORK)
    return BottleneckLoad(
        max_load=max_load,
        uses_pcie=(medium == _MEDIA.index(Medium.PCIE)).any(axis=1),
        uses_network=network.any(axis=1),
        local_latency=np.where(network, 0.0, extra_latency).max(axis=1, initial=0.0),
        network_latency=np.where(network, extra_latency, 0.0).max(axis=1, initial=0.0),
        site_latency=site_excess.max(axis=1, initial=0.0),
    )


def effective_bandwidth(table: LinkTable, library: Library, variant: AlgorithmVariant, domain_count: int) -> FloatArray:
    """Bytes/s that a variant reaches on each link, in groups over `domain_count` domains: [links]."""
    medium, technologies = _MEDIUM_INDEX[table.kind], LinkTechnologies.from_links(table)
    on_nvlink, on_network = (medium == _MEDIA.index(wanted) for wanted in (Medium.NVLINK, Medium.NETWORK))
    bandwidth: FloatArray = table.bandwidth * library.pcie_efficiency * variant.efficiency
    for technology in technologies.networks:
        links = on_network & (table.technology == TECHNOLOGIES.index(technology))
        constants = library.network_constants(technology)
        bandwidth[links] = table.bandwidth[links] * constants.efficiency * variant.efficiency
        ports = links & (table.kind == LINK_KINDS.index(LinkKind.NIC))
        max_rate = constants.max_port_rate(variant.message_bytes, domain_count - 1)
        bandwidth[ports] = np.minimum(bandwidth[ports], max_rate)
    for technology in technologies.nvlink_generations:
        links = on_nvlink & (table.technology == TECHNOLOGIES.index(technology))
        factor, rate_limit = _nvlink_limits(library.nvlink_constants(technology), variant, domain_count)
        bandwidth[links] = np.minimum(
            table.bandwidth[links] * variant.efficiency * factor, min(rate_limit, variant.max_nvlink_rate)
        )
    return bandwidth


def _nvlink_limits(nvlink: NvlinkConstants, variant: AlgorithmVariant, domain_count: int) -> tuple[float, float]:
    """Fraction of nominal bandwidth, and maximum rate in bytes/s, on NVLink ports of this generation."""
    factor = nvlink.efficiency
    if needs_nvls(variant):
        factor *= nvlink.nvls.bandwidth_share if nvlink.nvls else 1.0
    if variant.is_ll_limited and nvlink.ll_rate_limits is not None:
        return factor, nvlink.ll_rate_limits[min(domain_count, 3) - 1]
    return factor, np.inf


def needs_nvls(variant: AlgorithmVariant) -> bool:
    """Whether the variant needs switches of the NVLink domain that can reduce."""
    return variant.algorithm in ("nvls", "collnet_nvls")


def phase_coefficients(
    bottleneck: BottleneckLoad, rates: "LinkClassRates", latency: FloatArray, fill_stages: float
) -> FloatArray:
    """Coefficients [4, groups]: S bytes in chunks of c take latency + S * per_byte + c * fill seconds.

    The fourth is the per_byte of NVLink links alone. latency: [groups] from `phase_latency`; fill_stages: of the
    phase.
    """
    seconds_per_byte = bottleneck.max_load / rates.bandwidth[:, None]
    per_byte, nvlink_per_byte = (
        seconds_per_byte.max(axis=0, initial=0.0),
        seconds_per_byte[rates.is_nvlink].max(axis=0, initial=0.0),
    )
    return np.stack([latency, per_byte, fill_stages * per_byte, nvlink_per_byte])


@dataclass(frozen=True, slots=True)
class LinkClassRates:
    """Rates of link classes. bandwidth: [classes] from `effective_bandwidth`; is_nvlink: [classes]."""

    bandwidth: FloatArray
    is_nvlink: BoolArray


def phase_latency(
    bottleneck: BottleneckLoad, latency_steps: LatencySteps, variant: AlgorithmVariant, *, network_only: bool
) -> FloatArray:
    """Seconds of latency of one phase in each group: start-up, dependent steps and posts.

    network_only: no domain holds a second member. Where nothing but the network joins the members of a domain (a node
    without NVLink whose GPUs have a NIC each and no path over PCIe), its steps are steps over the network.
    """
    local_seconds = np.where(bottleneck.uses_pcie, *_local_step_seconds(variant))
    local_seconds = (
        np.where(bottleneck.uses_network, np.maximum(local_seconds, variant.post_seconds), local_seconds)
        + bottleneck.local_latency
    )
    inside_over_network = bottleneck.uses_network & (np.asarray(latency_steps.network) == 0)
    network_seconds = (
        np.where(
            network_only | inside_over_network, variant.network_only_step_seconds, variant.step_seconds[Medium.NETWORK]
        )
        + bottleneck.network_latency
    )
    local_seconds = np.where(inside_over_network, network_seconds, local_seconds)
    total: FloatArray = (
        variant.startup_seconds
        + latency_steps.local * local_seconds
        + latency_steps.network * network_seconds
        + latency_steps.posts * variant.post_seconds
    )
    if bottleneck.site_latency.any():
        total = total + latency_steps.counts[-1] * bottleneck.site_latency
    return total


def min_phase_latency(latency_steps: LatencySteps, variant: AlgorithmVariant) -> Seconds:
    """Lower bound on the latency of a phase in any group, whatever its routes."""
    local_seconds, network_seconds = (
        min(_local_step_seconds(variant)),
        min(variant.network_only_step_seconds, variant.step_seconds[Medium.NETWORK]),
    )
    counts = (float(np.min(seconds)) for seconds in (latency_steps.local, latency_steps.network, latency_steps.posts))
    return variant.startup_seconds + sum(
        count * seconds
        for count, seconds in zip(counts, (local_seconds, network_seconds, variant.post_seconds), strict=True)
    )


def _local_step_seconds(variant: AlgorithmVariant) -> tuple[float, float]:
    return variant.step_seconds[Medium.PCIE], variant.step_seconds[Medium.NVLINK]


def _network_delays(table: LinkTable, library: Library) -> FloatArray:
    """Additional message latency of each link's network: [links]."""
    latency_by_technology = {
        TECHNOLOGIES.index(technology): library.network_constants(technology).message_latency
        for technology in LinkTechnologies.from_links(table).networks
    }
    return np.array([latency_by_technology.get(technology_id, 0.0) for technology_id in table.technology.tolist()])


def _included_latency(medium: NDArray[np.int8], library: Library) -> FloatArray:
    return np.array([library.included_latency[member] for member in _MEDIA])[medium]
