"""Which algorithm does a library take?

The fastest that it offers for this collective, these groups and this payload, by the model's own estimate, as NCCL's
tuner does; or the one that the user named.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clustersim.collectives.library import ALGORITHMS, Library, Offer
from clustersim.collectives.loads import OwnLoads, own_loads
from clustersim.collectives.phase import Arrangement, FloatArray, IntArray, Phase, Rounds, arrange
from clustersim.collectives.routes import LinkClasses, link_classes, route
from clustersim.collectives.transfer import (
    Burden,
    Mask,
    burden,
    effective_bandwidth,
    least_latency,
    needs_switch,
    phase_latency,
    time_phase,
)
from clustersim.collectives.turned import Turning, images, one_of_each
from clustersim.errors import InputError
from clustersim.hardware.topology import LINK_KINDS, Fabric, LinkKind, LinkTable
from clustersim.hardware.turn import Turn
from clustersim.program.colour import distinct
from clustersim.program.task import Collective
from clustersim.units import Bytes, Seconds


@dataclass(frozen=True, slots=True)
class Choices:
    """What each offer would cost all groups of one role, for any payload.

    coefficients: [offers, 3, classes] latency (s), seconds per byte, fill (s/byte of chunk); groups with equal
    coefficients are one class; group_class: [groups]; floor: seconds that what was left out takes at least.
    """

    offers: tuple[Offer, ...]
    coefficients: FloatArray
    group_class: IntArray
    library: Library
    floor: Seconds = math.inf


@dataclass(frozen=True, slots=True)
class Choice:
    """The fastest offer in each group, and in the slowest one.

    seconds: [groups]; idle: [groups] the part of them in which no bytes move; taken: [groups] number of the offer, of
    which chunk: [offers] is the bytes of one chunk; offers: all of them; offer: what the slowest group takes.
    """

    seconds: FloatArray
    idle: FloatArray
    taken: IntArray
    chunk: FloatArray
    offers: tuple[Offer, ...]
    offer: Offer
    slowest: int


def choose(choices: Choices, payload: Bytes) -> Choice:
    """The fastest offer for this payload, in each group; time of microseconds."""
    chunk = np.array([_chunk(offer, choices.library, payload) for offer in choices.offers])
    launch = np.array([choices.library.launch if offer.launched else 0.0 for offer in choices.offers])
    latency, per_byte, fill = np.moveaxis(choices.coefficients, 1, 0)
    idle = launch[:, None] + latency
    seconds = idle + payload * per_byte + chunk[:, None] * fill
    seconds[[payload > offer.most for offer in choices.offers]] = np.inf
    best = seconds.argmin(axis=0)
    each = np.arange(seconds.shape[1])
    fastest, waiting = seconds[best, each], idle[best, each]
    worst = int(fastest.argmax())
    groups = choices.group_class
    return Choice(
        seconds=fastest[groups],
        idle=waiting[groups],
        taken=best[groups],
        chunk=chunk,
        offers=choices.offers,
        offer=choices.offers[int(best[worst])],
        slowest=int((groups == worst).argmax()),
    )


def _chunk(offer: Offer, library: Library, payload: Bytes) -> Bytes:
    """Bytes of one chunk; none for protocols that hand on every word."""
    return min(library.pipeline.fraction * payload, library.pipeline.chunk) if offer.chunked else 0.0


@dataclass(frozen=True)
class Surveyor:
    """Costs a library's offers on one fabric."""

    fabric: Fabric
    library: Library

    def survey(
        self, kind: Collective, members: IntArray, algorithm: str | None = None, payload: Bytes | None = None
    ) -> Choices:
        """Cost the offers for the groups [groups, size]; `algorithm` restricts them to one algorithm.

        payload: algorithms whose rounds alone take longer than others for it, in every group, are left out.
        """
        turned = images(members, self._turn) if self._turn else None
        if turned is None:
            return self._cheapest(self._tender(kind, arrange(members, self.fabric), algorithm), payload)
        kept = self._tender(kind, arrange(members[turned.kept], self.fabric), algorithm)
        choices = self._cheapest(replace(kept, turned=True), payload)
        return replace(choices, group_class=choices.group_class[turned.of])

    def own_loads(self, kind: Collective, members: IntArray, offer: Offer) -> OwnLoads:
        """What an offer asks of links in each of the groups [groups, size] by itself."""
        arrangement = arrange(members, self.fabric)
        phases = ALGORITHMS[offer.algorithm].phases(kind, arrangement)
        routed = [route(phase, self.fabric) for phase in phases]
        return own_loads(self.fabric, self.library, offer, routed, int(arrangement.spans.max()))

    def _tender(self, kind: Collective, arrangement: Arrangement, algorithm: str | None) -> "_Tender":
        """What the library offers for groups of this shape."""
        able = [offer for offer in self.library.offered(kind, algorithm) if self._possible(offer)]
        phases = {name: ALGORITHMS[name].phases(kind, arrangement) for name in {offer.algorithm for offer in able}}
        offers = tuple(offer for offer in able if phases[offer.algorithm])
        if not offers:
            what = f"{kind.value} by {algorithm}" if algorithm else kind.value
            raise InputError(f"{self.library.name} cannot do {what} in groups of {arrangement.size} on this cluster")
        return _Tender(offers, phases, arrangement)

    def _cheapest(self, tender: "_Tender", payload: Bytes | None) -> Choices:
        """Cost algorithm by algorithm, from the one that may take the least, until no other can be the fastest."""
        floors = sorted((floor, name) for name, floor in tender.floors(self.library.launch).items())
        borne: dict[str, tuple[_Borne, ...]] = {}
        for (_, name), (floor, _) in pairwise([*floors, (math.inf, "")]):
            borne[name] = tuple(self._borne(phase, turned=tender.turned) for phase in tender.phases[name])
            if math.isinf(floor) or payload is not None:
                choices = replace(self._classified(tender, borne), floor=floor)
                if payload is not None and choose(choices, payload).seconds.max() < floor:
                    break
        return choices

    def _possible(self, offer: Offer) -> bool:
        """Whether the fabric's switches can do what the offer needs."""
        if not needs_switch(offer):
            return True
        table = self._orbit_classes.table
        ports = table.bandwidth[table.kind == LINK_KINDS.index(LinkKind.NVLINK)]
        return ports.size > 0 and self.library.generation(float(ports.max())).in_network is not None

    def _borne(self, phase: Phase, *, turned: bool) -> "_Borne":
        """What a phase means to groups; turned: each stands for as many as there are places in a node."""
        first = one_of_each(phase, self._turn) if self._turn and not turned else None
        turn = self._turn if turned or first else None
        classes = self._classes if turn is None else self._orbit_classes
        found = burden(route(first or phase, self.fabric, turn), classes, self.library)
        return _Borne(found, phase.rounds.across(len(found.near)), phase.stages)

    @cached_property
    def _turn(self) -> Turn | None:
        return self.fabric.turn if isinstance(self.fabric, Turning) else None

    @cached_property
    def _classes(self) -> LinkClasses:
        return link_classes(self.fabric.links)

    @cached_property
    def _orbit_classes(self) -> LinkClasses:
        """Of orbits; the same classes, since links of an orbit are equal."""
        if self._turn is None:
            return self._classes
        table, first = self.fabric.links, self._turn.first
        return link_classes(LinkTable(table.kind[first], table.bandwidth[first], table.latency[first]))

    def _classified(self, tender: "_Tender", borne: Mapping[str, tuple["_Borne", ...]]) -> Choices:
        """Cost the offers once for all groups that bear the same, and merge groups with equal coefficients."""
        offers = tuple(offer for offer in tender.offers if offer.algorithm in borne)
        told = [column for found in borne.values() for each in found for column in each.columns]
        all_spans = tender.arrangement.spans
        bearing, first = distinct([all_spans, *told])
        alone, spans = all_spans[first] == tender.arrangement.size, int(all_spans.max())
        own = {name: [each.of(first) for each in found] for name, found in borne.items()}
        table = np.stack([self._cost(offer, own[offer.algorithm], alone, spans) for offer in offers])
        classes, merged = np.unique(table.reshape(-1, len(first)), axis=1, return_inverse=True)
        return Choices(offers, classes.reshape(len(offers), 3, -1), merged.reshape(-1)[bearing], self.library)

    def _cost(self, offer: Offer, borne: Sequence["_Borne"], alone: Mask, spans: int) -> FloatArray:
        """[3, groups]: latency, seconds per byte, fill of all phases, in groups over at most `spans` domains."""
        bandwidth = effective_bandwidth(self._orbit_classes.table, self.library, offer, spans)
        total = np.zeros((3, len(alone)))
        for each in borne:
            latency = phase_latency(each.burden, each.rounds, offer, alone)
            total += time_phase(each.burden, bandwidth, latency, each.stages)
        return total


@dataclass(frozen=True, slots=True)
class _Tender:
    """Offers and the phases of their algorithms; turned: groups stand for as many as a node has places."""

    offers: tuple[Offer, ...]
    phases: Mapping[str, tuple[Phase, ...]]
    arrangement: Arrangement
    turned: bool = False

    def floors(self, launch: Seconds) -> dict[str, Seconds]:
        """What each algorithm takes at least in any group, for any payload."""
        floors: dict[str, Seconds] = {}
        for offer in self.offers:
            rounds = sum(least_latency(phase.rounds, offer) for phase in self.phases[offer.algorithm])
            least = rounds + (launch if offer.launched else 0.0)
            floors[offer.algorithm] = min(least, floors.get(offer.algorithm, math.inf))
        return floors


@dataclass(frozen=True, slots=True)
class _Borne:
    """What one phase means to each group, and its rounds in each."""

    burden: Burden
    rounds: Rounds
    stages: float

    @property
    def columns(self) -> list[NDArray[Any]]:
        """All that tells groups apart: [groups] each."""
        counts = (self.rounds.local, self.rounds.network, self.rounds.posts)
        return [*self.burden.columns, *map(np.asarray, counts)]

    def of(self, groups: IntArray) -> "_Borne":
        """That of some of the groups."""
        return _Borne(self.burden.of(groups), self.rounds.of(groups), self.stages)
