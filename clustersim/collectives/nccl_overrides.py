"""What may a library choose from when its user overrides it?

NCCL reads environment variables: algorithms and protocols that it may use, for all collectives or for some;
whether NVLink's switches may reduce; how many channels there are. What remains is an ordinary library with
fewer variants, from which it chooses as usual. Sends and receives (and what is built of them: scatter,
gather, all-to-all) have no algorithm to choose, so only channels limit them. A program may also force an
algorithm that the library never chooses by itself (hierarchical, say): then it is the only one. Or an
algorithm is added to the candidates: one of the library's that it does not choose by itself, or one of the
user's (`custom_algorithm`). Latency steps and protocols of the user's algorithms have unknown costs; they use
the constants of the library's ring or, where no ring does the collective, of the first algorithm that it
lists.

    algorithm   ring, tree: as here; NVLS and NVLSTree: `nvls`, inside one domain and across several;
                PAT: `pat`; CollNetDirect, CollNetChain and NVLS with CollNet: `collnet`, if
                CollNet is on
    channels    of p2p messages inside an NVLink domain (`P2pChannelConstants`). Rings and trees run at the
                rate of their links, whatever the number of channels.

Reference: NVIDIA/nccl, ncclTuningCostModelInit and parseList in src/tuning/cost_model.cc (src/graph/tuning.cc
before): where a list names nothing that can do a collective, NCCL fails ("no algorithm/protocol available"),
and so does the model; ncclTopoComputeP2pChannels in src/graph/paths.cc: messages have at most as many
channels as collectives.
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
"""Collectives with several algorithms, to which NCCL_ALGO and NCCL_PROTO apply."""
P2P_COLLECTIVES: Final = frozenset({CollectiveType.SEND_RECV, CollectiveType.SHIFT, CollectiveType.ALL_TO_ALL})
"""Collectives that p2p channels limit."""


@dataclass(frozen=True, slots=True)
class ChannelLimits:
    """Bounds on the number of channels, None: unbounded.

    min_channels, max_channels: of collectives; *_p2p_*: of p2p only.
    """

    min_channels: int | None = None
    max_channels: int | None = None
    min_p2p_channels: int | None = None
    max_p2p_channels: int | None = None

    def clamp_channels(self, channels: P2pChannelConstants) -> P2pChannelConstants:
        """P2p channels within the bounds, rounded up to a power of two."""
        collective_channels = _clamp(channels.max_channels, self.min_channels, self.max_channels)
        count = _clamp(
            min(collective_channels, self.max_p2p_channels or collective_channels), self.min_p2p_channels, None
        )
        return replace(channels, max_channels=1 << (count - 1).bit_length())


@dataclass(frozen=True, slots=True)
class NcclOverrides:
    """Overrides of a library's choice; whatever is absent is left to the library.

    algorithms, protocols: those that it may use, by collective; channel_limits: bounds on channels; forced:
    algorithm by collective, whether the library chooses it by itself or not; added: additional candidates,
    likewise; custom_algorithms: those of them that are the user's; collnet_enabled: the network's switches may
    reduce; description: as the user wrote it.
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
        """Collectives for which the library's default choice is constrained."""
        limited = P2P_COLLECTIVES if self.channel_limits != ChannelLimits() else frozenset()
        added = frozenset({CollectiveType.ALL_REDUCE}) if self.collnet_enabled else frozenset()
        return frozenset({*self.algorithms, *self.protocols, *self.forced, *self.added, *limited, *added})

    def apply_to(self, library: Library) -> Library:
        """The library with the remaining variants and channels; unchanged where nothing is overridden."""
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
        """Variants of the user's algorithms, with the constants of the library's."""
        requested = [*self.forced.items(), *((kind, name) for kind, names in self.added.items() for name in names)]
        for kind, name in ((kind, name) for kind, name in requested if name in self.custom_algorithms):
            supporting = [variant for variant in library.variants if kind in variant.collectives]
            reference = "ring" if "ring" in library.algorithms_for(kind) else supporting[0].algorithm
            for variant in (variant for variant in supporting if variant.algorithm == reference):
                yield replace(variant, algorithm=name, collectives=frozenset({kind}))

    def _allowed_variants(self, variant: AlgorithmVariant) -> Iterator[AlgorithmVariant]:
        """What remains of a variant: for collectives that force or add its algorithm, and for the others."""
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
