"""What does a library choose from when its user has told it what to take?

NCCL reads environment variables: algorithms and protocols that it may take, for all collectives or for some; whether
NVLink's switches may add; how many channels there are. What is left is an ordinary library with fewer offers, and the
choice among them is its own. Sends and receives (and what is made of them: scatter, gather, all-to-all) have no
algorithm to choose, so only channels limit them. A program may also do a collective in a way that the library never
chooses by itself (hierarchically, say): then that algorithm is the only one. Or a way is added to those that it chooses
from: one of its own that it does not choose by itself, or one of the user's (`imported`). What rounds and protocols of
the user's cost is not known; they take the constants of the library's ring, or, for what no ring does, of the first
algorithm that it lists.

    algorithm   ring, tree: as here; NVLS and NVLSTree: `in_network`, inside one domain and across several; PAT:
                `pat`; CollNetDirect, CollNetChain and NVLS with CollNet: `collnet`, where CollNet is on
    channels    of messages inside an NVLink domain (`Channels`). Rings and trees go at the rate of their links, however
                many channels there are.

Reference: NVIDIA/nccl, ncclTuningCostModelInit and parseList in src/tuning/cost_model.cc (src/graph/tuning.cc before):
where a list names nothing that can do a collective, NCCL fails ("no algorithm/protocol available"), and so does the
model; ncclTopoComputeP2pChannels in src/graph/paths.cc: messages have at most as many channels as collectives.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from clustersim.collectives.collnet import COLLNET
from clustersim.collectives.library import Channels, Library, Offer
from clustersim.collectives.phase import Algorithm
from clustersim.program.task import CollectiveType

CHOSEN: Final = (
    CollectiveType.ALL_REDUCE,
    CollectiveType.ALL_GATHER,
    CollectiveType.REDUCE_SCATTER,
    CollectiveType.BROADCAST,
    CollectiveType.REDUCE,
)
"""Collectives with several algorithms, which NCCL's lists are about."""
MESSAGES: Final = frozenset({CollectiveType.SEND_RECV, CollectiveType.SHIFT, CollectiveType.ALL_TO_ALL})
"""Collectives that channels limit."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on a number of channels, None: none. least, most: of collectives; messages_*: of messages alone."""

    least: int | None = None
    most: int | None = None
    messages_least: int | None = None
    messages_most: int | None = None

    def of(self, channels: Channels) -> Channels:
        """The channels of messages within the bounds, as a power of two."""
        own = _between(channels.all, self.least, self.most)
        count = _between(min(own, self.messages_most or own), self.messages_least, None)
        return replace(channels, all=1 << (count - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Switches:
    """What a user told the library; what is not there is its own choice.

    algorithms, protocols: those that it may take, by collective; limits: of channels; forced: an algorithm by
    collective, whether the library chooses it by itself or not; added: to its choice, likewise; own: those of them that
    are the user's; collnet: the network's switches may add; words: how the user said it.
    """

    algorithms: Mapping[CollectiveType, frozenset[str]] = field(default_factory=dict)
    protocols: Mapping[CollectiveType, frozenset[str]] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    forced: Mapping[CollectiveType, str] = field(default_factory=dict)
    added: Mapping[CollectiveType, tuple[str, ...]] = field(default_factory=dict)
    own: Mapping[str, Algorithm] = field(default_factory=dict)
    collnet: bool = False
    words: str = ""

    @property
    def bound(self) -> frozenset[CollectiveType]:
        """Collectives that may not be done as the library would by itself."""
        limited = MESSAGES if self.limits != Limits() else frozenset()
        added = frozenset({CollectiveType.ALL_REDUCE}) if self.collnet else frozenset()
        return frozenset({*self.algorithms, *self.protocols, *self.forced, *self.added, *limited, *added})

    def narrowed(self, library: Library) -> Library:
        """The library with what is left of its offers and channels; itself where nothing is said."""
        if not self.bound:
            return library
        return replace(
            library,
            name=f"{library.name} with {self.words}",
            offers=tuple(left for offer in (*library.offers, *self._owned(library)) for left in self._left(offer)),
            own=self.own,
            channels=None if library.channels is None else self.limits.of(library.channels),
        )

    def _owned(self, library: Library) -> Iterator[Offer]:
        """Offers of the user's algorithms, with the constants of the library's."""
        named = [*self.forced.items(), *((kind, name) for kind, names in self.added.items() for name in names)]
        for kind, name in ((kind, name) for kind, name in named if name in self.own):
            able = [offer for offer in library.offers if kind in offer.collectives]
            like = "ring" if "ring" in library.able(kind) else able[0].algorithm
            for offer in (offer for offer in able if offer.algorithm == like):
                yield replace(offer, algorithm=name, collectives=frozenset({kind}))

    def _left(self, offer: Offer) -> Iterator[Offer]:
        """What is left of an offer: for collectives that are forced to its algorithm or have it added, and others."""
        name, free = offer.algorithm, [kind for kind in offer.collectives if kind not in self.forced]
        added = frozenset(kind for kind in free if name in self.added.get(kind, ()) and self._works(kind, offer))
        others = frozenset(kind for kind in free if kind not in added and self._allows(kind, offer))
        told = added.union(kind for kind in offer.collectives if self.forced.get(kind) == name)
        if told:
            yield replace(offer, collectives=told, default=True)
        if others:
            yield replace(offer, collectives=others, default=offer.default or (self.collnet and name in COLLNET))

    def _allows(self, kind: CollectiveType, offer: Offer) -> bool:
        algorithms = self.algorithms.get(kind)
        return (algorithms is None or offer.algorithm in algorithms) and self._works(kind, offer)

    def _works(self, kind: CollectiveType, offer: Offer) -> bool:
        protocols = self.protocols.get(kind)
        return protocols is None or offer.protocol in protocols


def _between(number: int, least: int | None, most: int | None) -> int:
    return max(min(number, most or number), least or 1)
