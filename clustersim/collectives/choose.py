"""Which algorithm does a library take?

The fastest that it offers for this collective, these groups and this payload, by the model's own estimate, as NCCL's
tuner does; or the one that the user named. Groups of different shapes choose apart, beside each other (`siblings`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clustersim.arrays import FloatArray, IntArray
from clustersim.collectives.lanes import Lanes, lanes
from clustersim.collectives.library import ALGORITHMS, Library, Makes, Offer
from clustersim.collectives.loads import OwnLoads, own_loads, spread
from clustersim.collectives.phase import Arrangement, Phase, Rounds, arrange
from clustersim.collectives.routes import LinkClasses, Routed, link_classes, route
from clustersim.collectives.siblings import Siblings
from clustersim.collectives.transfer import (
    Burden,
    burden,
    effective_bandwidth,
    least_latency,
    needs_switch,
    phase_latency,
    time_phase,
)
from clustersim.collectives.turned import images, one_of_each
from clustersim.errors import InputError
from clustersim.hardware.topology import Fabric
from clustersim.hardware.turn import Turn, Turning
from clustersim.program.colour import distinct
from clustersim.program.task import Collective
from clustersim.state import FieldState
from clustersim.units import Bytes, Seconds


@dataclass(frozen=True, slots=True)
class Choices:
    """What each offer would cost all groups of one role, for any payload.

    coefficients: [offers, 3, classes] latency (s), seconds per byte, fill (s/byte of chunk), infinite latency where
    groups cannot take an offer; groups of one class have equal coefficients; group_class: [groups]; floor: [classes]
    seconds that what was left out takes at least; makes: of the fabric's links; lanes: of messages, where all stay inside
    domains.
    """

    offers: tuple[Offer, ...]
    coefficients: FloatArray
    group_class: IntArray
    library: Library
    floor: FloatArray
    makes: Makes
    lanes: Lanes | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The fastest offer in each group, and in the slowest one.

    seconds: [groups]; idle: [groups] the part of them in which no bytes move; narrow: [groups] the part by which bytes
    move slower than links let them (see `lanes`); taken: [groups] number of the offer, of which chunk: [offers] is the
    bytes of one chunk; offers: all of them; offer: what the slowest group takes; certain: nothing that was left out
    can be faster in any group.
    """

    seconds: FloatArray
    idle: FloatArray
    narrow: FloatArray
    taken: IntArray
    chunk: FloatArray
    offers: tuple[Offer, ...]
    offer: Offer
    slowest: int
    certain: bool


def choose(choices: Choices, payload: Bytes) -> Choice:
    """The fastest offer for this payload, in each group; time of microseconds."""
    idle, moving, narrow = costs(choices, payload)
    seconds = idle + moving + narrow
    best = seconds.argmin(axis=0)
    each = np.arange(seconds.shape[1])
    fastest = seconds[best, each]
    worst = int(fastest.argmax())
    groups = choices.group_class
    return Choice(
        seconds=fastest[groups],
        idle=idle[best, each][groups],
        narrow=narrow[best, each][groups],
        taken=best[groups],
        chunk=_chunks(choices, payload),
        offers=choices.offers,
        offer=choices.offers[int(best[worst])],
        slowest=int((groups == worst).argmax()),
        certain=bool((fastest < choices.floor).all()),
    )


def costs(choices: Choices, payload: Bytes) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Seconds of each offer in which no bytes move, in which links move them, and that channels take beyond.

    Each is [offers, classes].
    """
    start = choices.library.launch_on(choices.makes)
    launch = np.array([start if offer.launched else 0.0 for offer in choices.offers])
    latency, per_byte, fill = np.moveaxis(choices.coefficients, 1, 0)
    moving = payload * per_byte + _chunks(choices, payload)[:, None] * fill
    idle = launch[:, None] + latency
    idle[[payload > offer.most for offer in choices.offers]] = np.inf
    return idle, moving, np.maximum(_channelled(choices, payload)[:, None] - moving, 0.0)


def _chunks(choices: Choices, payload: Bytes) -> FloatArray:
    """Bytes of one chunk of each offer: [offers]."""
    return np.array([_chunk(offer, choices.library, payload) for offer in choices.offers])


def _channelled(choices: Choices, payload: Bytes) -> FloatArray:
    """What channels take at least to carry the messages of each offer: [offers]."""
    if choices.lanes is None:
        return np.zeros(len(choices.offers))
    seconds = choices.lanes.seconds(payload, choices.library, choices.makes)
    return np.array([seconds if offer.channelled else 0.0 for offer in choices.offers])


def _chunk(offer: Offer, library: Library, payload: Bytes) -> Bytes:
    """Bytes of one chunk; none for protocols that hand on every word."""
    return min(library.pipeline.fraction * payload, library.pipeline.chunk) if offer.chunked else 0.0


@dataclass(frozen=True)
class Surveyor(FieldState):
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
        kept = members if turned is None else members[turned.kept]
        tenders = [self._tender(kind, each, algorithm) for each in arrange(kept, self.fabric)]
        route_one = partial(self._route, turned=turned is not None, alone=len(tenders) == 1)
        siblings = Siblings([tender.phases for tender in tenders], route_one)
        beside = (partial(siblings.routed, number) for number in range(len(tenders)))
        parts = [self._cheapest(*each, payload) for each in zip(tenders, beside, strict=True)]
        choices = _side_by_side(parts, [tender.arrangement.groups for tender in tenders])
        if self._makes.generations:
            choices = replace(choices, lanes=lanes(kind, members, self.fabric))
        return choices if turned is None else replace(choices, group_class=choices.group_class[turned.of])

    def own_loads(self, kind: Collective, members: IntArray, offer: Offer) -> OwnLoads:
        """What an offer asks of links in each of the groups [groups, size] by itself, where they can take it."""
        parts = []
        for each in arrange(members, self.fabric):
            routed = [route(phase, self.fabric) for phase in ALGORITHMS[offer.algorithm].phases(kind, each)]
            if routed:
                parts.append((each.groups, own_loads(self.fabric, self.library, offer, routed, each.spans)))
        return spread(parts, len(members))

    def _tender(self, kind: Collective, arrangement: Arrangement, algorithm: str | None) -> "_Tender":
        """What the library offers for groups of this shape."""
        without = self.library.without(self._makes) if arrangement.spans > 1 else frozenset()
        offered = self.library.offered(kind, algorithm)
        able = [offer for offer in offered if self._possible(offer) and offer.works(without)]
        names = dict.fromkeys(offer.algorithm for offer in able)
        phases = {name: found for name in names if (found := ALGORITHMS[name].phases(kind, arrangement))}
        offers = tuple(offer for offer in able if offer.algorithm in phases)
        if not offers:
            what = f"{kind.value} by {algorithm}" if algorithm else kind.value
            raise InputError(f"{self.library.name} cannot do {what} in groups of {arrangement.size} on this cluster")
        return _Tender(offers, phases, arrangement)

    def _cheapest(
        self, tender: "_Tender", routed: Callable[[str], tuple[Routed, ...]], payload: Bytes | None
    ) -> Choices:
        """Cost algorithm by algorithm, from the one that may take the least, until no other can be the fastest."""
        floors = sorted((floor, name) for name, floor in tender.floors(self.library.launch_on(self._makes)).items())
        borne: dict[str, tuple[_Borne, ...]] = {}
        for (_, name), (floor, _) in pairwise([*floors, (math.inf, "")]):
            borne[name] = tuple(self._borne(each) for each in routed(name))
            if math.isinf(floor) or payload is not None:
                choices = self._classified(tender, borne, floor)
                if payload is not None and choose(choices, payload).certain:
                    break
        return choices

    def _possible(self, offer: Offer) -> bool:
        """Whether the fabric's switches can do what the offer needs."""
        return not needs_switch(offer) or self.library.adds_on(self._makes)

    def _route(self, phase: Phase, *, turned: bool, alone: bool) -> Routed:
        """Route a phase; turned: groups stand for as many as a node has places; alone: no other loads are added."""
        first = one_of_each(phase, self._turn) if self._turn and alone and not turned else None
        turn = self._turn if turned or first else None
        return route(first or phase, self.fabric, turn)

    def _borne(self, routed: Routed) -> "_Borne":
        """What a phase means to groups."""
        classes = self._orbit_classes if routed.orbits else self._classes
        found = burden(routed, classes, self.library)
        return _Borne(found, routed.phase.rounds.across(len(found.near)), routed.phase.stages)

    @cached_property
    def _makes(self) -> Makes:
        return Makes.of(self._orbit_classes.table)

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
        return link_classes(table.of(first))

    def _classified(self, tender: "_Tender", borne: Mapping[str, tuple["_Borne", ...]], floor: Seconds) -> Choices:
        """Cost the offers once for all groups that bear the same, and merge groups with equal coefficients."""
        offers = tuple(offer for offer in tender.offers if offer.algorithm in borne)
        told = [column for found in borne.values() for each in found for column in each.columns]
        bearing, first = distinct(told)
        own = {name: [each.of(first) for each in found] for name, found in borne.items()}
        table = np.stack([self._cost(offer, own[offer.algorithm], tender.arrangement) for offer in offers])
        classes, merged = np.unique(table.reshape(-1, len(first)), axis=1, return_inverse=True)
        coefficients = classes.reshape(len(offers), 3, -1)
        least = np.full(classes.shape[1], floor)
        return Choices(offers, coefficients, merged.reshape(-1)[bearing], self.library, least, self._makes)

    def _cost(self, offer: Offer, borne: Sequence["_Borne"], arrangement: Arrangement) -> FloatArray:
        """[3, groups]: latency, seconds per byte, fill of all phases, in groups of this shape."""
        alone = arrangement.spans == arrangement.size
        bandwidth = effective_bandwidth(self._orbit_classes.table, self.library, offer, arrangement.spans)
        total = np.zeros((3, len(borne[0].burden.near)))
        for each in borne:
            latency = phase_latency(each.burden, each.rounds, offer, alone=alone)
            total += time_phase(each.burden, bandwidth, latency, each.stages)
        return total


def _side_by_side(parts: Sequence[Choices], groups: Sequence[IntArray]) -> Choices:
    """The choices of all groups from those of sets; groups: which ones each set is about."""
    if len(parts) == 1:
        return parts[0]
    library = parts[0].library
    offers = tuple(offer for offer in library.offers if any(offer in part.offers for part in parts))
    impossible = np.array([math.inf, 0.0, 0.0])
    classes = [part.coefficients.shape[2] for part in parts]
    table = np.broadcast_to(impossible[:, None], (len(offers), 3, sum(classes))).copy()
    group_class = np.empty(sum(map(len, groups)), dtype=np.int64)
    for part, own, end in zip(parts, groups, np.cumsum(classes).tolist(), strict=True):
        first = end - part.coefficients.shape[2]
        table[[offers.index(offer) for offer in part.offers], :, first:end] = part.coefficients
        group_class[own] = first + part.group_class
    return Choices(offers, table, group_class, library, np.concatenate([part.floor for part in parts]), parts[0].makes)


@dataclass(frozen=True, slots=True)
class _Tender:
    """What the library offers to groups of one shape: offers, and the phases of their algorithms in its order."""

    offers: tuple[Offer, ...]
    phases: Mapping[str, tuple[Phase, ...]]
    arrangement: Arrangement

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
