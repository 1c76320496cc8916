"""Which algorithm and protocol does a library select?

The fastest variant that it has for this collective, these groups and this payload, by the model's own
estimate, as NCCL's tuner does; or the one that the user forced. Groups of different shapes select separately
while they communicate concurrently (`heterogeneous_groups`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from clustersim.collectives.chunking import GroupShapes, correction_factor
from clustersim.collectives.collnet import COLLNET_ALGORITHMS
from clustersim.collectives.flow_routes import FlowRoutes, LinkClasses, classify_links, route_phase
from clustersim.collectives.group_link_loads import GroupLinkLoads, fold_loads, group_link_loads, scatter_to_groups
from clustersim.collectives.heterogeneous_groups import HeterogeneousGroups
from clustersim.collectives.library import AlgorithmVariant, Library, LinkTechnologies
from clustersim.collectives.p2p_channels import P2pChannels, p2p_channels
from clustersim.collectives.phase import GroupTopology, LatencySteps, Phase, group_topology
from clustersim.collectives.phase_cost import (
    BottleneckLoad,
    LinkClassRates,
    bottleneck_load,
    effective_bandwidth,
    min_phase_latency,
    needs_nvls,
    phase_coefficients,
    phase_latency,
)
from clustersim.collectives.representative_flows import representative_flows
from clustersim.common.arrays import BoolArray, FloatArray, IntArray
from clustersim.common.errors import InputError
from clustersim.common.lru import LruCache
from clustersim.common.pickling import FieldPickling
from clustersim.common.units import Bytes, Seconds
from clustersim.hardware.rotation import FabricRotation, HasRotation
from clustersim.hardware.topology import LINK_KINDS, Fabric, LinkKind, find_site_ids
from clustersim.program.task import CollectiveType, TokenRouting
from clustersim.symmetry.labels import unique_by_columns
from clustersim.symmetry.rotation_orbits import GroupOrbits, find_group_orbits

CACHE_BYTES: Final = 16_000_000
"""Cache size in bytes, for variant costs and for link loads: some layouts of 16,384 GPUs, hundreds of 512."""
SMALL_CHUNK_DOMAINS: Final = 4  # number of domains from which on NVLS trees use smaller chunks


@dataclass(frozen=True, slots=True)
class VariantCosts:
    """Cost coefficients of each variant for all groups of one communicator kind, for any payload.

    coefficients: [variants, 4, classes] latency (s), seconds per byte, pipeline fill (s/byte of chunk), seconds
    per byte on NVLink alone; infinite latency where groups cannot use a variant. Groups of one class have equal
    coefficients; class_of_group: [groups]; lower_bound: [classes] seconds that variants left out take at least;
    technologies: of the fabric's links; shapes: of groups; p2p_channels: of messages, where all stay inside
    domains.
    """

    variants: tuple[AlgorithmVariant, ...]
    coefficients: FloatArray
    class_of_group: IntArray
    library: Library
    lower_bound: FloatArray
    technologies: LinkTechnologies
    shapes: GroupShapes
    p2p_channels: P2pChannels | None = None


@dataclass(frozen=True, slots=True)
class Selection:
    """The fastest variant in each group, and in the slowest group.

    seconds: [groups]; latency: [groups] part of them in which no bytes move; channel_limit: [groups] additional
    seconds because channels, not links, limit the rate (see `p2p_channels`); variant_index: [groups] index of the
    selected variant in `variants`; chunk_bytes: [groups] bytes of one chunk; nvlink_share: [groups] share of the
    transfer for which NVLink or xGMI ports are busy (1: they limit it); slowest_variant: selected by the slowest
    group, whose index is slowest_group; is_certain: no variant that was left out can be faster in any group.
    """

    seconds: FloatArray
    latency: FloatArray
    channel_limit: FloatArray
    variant_index: IntArray
    chunk_bytes: FloatArray
    nvlink_share: FloatArray
    variants: tuple[AlgorithmVariant, ...]
    slowest_variant: AlgorithmVariant
    slowest_group: int
    is_certain: bool


def select_variants(variant_costs: VariantCosts, payload: Bytes) -> Selection:
    """Select the fastest variant for this payload in each group. Takes microseconds."""
    by_variant = variant_seconds(variant_costs, payload)
    seconds = by_variant.seconds
    best = seconds.argmin(axis=0)
    class_index = np.arange(seconds.shape[1])
    fastest = seconds[best, class_index]
    slowest_class = int(fastest.argmax())
    class_of_group = variant_costs.class_of_group
    _, per_byte, _, nvlink_per_byte = variant_costs.coefficients[best, :, class_index].T
    nvlink_share = np.divide(nvlink_per_byte, per_byte, out=np.zeros_like(per_byte), where=per_byte > 0.0)
    return Selection(
        seconds=fastest[class_of_group],
        latency=by_variant.latency[best, class_index][class_of_group],
        channel_limit=by_variant.channel_limit[best, class_index][class_of_group],
        variant_index=best[class_of_group],
        chunk_bytes=by_variant.chunk_bytes[best, class_index][class_of_group],
        nvlink_share=nvlink_share[class_of_group],
        variants=variant_costs.variants,
        slowest_variant=variant_costs.variants[int(best[slowest_class])],
        slowest_group=int((class_of_group == slowest_class).argmax()),
        is_certain=bool((fastest < variant_costs.lower_bound).all()),
    )


@dataclass(frozen=True, slots=True)
class VariantSeconds:
    """Seconds of each variant, [variants, classes]: without data movement, link-limited, and additional rate limits.

    latency: no bytes move; transfer: links move bytes; channel_limit: what channels and other rate limits add to
    that; chunk_bytes: bytes of one chunk.
    """

    latency: FloatArray
    transfer: FloatArray
    channel_limit: FloatArray
    chunk_bytes: FloatArray

    @property
    def seconds(self) -> FloatArray:
        """Total seconds: [variants, classes]."""
        total: FloatArray = self.latency + self.transfer + self.channel_limit
        return total


def variant_seconds(variant_costs: VariantCosts, payload: Bytes) -> VariantSeconds:
    """Seconds that each variant takes for a payload."""
    launch_seconds = variant_costs.library.launch_seconds_on(variant_costs.technologies)
    launch = np.array([launch_seconds if variant.adds_launch else 0.0 for variant in variant_costs.variants])
    latency, per_byte, fill, nvlink_per_byte = np.moveaxis(variant_costs.coefficients, 1, 0)
    chunk_bytes = np.stack([_chunk_bytes(variant, variant_costs, payload) for variant in variant_costs.variants])
    latency_seconds = launch[:, None] + latency
    latency_seconds[[payload > variant.max_payload for variant in variant_costs.variants]] = np.inf
    transfer = payload * per_byte + chunk_bytes * fill
    min_per_byte = np.stack(
        [
            _min_seconds_per_byte(variant, variant_costs, payload, nvlink_seconds)
            for variant, nvlink_seconds in zip(variant_costs.variants, nvlink_per_byte, strict=True)
        ]
    )
    correction = np.array(
        [correction_factor(variant.correction_factors, payload) for variant in variant_costs.variants]
    )
    rate_limited = payload * (np.maximum(min_per_byte, per_byte) / correction[:, None] - per_byte)
    return VariantSeconds(
        latency_seconds,
        transfer,
        np.maximum(_p2p_channel_seconds(variant_costs, payload)[:, None] - transfer, rate_limited),
        chunk_bytes,
    )


def _min_seconds_per_byte(
    variant: AlgorithmVariant, variant_costs: VariantCosts, payload: Bytes, nvlink_per_byte: FloatArray
) -> FloatArray:
    """Lower bound on seconds per byte from rate limits other than link bandwidth: [classes]."""
    shapes, lower_bound = variant_costs.shapes, np.zeros(len(nvlink_per_byte))
    for technology in variant_costs.technologies.nvlink_generations:
        nvlink = variant_costs.library.nvlink_constants(technology)
        if variant.algorithm in nvlink.bus_bandwidth_limits:
            two_domains, more_domains = nvlink.bus_bandwidth_limits[variant.algorithm]
            bandwidth_limit = np.where(
                shapes.domain_counts > 2, more_domains, np.where(shapes.domain_counts > 1, two_domains, np.inf)
            )
            lower_bound = np.maximum(lower_bound, 2.0 * (shapes.ranks - 1) / shapes.ranks / bandwidth_limit)
        if variant.uses_channel_ramp and nvlink.channel_ramp:
            lower_bound = np.maximum(lower_bound, nvlink_per_byte * nvlink.channel_ramp.slowdown(payload, shapes.ranks))
        if variant.chunk_steps and nvlink.nvls:
            overhead_bytes = nvlink.nvls.chunk_overhead_bytes
            chunk = _bytes_in_flight(variant, variant_costs, payload) / _concurrent_chunks(variant_costs)
            slowdown = (1.0 + overhead_bytes / chunk) / (1.0 + overhead_bytes / variant.chunk_steps[0].largest_chunk)
            lower_bound = np.maximum(lower_bound, nvlink_per_byte * slowdown)
    return lower_bound


def _p2p_channel_seconds(variant_costs: VariantCosts, payload: Bytes) -> FloatArray:
    """Seconds that p2p channels need at least for the messages of each variant: [variants]."""
    if variant_costs.p2p_channels is None:
        return np.zeros(len(variant_costs.variants))
    seconds = variant_costs.p2p_channels.channel_seconds(payload, variant_costs.library, variant_costs.technologies)
    return np.array([seconds if variant.uses_p2p_channels else 0.0 for variant in variant_costs.variants])


def _chunk_bytes(variant: AlgorithmVariant, variant_costs: VariantCosts, payload: Bytes) -> FloatArray:
    """Bytes of one chunk, [classes]; 0 for protocols that forward every word (LL, LL128)."""
    if variant.chunk_steps:
        return np.minimum(_bytes_in_flight(variant, variant_costs, payload), payload)
    if not variant.is_chunked:
        return np.zeros(len(variant_costs.shapes.ranks))
    return (variant.pipeline or variant_costs.library.pipeline).chunk_bytes(payload, variant_costs.shapes.domain_counts)


def _bytes_in_flight(variant: AlgorithmVariant, variant_costs: VariantCosts, payload: Bytes) -> FloatArray:
    """Bytes that all channels and shares of an NVLS variant hold at once: [classes]."""
    domain_counts, concurrent_chunks = variant_costs.shapes.domain_counts, _concurrent_chunks(variant_costs)
    single_domain_chunk, few_domains_chunk, large_span_chunk = (
        steps.chunk_bytes(payload, concurrent_chunks) for steps in variant.chunk_steps
    )
    return (
        np.where(
            domain_counts == 1,
            single_domain_chunk,
            np.where(domain_counts < SMALL_CHUNK_DOMAINS, few_domains_chunk, large_span_chunk),
        )
        * concurrent_chunks
    )


def _concurrent_chunks(variant_costs: VariantCosts) -> FloatArray:
    """Number of chunks of an NVLS variant that move concurrently: [classes]."""
    nvls_constants = [
        variant_costs.library.nvlink_constants(technology).nvls
        for technology in variant_costs.technologies.nvlink_generations
    ]
    one_domain, several_domains = np.max([nvls.channels for nvls in nvls_constants if nvls] or [(1, 1)], axis=0)
    chunks: FloatArray = np.where(
        variant_costs.shapes.domain_counts == 1, one_domain, several_domains
    ) * variant_costs.shapes.rails.astype(np.float64)
    return chunks


@lru_cache(maxsize=8)
def cached_tuner(fabric: Fabric, library: Library, routing: TokenRouting | None = None, *, senders: int = 1) -> "Tuner":
    """The tuner of a library on a fabric, cached for the last few."""
    return Tuner(fabric, library, routing, senders)


def _are_among(members: IntArray, others: IntArray) -> BoolArray:
    """Which members are among others of their group: [groups, size]."""
    are_among: BoolArray = (members[:, :, None] == others[:, None, :]).any(axis=2)
    return are_among


@dataclass(frozen=True)
class Tuner(FieldPickling):
    """Costs a library's variants on one fabric.

    routing: of tokens to experts, for dispatchers; senders: of send/recv, the first members of a group.

    Recent results are cached: layouts under comparison share many groups.
    """

    fabric: Fabric
    library: Library
    routing: TokenRouting | None = None
    senders: int = 1

    @cached_property
    def _cost_cache(self) -> LruCache[VariantCosts]:
        return LruCache(CACHE_BYTES)

    @cached_property
    def _load_cache(self) -> LruCache[GroupLinkLoads]:
        return LruCache(CACHE_BYTES)

    def evaluate_variants(
        self, collective: CollectiveType, members: IntArray, payload: Bytes | None = None
    ) -> VariantCosts:
        """Cost coefficients of the variants for groups [groups, size].

        payload: algorithms whose latency alone exceeds the fastest variant's time for it, in every group, are
        skipped.
        """
        key = collective, payload, members.shape, members.tobytes()
        return self._cost_cache.get_or_compute(key, partial(self._evaluate_variants, collective, members, payload))

    def _evaluate_variants(self, collective: CollectiveType, members: IntArray, payload: Bytes | None) -> VariantCosts:
        rotated = find_group_orbits(members, self._rotation) if self._rotation else None
        representatives = members if rotated is None else members[rotated.representatives]
        candidate_sets = [self._candidates(collective, topology) for topology in self.group_topologies(representatives)]
        route_one = partial(self._route_phase, rotated=rotated is not None, single_shape=len(candidate_sets) == 1)
        groups_by_shape = HeterogeneousGroups(
            [candidates.phases_by_algorithm for candidates in candidate_sets], route_one
        )
        routers = (partial(groups_by_shape.routes_of, set_index) for set_index in range(len(candidate_sets)))
        costs_by_set = [
            self._cost_candidates(*cost_arguments, payload)
            for cost_arguments in zip(candidate_sets, routers, strict=True)
        ]
        costs = _concatenate_costs(costs_by_set, [candidates.topology.group_indices for candidates in candidate_sets])
        if self._technologies.nvlink_generations:
            costs = replace(costs, p2p_channels=p2p_channels(collective, members, self.fabric, self.senders))
        return costs if rotated is None else replace(costs, class_of_group=costs.class_of_group[rotated.orbit_of_group])

    def link_loads(
        self,
        collective: CollectiveType,
        members: IntArray,
        variant: AlgorithmVariant,
        orbits: GroupOrbits | None = None,
    ) -> GroupLinkLoads:
        """Link loads of a variant in each of the groups [groups, size] by itself; zero where a group cannot use it.

        orbits: of the groups under the fabric's rotation; the load matrix then holds representatives only
        (`fold_loads`).
        """
        key = collective, self.library.variants.index(variant), orbits is not None, members.shape, members.tobytes()
        return self._load_cache.get_or_compute(key, partial(self._folded_loads, collective, members, variant, orbits))

    def _folded_loads(
        self, collective: CollectiveType, members: IntArray, variant: AlgorithmVariant, orbits: GroupOrbits | None
    ) -> GroupLinkLoads:
        if orbits is None or self._rotation is None:
            return self._link_loads(collective, members, variant)
        loads = self._link_loads(collective, members[orbits.representatives], variant)
        return fold_loads(loads, orbits, self._rotation)

    def _link_loads(self, collective: CollectiveType, members: IntArray, variant: AlgorithmVariant) -> GroupLinkLoads:
        loads_by_shape = []
        for topology in self.group_topologies(members):
            flow_routes = [
                route_phase(phase, self.fabric)
                for phase in self.library.algorithm(variant.algorithm).phases(collective, topology)
            ]
            if flow_routes:
                loads_by_shape.append(
                    (
                        topology.group_indices,
                        group_link_loads(self._link_classes, self.library, variant, flow_routes, topology.domain_count),
                    )
                )
        return scatter_to_groups(loads_by_shape, len(members))

    def require_supported(self, collective: CollectiveType, members: IntArray) -> None:
        """Raise InputError if the library has no variant for one of the groups [groups, size]."""
        rotated = find_group_orbits(members, self._rotation) if self._rotation else None
        for topology in self.group_topologies(members if rotated is None else members[rotated.representatives]):
            self._candidates(collective, topology)

    def group_topologies(self, members: IntArray) -> tuple[GroupTopology, ...]:
        """Topologies of groups [groups, size], one for each distinct shape."""
        topologies = group_topology(members, self.fabric)
        if self.routing is not None:
            return tuple(replace(topology, routing=self.routing) for topology in topologies)
        if self.senders == 1:
            return topologies
        return tuple(
            replace(topology, sends=_are_among(topology.members, members[topology.group_indices, : self.senders]))
            for topology in topologies
        )

    def _candidates(self, collective: CollectiveType, topology: GroupTopology) -> "_Candidates":
        """Variants that can do a collective in groups of this shape."""
        unsupported = self.library.unsupported_on(self._technologies) if topology.domain_count > 1 else frozenset()
        default_variants = self.library.variants_for(collective)
        available = [
            variant
            for variant in default_variants
            if self._fabric_supports(variant) and variant.is_available(unsupported)
        ]
        names = dict.fromkeys(variant.algorithm for variant in available)
        phases = {
            name: algorithm_phases
            for name in names
            if (algorithm_phases := self.library.algorithm(name).phases(collective, topology))
        }
        variants = tuple(variant for variant in available if variant.algorithm in phases)
        if not variants:
            tried_algorithms = ", ".join(dict.fromkeys(variant.algorithm for variant in default_variants))
            span_label = (
                "in one NVLink domain" if topology.domain_count == 1 else f"over {topology.domain_count} NVLink domains"
            )
            raise InputError(
                f"{self.library.name} cannot do {collective.value} by {tried_algorithms or 'anything'} in groups of "
                f"{topology.size} "
                f"{span_label} on this cluster"
            )
        return _Candidates(variants, phases, topology)

    def _cost_candidates(
        self, candidates: "_Candidates", route_algorithm: Callable[[str], tuple[FlowRoutes, ...]], payload: Bytes | None
    ) -> VariantCosts:
        """Cost algorithms in ascending order of their lower bounds, until no other can be the fastest."""
        lower_bounds = sorted(
            (lower_bound, name)
            for name, lower_bound in candidates.latency_lower_bounds(
                self.library.launch_seconds_on(self._technologies)
            ).items()
        )
        phase_loads: dict[str, tuple[_PhaseLoad, ...]] = {}
        for (_, name), (lower_bound, _) in pairwise([*lower_bounds, (math.inf, "")]):
            phase_loads[name] = tuple(self._phase_load(flow_routes) for flow_routes in route_algorithm(name))
            if math.isinf(lower_bound) or payload is not None:
                costs = self._cost_by_class(candidates, phase_loads, lower_bound)
                if payload is not None and select_variants(costs, payload).is_certain:
                    break
        return costs

    def _fabric_supports(self, variant: AlgorithmVariant) -> bool:
        """Whether the fabric's switches support what the variant needs (NVLS, SHARP)."""
        if variant.algorithm in COLLNET_ALGORITHMS and (
            not self.library.has_sharp(self._technologies) or self._has_sites
        ):
            return False
        return not needs_nvls(variant) or self.library.has_nvls(self._technologies)

    def _route_phase(self, phase: Phase, *, rotated: bool, single_shape: bool) -> FlowRoutes:
        """Route a phase. rotated: groups are representatives of their rotations.

        single_shape: no other loads are added.
        """
        representative = (
            representative_flows(phase, self._rotation) if self._rotation and single_shape and not rotated else None
        )
        rotation = self._rotation if rotated or representative else None
        return route_phase(representative or phase, self.fabric, rotation)

    def _phase_load(self, flow_routes: FlowRoutes) -> "_PhaseLoad":
        """Bottleneck load of a routed phase in each group."""
        classes = self._orbit_classes if flow_routes.by_orbit else self._link_classes
        bottleneck = bottleneck_load(flow_routes, classes, self.library)
        return _PhaseLoad(
            bottleneck,
            flow_routes.phase.latency_steps.broadcast_to(len(bottleneck.local_latency)),
            flow_routes.phase.fill_stages,
        )

    @cached_property
    def _technologies(self) -> LinkTechnologies:
        return LinkTechnologies.from_links(self._orbit_classes.table)

    @cached_property
    def _has_sites(self) -> bool:
        """Whether there are several sites, whose networks do not add together (SHARP)."""
        return find_site_ids(self.fabric, np.zeros(1, np.int64)) is not None

    @cached_property
    def _rotation(self) -> FabricRotation | None:
        return self.fabric.rotation if isinstance(self.fabric, HasRotation) else None

    @cached_property
    def _link_classes(self) -> LinkClasses:
        return classify_links(self.fabric.links)

    @cached_property
    def _orbit_classes(self) -> LinkClasses:
        """Link classes of orbits; the same classes, since links of an orbit are equal."""
        if self._rotation is None:
            return self._link_classes
        table, first = self.fabric.links, self._rotation.first_link
        return classify_links(table.select(first))

    def _cost_by_class(
        self, candidates: "_Candidates", phase_loads: Mapping[str, tuple["_PhaseLoad", ...]], lower_bound: Seconds
    ) -> VariantCosts:
        """Cost the variants once per distinct bottleneck load, and merge groups with equal coefficients."""
        variants = tuple(variant for variant in candidates.variants if variant.algorithm in phase_loads)
        columns = [
            column
            for algorithm_loads in phase_loads.values()
            for phase_load in algorithm_loads
            for column in phase_load.feature_columns
        ]
        load_class, first = unique_by_columns(columns)
        distinct_loads = {
            name: [phase_load.select(first) for phase_load in algorithm_loads]
            for name, algorithm_loads in phase_loads.items()
        }
        table = np.stack(
            [
                self._variant_coefficients(variant, distinct_loads[variant.algorithm], candidates.topology)
                for variant in variants
            ]
        )
        classes, merged = np.unique(table.reshape(-1, len(first)), axis=1, return_inverse=True)
        coefficients = classes.reshape(len(variants), 4, -1)
        shapes = candidates.group_shapes(classes.shape[1])
        bounds = np.full(classes.shape[1], lower_bound)
        return VariantCosts(
            variants, coefficients, merged.reshape(-1)[load_class], self.library, bounds, self._technologies, shapes
        )

    def _variant_coefficients(
        self, variant: AlgorithmVariant, phase_loads: Sequence["_PhaseLoad"], topology: GroupTopology
    ) -> FloatArray:
        """[4, groups] cost terms of one variant in groups of this shape.

        The terms are latency, seconds per byte, fill, and seconds per byte of NVLink.
        """
        network_only = topology.domain_count == topology.size
        table = self._orbit_classes.table
        bandwidth = effective_bandwidth(table, self.library, variant, topology.domain_count)
        rates = LinkClassRates(bandwidth, table.kind == LINK_KINDS.index(LinkKind.NVLINK))
        total = np.zeros((4, len(phase_loads[0].bottleneck.local_latency)))
        for phase_load in phase_loads:
            latency = phase_latency(phase_load.bottleneck, phase_load.latency_steps, variant, network_only=network_only)
            total += phase_coefficients(phase_load.bottleneck, rates, latency, phase_load.fill_stages)
        return total


def _concatenate_costs(costs_by_set: Sequence[VariantCosts], groups: Sequence[IntArray]) -> VariantCosts:
    """Merge the costs of sets of groups; groups: indices of each set's groups."""
    if len(costs_by_set) == 1:
        return costs_by_set[0]
    library = costs_by_set[0].library
    variants = tuple(
        variant for variant in library.variants if any(variant in costs.variants for costs in costs_by_set)
    )
    impossible = np.array([math.inf, 0.0, 0.0, 0.0])
    classes = [costs.coefficients.shape[2] for costs in costs_by_set]
    table = np.broadcast_to(impossible[:, None], (len(variants), 4, sum(classes))).copy()
    group_class = np.empty(sum(map(len, groups)), dtype=np.int64)
    for costs, group_indices, end in zip(costs_by_set, groups, np.cumsum(classes).tolist(), strict=True):
        first = end - costs.coefficients.shape[2]
        table[[variants.index(variant) for variant in costs.variants], :, first:end] = costs.coefficients
        group_class[group_indices] = first + costs.class_of_group
    lower_bound, shapes = (
        np.concatenate([costs.lower_bound for costs in costs_by_set]),
        GroupShapes.concatenate([costs.shapes for costs in costs_by_set]),
    )
    return VariantCosts(variants, table, group_class, library, lower_bound, costs_by_set[0].technologies, shapes)


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Variants for groups of one shape, and the phases of their algorithms in the library's order."""

    variants: tuple[AlgorithmVariant, ...]
    phases_by_algorithm: Mapping[str, tuple[Phase, ...]]
    topology: GroupTopology

    def group_shapes(self, class_count: int) -> GroupShapes:
        """Shapes of `class_count` classes of such groups."""
        shape = (self.topology.size, self.topology.rails, self.topology.domain_count)
        return GroupShapes(*(np.full(class_count, extent) for extent in shape))

    def latency_lower_bounds(self, launch: Seconds) -> dict[str, Seconds]:
        """Seconds that each algorithm takes at least in any group, for any payload."""
        lower_bounds: dict[str, Seconds] = {}
        for variant in self.variants:
            steps_seconds = sum(
                min_phase_latency(phase.latency_steps, variant) for phase in self.phases_by_algorithm[variant.algorithm]
            )
            lower_bound = steps_seconds + (launch if variant.adds_launch else 0.0)
            lower_bounds[variant.algorithm] = min(lower_bound, lower_bounds.get(variant.algorithm, math.inf))
        return lower_bounds


@dataclass(frozen=True, slots=True)
class _PhaseLoad:
    """Bottleneck load of one phase in each group, and its latency steps."""

    bottleneck: BottleneckLoad
    latency_steps: LatencySteps
    fill_stages: float

    @property
    def feature_columns(self) -> list[NDArray[Any]]:
        """All features by which groups are distinguished: [groups] each."""
        local, network, posts, sites = self.latency_steps.counts
        site_steps = [np.asarray(sites)] if self.bottleneck.site_latency.any() else []
        return [*self.bottleneck.feature_columns, *map(np.asarray, (local, network, posts)), *site_steps]

    def select(self, group_indices: IntArray) -> "_PhaseLoad":
        """Those of some of the groups."""
        return _PhaseLoad(
            self.bottleneck.select(group_indices), self.latency_steps.select(group_indices), self.fill_stages
        )
