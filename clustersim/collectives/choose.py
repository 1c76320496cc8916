"""Which algorithm does a library take?

The fastest that it offers for this collective, these groups and this payload, by the model's own estimate, as NCCL's
tuner does; or the one that the user named.
"""

from dataclasses import dataclass

import numpy as np

from clustersim.collectives.library import ALGORITHMS, Library, Offer
from clustersim.collectives.loads import OwnLoads, own_loads
from clustersim.collectives.phase import Arrangement, FloatArray, IntArray, arrange
from clustersim.collectives.transfer import (
    Routed,
    effective_bandwidth,
    needs_switch,
    phase_latency,
    route,
    time_phase,
)
from clustersim.errors import InputError
from clustersim.hardware.topology import LINK_KINDS, Fabric, LinkKind
from clustersim.program.task import Collective
from clustersim.units import Bytes


@dataclass(frozen=True, slots=True)
class Choices:
    """What each offer would cost all groups of one role, for any payload.

    coefficients: [offers, 3, classes] latency (s), seconds per byte, fill (s/byte of chunk); groups with equal
    coefficients are one class; group_class: [groups].
    """

    offers: tuple[Offer, ...]
    coefficients: FloatArray
    group_class: IntArray
    library: Library


@dataclass(frozen=True, slots=True)
class Choice:
    """The fastest offer in each group, and in the slowest one.

    seconds: [groups]; idle: [groups] the part of them in which no bytes move; taken: [groups] number of the offer, of
    which chunk: [offers] is the bytes of one chunk; offer: what the slowest group takes.
    """

    seconds: FloatArray
    idle: FloatArray
    taken: IntArray
    chunk: FloatArray
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
        offer=choices.offers[int(best[worst])],
        slowest=int((groups == worst).argmax()),
    )


def _chunk(offer: Offer, library: Library, payload: Bytes) -> Bytes:
    """Bytes of one chunk; none for protocols that hand on every word."""
    return min(library.pipeline.fraction * payload, library.pipeline.chunk) if offer.chunked else 0.0


@dataclass(frozen=True, slots=True)
class Surveyor:
    """Costs a library's offers on one fabric."""

    fabric: Fabric
    library: Library

    def survey(self, kind: Collective, members: IntArray, algorithm: str | None = None) -> Choices:
        """Cost every offer for the groups [groups, size]; `algorithm` restricts the offers to one algorithm."""
        arrangement = arrange(members, self.fabric)
        able = [offer for offer in self.library.offered(kind, algorithm) if self._possible(offer)]
        phases = {name: ALGORITHMS[name].phases(kind, arrangement) for name in {offer.algorithm for offer in able}}
        routed = {name: tuple(route(phase, self.fabric) for phase in listed) for name, listed in phases.items()}
        offers = tuple(offer for offer in able if routed[offer.algorithm])
        if not offers:
            what = f"{kind.value} by {algorithm}" if algorithm else kind.value
            raise InputError(f"{self.library.name} cannot do {what} in groups of {members.shape[1]} on this cluster")
        return self._classified(offers, [self._cost(offer, routed[offer.algorithm], arrangement) for offer in offers])

    def own_loads(self, kind: Collective, members: IntArray, offer: Offer) -> OwnLoads:
        """What an offer asks of links in each of the groups [groups, size] by itself."""
        arrangement = arrange(members, self.fabric)
        phases = ALGORITHMS[offer.algorithm].phases(kind, arrangement)
        routed = [route(phase, self.fabric) for phase in phases]
        return own_loads(self.fabric, self.library, offer, routed, int(arrangement.spans.max()))

    def _possible(self, offer: Offer) -> bool:
        """Whether the fabric's switches can do what the offer needs."""
        if not needs_switch(offer):
            return True
        ports = self.fabric.links.bandwidth[self.fabric.links.kind == LINK_KINDS.index(LinkKind.NVLINK)]
        return ports.size > 0 and self.library.generation(float(ports.max())).in_network is not None

    def _cost(self, offer: Offer, routed: tuple[Routed, ...], arrangement: Arrangement) -> FloatArray:
        """[3, groups]: latency, seconds per byte, fill, summed over the phases."""
        spans = int(arrangement.spans.max())
        bandwidth = effective_bandwidth(self.fabric, self.library, offer, spans)
        total = np.zeros((3, len(arrangement.members)))
        for each in routed:
            latency = phase_latency(each, self.library, offer, arrangement)
            total += time_phase(each, bandwidth, latency)
        return total

    def _classified(self, offers: tuple[Offer, ...], costs: list[FloatArray]) -> Choices:
        """Merge groups with equal coefficients."""
        table = np.stack(costs)
        if (table == table[:, :, :1]).all():
            return Choices(offers, table[:, :, :1], np.zeros(table.shape[2], np.int64), self.library)
        classes, group_class = np.unique(table.reshape(-1, table.shape[2]), axis=1, return_inverse=True)
        return Choices(offers, classes.reshape(len(offers), 3, -1), group_class.ravel(), self.library)
