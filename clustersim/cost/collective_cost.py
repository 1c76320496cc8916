"""How long does a collective take alone?

The library's fastest algorithm on the routes of all groups of the role (see `collectives.tuner`). What does not depend
on the payload is worked out once for each role and collective, so another payload costs microseconds. Kernels that send
tokens to experts are libraries of their own (`topologies/dispatchers`), on the same routes.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from clustersim.collectives.group_link_loads import GroupLinkLoads, select_by_variant
from clustersim.collectives.library import AlgorithmVariant, Library, load_dispatcher
from clustersim.collectives.tuner import Selection, Tuner, VariantCosts, cached_tuner, select_variants
from clustersim.common.arrays import IntArray
from clustersim.common.errors import InputError, nearest
from clustersim.common.units import Bytes
from clustersim.cost.timing import Bound, Demand, ExchangeTiming, Provenance
from clustersim.hardware.topology import Fabric
from clustersim.program.program import ProcessGroups
from clustersim.program.task import CollectiveType, CommOp, TokenRouting
from clustersim.symmetry.link_load_matrix import NO_LINK_LOADS

Kind = tuple[str, CollectiveType, TokenRouting | None]
"""Role, collective, and where tokens go if kernels of their own send them."""
NEGLIGIBLE: Final = 0.1
"""A group whose bytes move for less than this part of its latency loads no shared link."""


class CommunicationCost:
    """Times exchanges on a fabric with a library (an `ExchangeCost`).

    groups: process groups by role. Groups of one member take no time. Results are remembered inside the instance.
    """

    def __init__(
        self,
        fabric: Fabric,
        library: Library,
        groups: Mapping[str, ProcessGroups],
    ) -> None:
        self._surveyor = cached_tuner(fabric, library)
        self._groups = groups
        self._surveyors: dict[tuple[TokenRouting, int], Tuner] = {}
        self._choices: dict[Kind, VariantCosts] = {}
        self._tiers: dict[tuple[str, int], str] = {}
        self._timings: dict[tuple[Kind, Bytes], ExchangeTiming] = {}
        self._demands: dict[tuple[Kind, Bytes], Demand] = {}
        self._own: dict[tuple[Kind, tuple[str, ...], bytes], GroupLinkLoads] = {}

    def exchange(self, exchange: CommOp) -> ExchangeTiming:
        """Seconds of one collective in each group of its role, all groups at once."""
        key = kind_of(exchange), exchange.payload
        if key not in self._timings:
            self._timings[key] = self._time(exchange)
        return self._timings[key]

    def _time(self, exchange: CommOp) -> ExchangeTiming:
        groups = self._members(exchange.comm_group)
        if groups.shape[1] < 2 or not len(groups):
            return ExchangeTiming(np.zeros(len(groups)), Provenance.ROOFLINE, Bound.LATENCY, "none", "gpu")
        choice = self._choose(exchange)
        seconds, latency = float(choice.seconds[choice.slowest_group]), float(choice.latency[choice.slowest_group])
        return ExchangeTiming(
            seconds=choice.seconds,
            provenance=self._provenance(exchange, choice.slowest_variant),
            bound=Bound.LATENCY if latency > seconds / 2 else Bound.BANDWIDTH,
            algorithm=choice.slowest_variant.name,
            tier=self._tier(exchange.comm_group, choice.slowest_group),
        )

    def demand(self, exchange: CommOp) -> Demand:
        """What one collective asks of shared links in each group of its role, by the offer that it takes."""
        key = kind_of(exchange), exchange.payload
        if key not in self._demands:
            self._demands[key] = self._ask(exchange)
        return self._demands[key]

    def _ask(self, exchange: CommOp) -> Demand:
        seconds, groups, payload = self.exchange(exchange).seconds, self._members(exchange.comm_group), exchange.payload
        nothing = np.zeros(len(groups))
        unshared = Demand(seconds, nothing, nothing, nothing, payload, NO_LINK_LOADS)
        if groups.shape[1] < 2 or not len(groups):
            return unshared
        choice = self._choose(exchange)
        negligible = choice.seconds - choice.latency < NEGLIGIBLE * choice.latency
        if negligible.all():
            return unshared
        taken = np.where(negligible, -1, choice.variant_index)
        loads = self._loads(exchange, choice.variants, taken)
        return _demand(choice, loads, payload) if len(loads.load_matrix.group_index) else unshared

    def _loads(self, exchange: CommOp, offers: Sequence[AlgorithmVariant], taken: IntArray) -> GroupLinkLoads:
        """What the offers that the groups of a role take ask of links; nothing where the number taken is negative."""
        key = (kind_of(exchange), tuple(offer.name for offer in offers), taken.tobytes())
        if key not in self._own:
            members, asked = self._members(exchange.comm_group), self._surveyor_of(exchange)
            numbers = np.unique(taken[taken >= 0]).tolist()
            parts = {n: asked.link_loads(exchange.collective, members, offers[n]) for n in numbers}
            self._own[key] = select_by_variant(parts, taken)
        return self._own[key]

    def _tier(self, role: str, group: int) -> str:
        """The highest tier that traffic of one group of a role crosses."""
        if (role, group) not in self._tiers:
            self._tiers[role, group] = self._surveyor.fabric.tier(self._members(role)[group])
        return self._tiers[role, group]

    def _choose(self, exchange: CommOp) -> Selection:
        """The fastest algorithm; what an earlier payload left out is surveyed where it may be faster."""
        key, payload = kind_of(exchange), exchange.payload
        if key not in self._choices:
            self._choices[key] = self._survey(exchange, payload)
        choice = select_variants(self._choices[key], payload)
        if choice.is_certain:
            return choice
        self._choices[key] = self._survey(exchange, None)
        return select_variants(self._choices[key], payload)

    def _survey(self, exchange: CommOp, payload: Bytes | None) -> VariantCosts:
        members = self._members(exchange.comm_group)
        return self._surveyor_of(exchange).evaluate_variants(exchange.collective, members, payload=payload)

    def _surveyor_of(self, exchange: CommOp) -> Tuner:
        """The library's, or for tokens that kernels of their own send to experts, the dispatcher's."""
        routing = kind_of(exchange)[-1]
        if routing is None:
            return self._surveyor
        ranks = self._members(exchange.comm_group).shape[1]
        if (routing, ranks) not in self._surveyors:
            kernels = (
                load_dispatcher(routing.dispatcher)
                .with_sm_count(routing.sm_count)
                .with_token_bytes(routing.token_bytes, ranks)
            )
            self._surveyors[routing, ranks] = cached_tuner(self._surveyor.fabric, kernels, routing)
        return self._surveyors[routing, ranks]

    def _members(self, role: str) -> IntArray:
        if role not in self._groups:
            raise InputError(f"there are no process groups {role!r}; {nearest(role, self._groups)}")
        return self._groups[role].members

    def _provenance(self, exchange: CommOp, offer: AlgorithmVariant) -> Provenance:
        """Of what a library took; its constants were not fitted to an algorithm of the user's own."""
        library = self._surveyor_of(exchange).library
        measured = (
            library.published and self._surveyor.library.published and offer.algorithm not in library.custom_algorithms
        )
        return Provenance.PUBLISHED if measured else Provenance.ROOFLINE


def kind_of(exchange: CommOp) -> Kind:
    """What tells exchanges apart beside their payloads: the routing counts where tokens are sent by it."""
    return exchange.comm_group, exchange.collective, exchange.routing if exchange.collective.is_token_routing else None


def _demand(choice: Selection, loads: GroupLinkLoads, payload: Bytes) -> Demand:
    """What groups ask of links by the offers that they take; a group that crosses none is all latency."""
    alone = loads.largest_flow == 0.0
    transfer = payload * loads.seconds_per_byte + choice.chunk_bytes * loads.fill_seconds_per_byte
    return Demand(
        latency=np.where(alone, choice.seconds, choice.latency + choice.channel_limit),
        transfer=np.where(alone, 0.0, transfer),
        per_byte=loads.seconds_per_byte,
        flow=payload * loads.largest_flow,
        payload=payload,
        crossings=loads.load_matrix,
    )
