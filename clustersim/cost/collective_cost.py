"""How long does a collective take without contention?

The library's fastest algorithm on the routes of all groups of the communicator (see `collectives.tuner`).
Everything that does not depend on the payload is computed once per communicator and collective, so another
payload costs microseconds. MoE dispatch kernels are libraries of their own (`topologies/dispatchers`), on
the same routes.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from clustersim.collectives.group_link_loads import GroupLinkLoads, select_by_variant
from clustersim.collectives.library import AlgorithmVariant, Library
from clustersim.collectives.library_files import load_dispatcher
from clustersim.collectives.tuner import Selection, Tuner, VariantCosts, cached_tuner, select_variants
from clustersim.common.arrays import BoolArray, IntArray
from clustersim.common.cached_method import cached_by, cached_method
from clustersim.common.errors import InputError, suggest_nearest
from clustersim.common.units import Bytes
from clustersim.cost.timing import Bottleneck, CommTiming, LinkDemand, Provenance
from clustersim.hardware.topology import Fabric
from clustersim.program.program import ProcessGroups
from clustersim.program.task import CollectiveType, CommOp, TokenRouting
from clustersim.symmetry.link_load_matrix import NO_LINK_LOADS
from clustersim.symmetry.rotation_orbits import StepOrbits

CommKey = tuple[str, CollectiveType, TokenRouting | None, bool, int]
"""Communicator, collective type, the token routing if an MoE dispatch kernel sends the tokens, whether the library's
all-to-all does, and how many members send.
"""
NEGLIGIBLE_FRACTION: Final = 0.1
"""A group whose transfer takes less than this fraction of its latency puts no load on shared links."""


class CollectiveCost:
    """Times communication ops on a fabric with a collective library (a `CommCost` and a `LinkDemandCost`).

    groups: process groups by communicator. Groups of one member take no time. orbits: of the step under the fabric's
    rotation; link demands then have load matrices of representatives only. Results are cached in the instance.
    """

    def __init__(
        self,
        fabric: Fabric,
        library: Library,
        groups: Mapping[str, ProcessGroups],
        orbits: StepOrbits | None = None,
    ) -> None:
        self._tuner = cached_tuner(fabric, library)
        self._routed_tuner = cached_tuner(fabric, library.for_routed_tokens())
        self._orbits = {} if orbits is None else orbits.groups
        self._groups = groups
        self._variant_costs: dict[CommKey, VariantCosts] = {}

    @cached_by(lambda _, comm_op: (comm_key(comm_op), comm_op.payload))
    def time_comm_op(self, comm_op: CommOp) -> CommTiming:
        """Timing of one collective in all groups of its communicator at once."""
        groups = self._members(comm_op.comm_group)
        if groups.shape[1] < 2 or not len(groups):
            return CommTiming(np.zeros(len(groups)), Provenance.ROOFLINE, Bottleneck.LATENCY, "none", "gpu")
        selection = self._select_variant(comm_op)
        seconds, latency = (
            float(selection.seconds[selection.slowest_group]),
            float(selection.latency[selection.slowest_group]),
        )
        return CommTiming(
            seconds=selection.seconds,
            provenance=self._provenance(comm_op, selection.slowest_variant),
            bottleneck=Bottleneck.LATENCY if latency > seconds / 2 else Bottleneck.BANDWIDTH,
            algorithm=selection.slowest_variant.name,
            tier=self._tier(comm_op.comm_group, selection.slowest_group),
            nvlink_share=np.where(_is_negligible(selection), 0.0, selection.nvlink_share),
        )

    @cached_by(lambda _, comm_op: (comm_key(comm_op), comm_op.payload))
    def link_demand(self, comm_op: CommOp) -> LinkDemand:
        """Load of a collective on shared links, group by group of its communicator, for the selected variant."""
        seconds, groups, payload = (
            self.time_comm_op(comm_op).seconds,
            self._members(comm_op.comm_group),
            comm_op.payload,
        )
        zeros = np.zeros(len(groups))
        unshared = LinkDemand(seconds, zeros, zeros, zeros, payload, NO_LINK_LOADS)
        if groups.shape[1] < 2 or not len(groups):
            return unshared
        selection = self._select_variant(comm_op)
        negligible = _is_negligible(selection)
        if negligible.all():
            return unshared
        variant_index = np.where(negligible, -1, selection.variant_index)
        loads = self._selected_link_loads(comm_op, selection.variants, variant_index)
        return _demand_of_selection(selection, loads, payload) if len(loads.load_matrix.group_index) else unshared

    @cached_by(
        lambda _, comm_op, variants, variant_index: (
            comm_key(comm_op),
            tuple(variant.name for variant in variants),
            variant_index.tobytes(),
        )
    )
    def _selected_link_loads(
        self, comm_op: CommOp, variants: Sequence[AlgorithmVariant], variant_index: IntArray
    ) -> GroupLinkLoads:
        """Link loads of the variants that the groups select; no load where `variant_index` is negative."""
        members, tuner = self._members(comm_op.comm_group), self._tuner_for(comm_op)
        used_indices = np.unique(variant_index[variant_index >= 0]).tolist()
        orbits = self._orbits.get(comm_op.comm_group)
        loads_by_variant = {n: tuner.link_loads(comm_op.collective, members, variants[n], orbits) for n in used_indices}
        return select_by_variant(loads_by_variant, variant_index)

    @cached_method
    def _tier(self, comm_group: str, group: int) -> str:
        """The highest network tier that traffic of one group of a communicator crosses."""
        return self._tuner.fabric.highest_tier(self._members(comm_group)[group])

    def _select_variant(self, comm_op: CommOp) -> Selection:
        """The fastest variant; variants pruned at an earlier payload are re-evaluated where they may be faster now."""
        key, payload = comm_key(comm_op), comm_op.payload
        if key not in self._variant_costs:
            self._variant_costs[key] = self._evaluate_variants(comm_op, payload)
        selection = select_variants(self._variant_costs[key], payload)
        if selection.is_certain:
            return selection
        self._variant_costs[key] = self._evaluate_variants(comm_op, None)
        return select_variants(self._variant_costs[key], payload)

    def _evaluate_variants(self, comm_op: CommOp, payload: Bytes | None) -> VariantCosts:
        members = self._members(comm_op.comm_group)
        return self._tuner_for(comm_op).evaluate_variants(comm_op.collective, members, payload=payload)

    def _tuner_for(self, comm_op: CommOp) -> Tuner:
        """The library's tuner, or for tokens sent by an MoE dispatch kernel, the dispatcher's."""
        _, _, routing, is_routed_all_to_all, senders = comm_key(comm_op)
        if routing is None:
            tuner = self._routed_tuner if is_routed_all_to_all else self._tuner
            return tuner if senders == 1 else cached_tuner(tuner.fabric, tuner.library, senders=senders)
        return self._dispatch_tuner(routing, self._members(comm_op.comm_group).shape[1])

    @cached_method
    def _dispatch_tuner(self, routing: TokenRouting, ranks: int) -> Tuner:
        dispatcher = load_dispatcher(routing.dispatcher).with_sm_count(routing.sm_count)
        dispatch_library = dispatcher.with_token_bytes(routing.token_bytes, ranks)
        return cached_tuner(self._tuner.fabric, dispatch_library, routing)

    def _members(self, comm_group: str) -> IntArray:
        if comm_group not in self._groups:
            raise InputError(f"there are no process groups {comm_group!r}; {suggest_nearest(comm_group, self._groups)}")
        return self._groups[comm_group].members

    def _provenance(self, comm_op: CommOp, variant: AlgorithmVariant) -> Provenance:
        """Provenance of a variant's constants, which are not fitted for a user-defined algorithm."""
        library = self._tuner_for(comm_op).library
        is_published = (
            library.published and self._tuner.library.published and variant.algorithm not in library.custom_algorithms
        )
        return Provenance.PUBLISHED if is_published else Provenance.ROOFLINE


def comm_key(comm_op: CommOp) -> CommKey:
    """What identifies a communication op apart from its payload; the routing counts only for routed collectives."""
    collective, routing = comm_op.collective, comm_op.routing
    is_routed_all_to_all = collective is CollectiveType.ALL_TO_ALL and routing is not None
    dispatched = routing if collective.is_token_routing else None
    return comm_op.comm_group, collective, dispatched, is_routed_all_to_all, comm_op.senders


def _is_negligible(selection: Selection) -> BoolArray:
    """Whether each group's transfer is negligible against its latency: [groups]."""
    negligible: BoolArray = selection.seconds - selection.latency < NEGLIGIBLE_FRACTION * selection.latency
    return negligible


def _demand_of_selection(selection: Selection, loads: GroupLinkLoads, payload: Bytes) -> LinkDemand:
    """Link demand of the selected variants; a group that crosses no link is all latency."""
    crosses_no_link = loads.largest_flow == 0.0
    transfer = payload * loads.seconds_per_byte + selection.chunk_bytes * loads.fill_seconds_per_byte
    return LinkDemand(
        latency=np.where(crosses_no_link, selection.seconds, selection.latency + selection.channel_limit),
        transfer=np.where(crosses_no_link, 0.0, transfer),
        per_byte=loads.seconds_per_byte,
        flow=payload * loads.largest_flow,
        payload=payload,
        link_loads=loads.load_matrix,
    )
