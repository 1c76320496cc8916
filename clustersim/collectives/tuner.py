"""Which algorithm does a library take?

The fastest that it offers for this collective, these groups and this payload, by the model's own estimate, as NCCL's
tuner does; or the one that the user named. Groups of different shapes choose apart, beside each other (`siblings`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from clustersim.collectives.chunking import Shapes, paced
from clustersim.collectives.collnet import COLLNET
from clustersim.collectives.flow_routes import LinkClasses, Routed, link_classes, route
from clustersim.collectives.group_link_loads import OwnLoads, own_loads, spread
from clustersim.collectives.heterogeneous_groups import Siblings
from clustersim.collectives.library import Library, Makes, Offer
from clustersim.collectives.p2p_channels import Lanes, lanes
from clustersim.collectives.phase import Arrangement, Phase, Rounds, arrange
from clustersim.collectives.phase_cost import (
    Burden,
    Rates,
    burden,
    effective_bandwidth,
    least_latency,
    needs_switch,
    phase_latency,
    time_phase,
)
from clustersim.collectives.rotated_images import images, one_of_each
from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.errors import InputError
from clustersim.common.lru import Recent
from clustersim.common.pickling import FieldState
from clustersim.common.units import Bytes, Seconds
from clustersim.hardware.rotation import Turn, Turning
from clustersim.hardware.topology import LINK_KINDS, Fabric, LinkKind
from clustersim.program.task import CollectiveType, TokenRouting
from clustersim.symmetry.labels import unique_by_columns

KEPT: Final = 16_000_000
"""Bytes of surveys, and of loads, that are remembered: of some layouts of 16,384 GPUs, of hundreds of 512."""
MANY: Final = 4  # domains, from which on trees among adding switches have smaller chunks


@dataclass(frozen=True, slots=True)
class Choices:
    """What each offer would cost all groups of one role, for any payload.

    coefficients: [offers, 4, classes] latency (s), seconds per byte, fill (s/byte of chunk), seconds per byte of
    NVLink, infinite latency where groups cannot take an offer; groups of one class have equal coefficients;
    group_class: [groups]; floor: [classes] seconds that what was left out takes at least; makes: of the fabric's links;
    shapes: of groups; lanes: of messages, where all stay inside domains.
    """

    offers: tuple[Offer, ...]
    coefficients: FloatArray
    group_class: IntArray
    library: Library
    floor: FloatArray
    makes: Makes
    shapes: Shapes
    lanes: Lanes | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The fastest offer in each group, and in the slowest one.

    seconds: [groups]; idle: [groups] the part of them in which no bytes move; narrow: [groups] the part by which bytes
    move slower than links let them (see `lanes`); taken: [groups] number of the offer, of which chunk: [groups] is the
    bytes of one; offers: all of them; offer: what the slowest group takes; certain: nothing that was left out
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
    found = costs(choices, payload)
    seconds = found.seconds
    best = seconds.argmin(axis=0)
    each = np.arange(seconds.shape[1])
    fastest = seconds[best, each]
    worst = int(fastest.argmax())
    groups = choices.group_class
    return Choice(
        seconds=fastest[groups],
        idle=found.idle[best, each][groups],
        narrow=found.narrow[best, each][groups],
        taken=best[groups],
        chunk=found.chunk[best, each][groups],
        offers=choices.offers,
        offer=choices.offers[int(best[worst])],
        slowest=int((groups == worst).argmax()),
        certain=bool((fastest < choices.floor).all()),
    )


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of each offer, [offers, classes]: in which no bytes move, links move them, and what these take beyond.

    chunk: bytes of one.
    """

    idle: FloatArray
    moving: FloatArray
    narrow: FloatArray
    chunk: FloatArray

    @property
    def seconds(self) -> FloatArray:
        """All of it."""
        total: FloatArray = self.idle + self.moving + self.narrow
        return total


def costs(choices: Choices, payload: Bytes) -> Costs:
    """What each offer takes."""
    start = choices.library.launch_on(choices.makes)
    launch = np.array([start if offer.launched else 0.0 for offer in choices.offers])
    latency, per_byte, fill, inside = np.moveaxis(choices.coefficients, 1, 0)
    chunk = np.stack([_chunk(offer, choices, payload) for offer in choices.offers])
    idle = launch[:, None] + latency
    idle[[payload > offer.most for offer in choices.offers]] = np.inf
    moving = payload * per_byte + chunk * fill
    least = np.stack(
        [_least(offer, choices, payload, item) for offer, item in zip(choices.offers, inside, strict=True)]
    )
    pace = np.array([paced(offer.pace, payload) for offer in choices.offers])
    beyond = payload * (np.maximum(least, per_byte) / pace[:, None] - per_byte)
    return Costs(idle, moving, np.maximum(_channelled(choices, payload)[:, None] - moving, beyond), chunk)


def _least(offer: Offer, choices: Choices, payload: Bytes, inside: FloatArray) -> FloatArray:
    """Seconds per byte that an offer takes at least, whatever links allow: [classes]."""
    shapes, floor = choices.shapes, np.zeros(len(inside))
    for make in choices.makes.generations:
        generation = choices.library.generation(make)
        if offer.algorithm in generation.between:
            two, more = generation.between[offer.algorithm]
            ceiling = np.where(shapes.spans > 2, more, np.where(shapes.spans > 1, two, np.inf))
            floor = np.maximum(floor, 2.0 * (shapes.ranks - 1) / shapes.ranks / ceiling)
        if offer.ramped and generation.ramp:
            floor = np.maximum(floor, inside * generation.ramp.slower(payload, shapes.ranks))
        if offer.steps and generation.in_network:
            handling = generation.in_network.handling
            chunk = _step(offer, choices, payload) / _beside(choices)
            slower = (1.0 + handling / chunk) / (1.0 + handling / offer.steps[0].largest)
            floor = np.maximum(floor, inside * slower)
    return floor


def _channelled(choices: Choices, payload: Bytes) -> FloatArray:
    """What channels take at least to carry the messages of each offer: [offers]."""
    if choices.lanes is None:
        return np.zeros(len(choices.offers))
    seconds = choices.lanes.seconds(payload, choices.library, choices.makes)
    return np.array([seconds if offer.channelled else 0.0 for offer in choices.offers])


def _chunk(offer: Offer, choices: Choices, payload: Bytes) -> FloatArray:
    """Bytes of one chunk, [classes]; none for protocols that hand on every word."""
    if offer.steps:
        return np.minimum(_step(offer, choices, payload), payload)
    if not offer.chunked:
        return np.zeros(len(choices.shapes.ranks))
    return (offer.pipeline or choices.library.pipeline).of(payload, choices.shapes.spans)


def _step(offer: Offer, choices: Choices, payload: Bytes) -> FloatArray:
    """Bytes that all channels and shares of a stepped offer hold at once: [classes]."""
    spans, beside = choices.shapes.spans, _beside(choices)
    one, few, many = (step.of(payload, beside) for step in offer.steps)
    return np.where(spans == 1, one, np.where(spans < MANY, few, many)) * beside


def _beside(choices: Choices) -> FloatArray:
    """How many chunks of a stepped offer move beside each other: [classes]."""
    rates = [choices.library.generation(make).in_network for make in choices.makes.generations]
    one, several = np.max([rate.channels for rate in rates if rate] or [(1, 1)], axis=0)
    beside: FloatArray = np.where(choices.shapes.spans == 1, one, several) * choices.shapes.rails.astype(np.float64)
    return beside


@lru_cache(maxsize=8)
def surveyor(fabric: Fabric, library: Library, routing: TokenRouting | None = None) -> "Surveyor":
    """Who costs a library's offers on a fabric: the same for equal ones, as long as no others are asked for."""
    return Surveyor(fabric, library, routing)


@dataclass(frozen=True)
class Surveyor(FieldState):
    """Costs a library's offers on one fabric; routing: of the tokens that it sends to experts, if it does.

    It remembers what it was asked for last: layouts that are compared have many groups in common.
    """

    fabric: Fabric
    library: Library
    routing: TokenRouting | None = None

    @cached_property
    def _surveyed(self) -> Recent[Choices]:
        return Recent(KEPT)

    @cached_property
    def _loaded(self) -> Recent[OwnLoads]:
        return Recent(KEPT)

    def survey(self, kind: CollectiveType, members: IntArray, payload: Bytes | None = None) -> Choices:
        """Cost the offers for the groups [groups, size].

        payload: algorithms whose rounds alone take longer than others for it, in every group, are left out.
        """
        key = kind, payload, members.shape, members.tobytes()
        return self._surveyed.of(key, partial(self._survey, kind, members, payload))

    def _survey(self, kind: CollectiveType, members: IntArray, payload: Bytes | None) -> Choices:
        turned = images(members, self._turn) if self._turn else None
        kept = members if turned is None else members[turned.kept]
        tenders = [self._tender(kind, arrangement) for arrangement in self.arranged(kept)]
        route_one = partial(self._route, turned=turned is not None, alone=len(tenders) == 1)
        siblings = Siblings([tender.phases for tender in tenders], route_one)
        beside = (partial(siblings.routed, number) for number in range(len(tenders)))
        parts = [self._cheapest(*item, payload) for item in zip(tenders, beside, strict=True)]
        choices = _side_by_side(parts, [tender.arrangement.groups for tender in tenders])
        if self._makes.generations:
            choices = replace(choices, lanes=lanes(kind, members, self.fabric))
        return choices if turned is None else replace(choices, group_class=choices.group_class[turned.of])

    def own_loads(self, kind: CollectiveType, members: IntArray, offer: Offer) -> OwnLoads:
        """What an offer asks of links in each of the groups [groups, size] by itself, where they can take it."""
        key = kind, self.library.offers.index(offer), members.shape, members.tobytes()
        return self._loaded.of(key, partial(self._own_loads, kind, members, offer))

    def _own_loads(self, kind: CollectiveType, members: IntArray, offer: Offer) -> OwnLoads:
        parts = []
        for arrangement in self.arranged(members):
            routed = [
                route(phase, self.fabric) for phase in self.library.algorithm(offer.algorithm).phases(kind, arrangement)
            ]
            if routed:
                parts.append(
                    (arrangement.groups, own_loads(self.fabric, self.library, offer, routed, arrangement.spans))
                )
        return spread(parts, len(members))

    def require(self, kind: CollectiveType, members: IntArray) -> None:
        """Raise InputError where the library can do nothing in one of the groups [groups, size]."""
        turned = images(members, self._turn) if self._turn else None
        for arrangement in self.arranged(members if turned is None else members[turned.kept]):
            self._tender(kind, arrangement)

    def arranged(self, members: IntArray) -> tuple[Arrangement, ...]:
        """Groups [groups, size] in order of domains; of each shape apart."""
        found = arrange(members, self.fabric)
        return (
            found
            if self.routing is None
            else tuple(replace(arrangement, routing=self.routing) for arrangement in found)
        )

    def _tender(self, kind: CollectiveType, arrangement: Arrangement) -> "_Tender":
        """What the library offers for groups of this shape."""
        without = self.library.without(self._makes) if arrangement.spans > 1 else frozenset()
        offered = self.library.offers_for(kind)
        able = [offer for offer in offered if self._possible(offer) and offer.works(without)]
        names = dict.fromkeys(offer.algorithm for offer in able)
        phases = {name: found for name in names if (found := self.library.algorithm(name).phases(kind, arrangement))}
        offers = tuple(offer for offer in able if offer.algorithm in phases)
        if not offers:
            by = ", ".join(dict.fromkeys(offer.algorithm for offer in offered))
            where = "in one NVLink domain" if arrangement.spans == 1 else f"over {arrangement.spans} NVLink domains"
            raise InputError(
                f"{self.library.name} cannot do {kind.value} by {by or 'anything'} in groups of {arrangement.size} "
                f"{where} on this cluster"
            )
        return _Tender(offers, phases, arrangement)

    def _cheapest(
        self, tender: "_Tender", routed: Callable[[str], tuple[Routed, ...]], payload: Bytes | None
    ) -> Choices:
        """Cost algorithm by algorithm, from the one that may take the least, until no other can be the fastest."""
        floors = sorted((floor, name) for name, floor in tender.floors(self.library.launch_on(self._makes)).items())
        borne: dict[str, tuple[_Borne, ...]] = {}
        for (_, name), (floor, _) in pairwise([*floors, (math.inf, "")]):
            borne[name] = tuple(self._borne(item) for item in routed(name))
            if math.isinf(floor) or payload is not None:
                choices = self._classified(tender, borne, floor)
                if payload is not None and choose(choices, payload).certain:
                    break
        return choices

    def _possible(self, offer: Offer) -> bool:
        """Whether the fabric's switches can do what the offer needs."""
        if offer.algorithm in COLLNET and not self.library.adds_between(self._makes):
            return False
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
        told = [column for found in borne.values() for item in found for column in item.columns]
        bearing, first = unique_by_columns(told)
        own = {name: [element.of(first) for element in found] for name, found in borne.items()}
        table = np.stack([self._cost(offer, own[offer.algorithm], tender.arrangement) for offer in offers])
        classes, merged = np.unique(table.reshape(-1, len(first)), axis=1, return_inverse=True)
        coefficients = classes.reshape(len(offers), 4, -1)
        shapes = tender.shapes(classes.shape[1])
        least = np.full(classes.shape[1], floor)
        return Choices(offers, coefficients, merged.reshape(-1)[bearing], self.library, least, self._makes, shapes)

    def _cost(self, offer: Offer, borne: Sequence["_Borne"], arrangement: Arrangement) -> FloatArray:
        """[4, groups]: latency, seconds per byte, fill, seconds per byte of NVLink, in groups of this shape."""
        alone = arrangement.spans == arrangement.size
        table = self._orbit_classes.table
        bandwidth = effective_bandwidth(table, self.library, offer, arrangement.spans)
        rates = Rates(bandwidth, table.kind == LINK_KINDS.index(LinkKind.NVLINK))
        total = np.zeros((4, len(borne[0].burden.near)))
        for item in borne:
            latency = phase_latency(item.burden, item.rounds, offer, alone=alone)
            total += time_phase(item.burden, rates, latency, item.stages)
        return total


def _side_by_side(parts: Sequence[Choices], groups: Sequence[IntArray]) -> Choices:
    """The choices of all groups from those of sets; groups: which ones each set is about."""
    if len(parts) == 1:
        return parts[0]
    library = parts[0].library
    offers = tuple(offer for offer in library.offers if any(offer in part.offers for part in parts))
    impossible = np.array([math.inf, 0.0, 0.0, 0.0])
    classes = [part.coefficients.shape[2] for part in parts]
    table = np.broadcast_to(impossible[:, None], (len(offers), 4, sum(classes))).copy()
    group_class = np.empty(sum(map(len, groups)), dtype=np.int64)
    for part, own, end in zip(parts, groups, np.cumsum(classes).tolist(), strict=True):
        first = end - part.coefficients.shape[2]
        table[[offers.index(offer) for offer in part.offers], :, first:end] = part.coefficients
        group_class[own] = first + part.group_class
    floor, shapes = np.concatenate([part.floor for part in parts]), Shapes.beside([part.shapes for part in parts])
    return Choices(offers, table, group_class, library, floor, parts[0].makes, shapes)


@dataclass(frozen=True, slots=True)
class _Tender:
    """What the library offers to groups of one shape: offers, and the phases of their algorithms in its order."""

    offers: tuple[Offer, ...]
    phases: Mapping[str, tuple[Phase, ...]]
    arrangement: Arrangement

    def shapes(self, classes: int) -> Shapes:
        """What so many classes of such groups look like."""
        each = (self.arrangement.size, self.arrangement.rails, self.arrangement.spans)
        return Shapes(*(np.full(classes, number) for number in each))

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
