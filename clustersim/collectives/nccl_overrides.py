"""What does a library choose from when its user has told it what to take?

NCCL reads environment variables: algorithms and protocols that it may take, for all collectives or for some; whether
NVLink's switches may add; how many channels there are. What is left is an ordinary library with fewer offers, and the
choice among them is its own. Sends and receives (and what is made of them: scatter, gather, all-to-all) have no
algorithm to choose, so only channels limit them. A program may also do a collective in a way that the library never
chooses by itself (hierarchically, say): then that algorithm is the only one. Or a way is added to those that it chooses
from: one of its own that it does not choose by itself, or one of the user's (`imported`). What rounds and protocols of
the user's cost is not known; they take the constants of the library's ring, or, for what no ring does, of the first
algorithm that it lists.

    algorithm   ring, tree: as here; NVLS and NVLSTree: `nvls`, inside one domain and across several; PAT:
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

from clustersim.collectives.collnet import COLLNET_ALGORITHMS
from clustersim.collectives.library import AlgorithmVariant, Library, P2pChannelConstants
from clustersim.collectives.phase import CollectiveAlgorithm
from clustersim.program.task import CollectiveType

TUNED_COLLECTIVES: Final = (
    CollectiveType.ALL_REDUCE,
    CollectiveType.ALL_GATHER,
    CollectiveType.REDUCE_SCATTER,
    CollectiveType.BROADCAST,
    CollectiveType.REDUCE,
)
"""Collectives with several algorithms, which NCCL's lists are about."""
P2P_COLLECTIVES: Final = frozenset({CollectiveType.SEND_RECV, CollectiveType.SHIFT, CollectiveType.ALL_TO_ALL})
"""Collectives that channels limit."""


@dataclass(frozen=True, slots=True)
class ChannelLimits:
    """Bounds on a number of channels, None: none. least, most: of collectives; messages_*: of messages alone."""

    min_channels: int | None = None
    max_channels: int | None = None
    min_p2p_channels: int | None = None
    max_p2p_channels: int | None = None

    def clamp_channels(self, channels: P2pChannelConstants) -> P2pChannelConstants:
        """The channels of messages within the bounds, as a power of two."""
        collective_channels = _clamp(channels.max_channels, self.min_channels, self.max_channels)
        count = _clamp(
            min(collective_channels, self.max_p2p_channels or collective_channels), self.min_p2p_channels, None
        )
        return replace(channels, max_channels=1 << (count - 1).bit_length())


@dataclass(frozen=True, slots=True)
class NcclOverrides:
    """What a user told the library; what is not there is its own choice.

    algorithms, protocols: those that it may take, by collective; limits: of channels; forced: an algorithm by
    collective, whether the library chooses it by itself or not; added: to its choice, likewise; own: those of them that
    are the user's; collnet: the network's switches may add; words: how the user said it.
    """

    algorithms: Mapping[CollectiveType, frozenset[str]] = field(default_factory=dict)
    protocols: Mapping[CollectiveType, frozenset[str]] = field(default_factory=dict)
    channel_limits: ChannelLimits = field(default_factory=ChannelLimits)
    forced: Mapping[CollectiveType, str] = field(default_factory=dict)
    added: Mapping[CollectiveType, tuple[str, ...]] = field(default_factory=dict)
    custom_algorithms: Mapping[str, CollectiveAlgorithm] = field(default_factory=dict)
    collnet_enabled: bool = False
    description: str = ""

    @property
    def constrained_collectives(self) -> frozenset[CollectiveType]:
        """Collectives that may not be done as the library would by itself."""
        limited = P2P_COLLECTIVES if self.channel_limits != ChannelLimits() else frozenset()
        added = frozenset({CollectiveType.ALL_REDUCE}) if self.collnet_enabled else frozenset()
        return frozenset({*self.algorithms, *self.protocols, *self.forced, *self.added, *limited, *added})

    def apply_to(self, library: Library) -> Library:
        """The library with what is left of its offers and channels; itself where nothing is said."""
        if not self.constrained_collectives:
            return library
        return replace(
            library,
            name=f"{library.name} with {self.description}",
            variants=tuple(
                allowed
                for variant in (*library.variants, *self._custom_variants(library))
                for allowed in self._allowed_variants(variant)
            ),
            custom_algorithms=self.custom_algorithms,
            p2p_channels=None
            if library.p2p_channels is None
            else self.channel_limits.clamp_channels(library.p2p_channels),
        )

    def _custom_variants(self, library: Library) -> Iterator[AlgorithmVariant]:
        """Offers of the user's algorithms, with the constants of the library's."""
        requested = [*self.forced.items(), *((kind, name) for kind, names in self.added.items() for name in names)]
        for kind, name in ((kind, name) for kind, name in requested if name in self.custom_algorithms):
            supporting = [variant for variant in library.variants if kind in variant.collectives]
            reference = "ring" if "ring" in library.algorithms_for(kind) else supporting[0].algorithm
            for variant in (variant for variant in supporting if variant.algorithm == reference):
                yield replace(variant, algorithm=name, collectives=frozenset({kind}))

    def _allowed_variants(self, variant: AlgorithmVariant) -> Iterator[AlgorithmVariant]:
        """What is left of an offer: for collectives that are forced to its algorithm or have it added, and others."""
        name, unforced = variant.algorithm, [kind for kind in variant.collectives if kind not in self.forced]
        added = frozenset(
            kind for kind in unforced if name in self.added.get(kind, ()) and self._allows_protocol(kind, variant)
        )
        others = frozenset(kind for kind in unforced if kind not in added and self._is_allowed(kind, variant))
        requested = added.union(kind for kind in variant.collectives if self.forced.get(kind) == name)
        if requested:
            yield replace(variant, collectives=requested, is_default=True)
        if others:
            yield replace(
                variant,
                collectives=others,
                is_default=variant.is_default or (self.collnet_enabled and name in COLLNET_ALGORITHMS),
            )

    def _is_allowed(self, collective: CollectiveType, variant: AlgorithmVariant) -> bool:
        algorithms = self.algorithms.get(collective)
        return (algorithms is None or variant.algorithm in algorithms) and self._allows_protocol(collective, variant)

    def _allows_protocol(self, collective: CollectiveType, variant: AlgorithmVariant) -> bool:
        protocols = self.protocols.get(collective)
        return protocols is None or variant.protocol in protocols


def _clamp(count: int, lower: int | None, upper: int | None) -> int:
    return max(min(count, upper or count), lower or 1)
