"""What does a communication library provide, and how close does it come to the links' rates?

A library provides algorithms in protocols. A protocol trades bandwidth for latency: LL stores a flag with
every four bytes, LL128 with every 120, Simple synchronizes once per chunk. Each variant (algorithm and
protocol) has a start-up time, a time per dependent step by medium, and a share of the links' bandwidth that
it reaches. Links reach a share of their nominal bandwidth that depends on their technology: the NVLink
generation, the network between nodes. On machines with several technologies each link has its own rate;
constants of a collective as a whole (launch time, p2p channels, whether switches reduce, available protocols)
are the worst of all technologies on the machine.

NCCL's constants are those of its own cost model (ncclTopoTuneModel), by which it chooses too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final, TypeVar

import numpy as np

from clustersim.collectives.chunking import ChunkSizeSteps
from clustersim.collectives.collnet import CollNetChainAlgorithm, CollNetDirectAlgorithm, CollNetNvlsAlgorithm
from clustersim.collectives.hierarchical import HierarchicalAlgorithm
from clustersim.collectives.hierarchical_dispatch import HierarchicalDispatch
from clustersim.collectives.linear import LinearAlgorithm
from clustersim.collectives.nvls import NvlsAlgorithm
from clustersim.collectives.pairwise import PairwiseAlgorithm
from clustersim.collectives.pat import PatAlgorithm
from clustersim.collectives.phase import CollectiveAlgorithm
from clustersim.collectives.ring import RingAlgorithm
from clustersim.collectives.tree import TreeAlgorithm
from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.errors import InputError
from clustersim.common.units import Bytes, BytesPerSecond, Seconds
from clustersim.hardware.link_technology import TECHNOLOGIES, LinkTechnology
from clustersim.hardware.topology import LINK_KINDS, NETWORK_KINDS, LinkKind, LinkTable
from clustersim.program.task import CollectiveType

ALGORITHMS: Final[Mapping[str, CollectiveAlgorithm]] = {
    "ring": RingAlgorithm(),
    "tree": TreeAlgorithm(),
    "pat": PatAlgorithm(),
    "collnet_chain": CollNetChainAlgorithm(),
    "collnet_direct": CollNetDirectAlgorithm(),
    "collnet_nvls": CollNetNvlsAlgorithm(),
    "nvls": NvlsAlgorithm(),
    "hierarchical": HierarchicalAlgorithm(),
    "pairwise": PairwiseAlgorithm(),
    "linear": LinearAlgorithm(),
    "hierarchical_dispatch": HierarchicalDispatch(),
}


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LinkTechnologies:
    """Link technologies of a machine: its NVLink generations and its networks."""

    nvlink_generations: tuple[LinkTechnology, ...]
    networks: tuple[LinkTechnology, ...]

    @classmethod
    def from_links(cls, table: LinkTable) -> "LinkTechnologies":
        """Technologies that occur among the links of a table."""
        nvlink = table.kind == LINK_KINDS.index(LinkKind.NVLINK)
        network = np.isin(table.kind, [LINK_KINDS.index(kind) for kind in NETWORK_KINDS])
        present = (np.unique(table.technology[links]).tolist() for links in (nvlink, network))
        return cls(
            *(tuple(TECHNOLOGIES[technology_id] for technology_id in technology_ids) for technology_ids in present)
        )


class Medium(Enum):
    """Medium of a message's route."""

    NVLINK = "nvlink"
    PCIE = "pcie"
    NETWORK = "network"


@dataclass(frozen=True, slots=True)
class NvlinkConstants:
    """Constants of one NVLink (or xGMI) generation, including the GPUs that have it.

    efficiency: fraction of a port's nominal bandwidth that a collective reaches. nvls: constants of in-switch
    reduction, None if the switch cannot reduce. ll_rate_limits: bytes/s that the LL protocol cannot exceed in
    groups over one, two, and more domains. launch_seconds: of a collective, None: the library's own.
    channel_rate: bytes/s of one p2p channel, None if unknown. bus_bandwidth_limits: by algorithm, maximum bus
    bandwidth over two domains, and over more. channel_ramp: ramp of channel counts, None where channels never
    limit.
    """

    efficiency: float
    nvls: "NvlsConstants | None"
    ll_rate_limits: tuple[BytesPerSecond, BytesPerSecond, BytesPerSecond] | None
    launch_seconds: Seconds | None = None
    channel_rate: BytesPerSecond | None = None
    bus_bandwidth_limits: Mapping[str, tuple[BytesPerSecond, BytesPerSecond]] = field(default_factory=dict)
    channel_ramp: "ChannelRamp | None" = None


@dataclass(frozen=True, slots=True)
class ChannelRamp:
    """Channel ramp of LL rings: one channel for every `bytes_per_channel` of each rank, up to `max_channels`."""

    max_channels: int
    bytes_per_channel: Bytes

    def slowdown(self, payload: Bytes, ranks: IntArray) -> FloatArray:
        """Slowdown of the bandwidth term relative to all channels: [classes]."""
        slowdown: FloatArray = self.max_channels / np.clip(
            payload / (self.bytes_per_channel * ranks), 1.0, self.max_channels
        )
        return slowdown


@dataclass(frozen=True, slots=True)
class NvlsConstants:
    """Constants of in-switch reduction (NVLS).

    bandwidth_share: fraction of the ports' rate at the largest chunk, one domain.

    channels: that feed the switch, in one domain and in several; chunk_overhead_bytes: overhead per chunk, as
    bytes that would be moved in that time.
    """

    bandwidth_share: float
    channels: tuple[int, int]
    chunk_overhead_bytes: Bytes


@dataclass(frozen=True, slots=True)
class NetworkConstants:
    """Constants of a network between nodes.

    efficiency: fraction of a port's nominal bandwidth that a collective reaches; message_latency: seconds of a
    message beyond the library's steps and the links' own latency; unsupported: protocols and algorithms that do
    not work over it, or are disabled; routed_efficiency: fraction where messages are routed tokens, whose sizes
    differ and whose senders are not in step, so that several send to one port at a time (None: as `efficiency`);
    message_seconds: that a process of the host needs for each message of a dispatcher, whichever peer it goes to;
    peer_message_seconds: for each that goes to one peer, where those to others do not wait for it.
    """

    efficiency: float
    message_latency: Seconds
    unsupported: frozenset[str]
    routed_efficiency: float | None = None
    message_seconds: Seconds = 0.0
    peer_message_seconds: Seconds = 0.0

    def for_routed_tokens(self) -> "NetworkConstants":
        """Those of all-to-alls that send routed tokens."""
        return self if self.routed_efficiency is None else replace(self, efficiency=self.routed_efficiency)

    def max_port_rate(self, message_bytes: Bytes, peers: int) -> BytesPerSecond:
        """Bytes/s of a port that sends messages of this size to so many nodes."""
        seconds = max(self.message_seconds, self.peer_message_seconds / max(peers, 1))
        return message_bytes / seconds if seconds else math.inf


@dataclass(frozen=True, slots=True)
class P2pChannelConstants:
    """How many channels (thread blocks) a GPU's p2p messages use inside an NVLink domain.

    A message gets an equal share of `max_channels` among all peers, but no more than one per `bytes_per_channel`
    and at least one; the count is doubled, up to `max_channels`, while a channel would carry more than
    `max_bytes_per_channel`.
    """

    max_channels: int
    bytes_per_channel: Bytes
    max_bytes_per_channel: Bytes

    def channel_count(self, message_bytes: Bytes, ranks: int) -> int:
        """Channel count of one message in a group of `ranks` members."""
        fair_share = max(1, 2 ** int(math.log2(self.max_channels / ranks))) if ranks < self.max_channels else 1
        channels = max(1, min(fair_share, math.ceil(message_bytes / self.bytes_per_channel)))
        while message_bytes > channels * self.max_bytes_per_channel and 2 * channels <= self.max_channels:
            channels *= 2
        return channels


@dataclass(frozen=True, slots=True)
class PipelineChunking:
    """How pipelined protocols chunk a payload: a fraction of it, at most `max_chunk_bytes`.

    intra_domain_fraction: in one domain, where data is forwarded as it arrives; inter_domain_fraction: over
    several domains, where complete chunks wait for the network.
    """

    intra_domain_fraction: float
    inter_domain_fraction: float
    max_chunk_bytes: Bytes

    def chunk_bytes(self, payload: Bytes, domain_count: IntArray) -> FloatArray:
        """Bytes of one chunk, by the number of domains of a group: [classes]."""
        chunk: FloatArray = np.minimum(
            np.where(domain_count > 1, self.inter_domain_fraction, self.intra_domain_fraction) * payload,
            self.max_chunk_bytes,
        )
        return chunk


@dataclass(frozen=True, slots=True)
class SmCopyCost:
    """Cost of copying tokens by an SM: `token_seconds` per token, and its bytes at `rate`.

    chunk_seconds: per chunk of tokens that are handed over at once; chunk_tokens: (maximum number of ranks,
    tokens per chunk) pairs, ascending; larger groups use the last.
    """

    token_seconds: Seconds
    rate: BytesPerSecond
    chunk_seconds: Seconds = 0.0
    chunk_tokens: tuple[tuple[int, int], ...] = ()

    def sm_rate(self, token_bytes: Bytes, ranks: int) -> BytesPerSecond:
        """Bytes/s that one SM copies, with tokens of `token_bytes` between `ranks` ranks."""
        return token_bytes / (
            self.token_seconds + self.chunk_seconds / self.tokens_per_chunk(ranks) + token_bytes / self.rate
        )

    def tokens_per_chunk(self, ranks: int) -> int:
        """Tokens per chunk in a group of `ranks` members."""
        return tokens_by_ranks(self.chunk_tokens, ranks) if self.chunk_tokens else 1


def tokens_by_ranks(pairs: Sequence[tuple[int, int]], ranks: int) -> int:
    """Tokens in a group of `ranks` members, of (maximum number of ranks, tokens) pairs; larger groups use the last."""
    return next((tokens for max_ranks, tokens in pairs if ranks <= max_ranks), pairs[-1][1])


@dataclass(frozen=True, slots=True)
class AlgorithmVariant:
    """One algorithm in one protocol, with its constants.

    startup_seconds: once per phase; step_seconds: per dependent step, by medium; network_only_step_seconds: per
    network step if no domain holds a second member, so that nothing hides the network; post_seconds: to post one
    message to the NIC. efficiency: fraction of the links' reachable bandwidth. is_chunked: pipelined in large
    chunks. is_ll_limited: subject to `ll_rate_limits`. is_default: the library may choose it by itself.
    adds_launch: the library's launch time is added to the start-up. max_payload: the largest payload in bytes
    that it is used for. uses_p2p_channels: limited by the library's `p2p_channels`. pipeline: chunking, where it
    differs from the library's. correction_factors: see `chunking`. chunk_steps: chunk sizes in one domain, in up
    to three, and in more. uses_channel_ramp: subject to `channel_ramp`. sm_copy_cost: of tokens, None where SMs
    do not limit; max_nvlink_rate: bytes/s of a GPU's NVLink ports that follow from it. message_tokens: of a
    dispatcher's messages over the network, by ranks as `chunk_tokens`; message_bytes: that follow from them.
    """

    algorithm: str
    protocol: str
    collectives: frozenset[CollectiveType]
    startup_seconds: Seconds
    step_seconds: Mapping[Medium, Seconds]
    network_only_step_seconds: Seconds
    post_seconds: Seconds
    efficiency: float
    is_chunked: bool
    is_ll_limited: bool
    is_default: bool
    adds_launch: bool
    max_payload: Bytes = math.inf
    uses_p2p_channels: bool = False
    pipeline: PipelineChunking | None = None
    correction_factors: tuple[float, ...] = ()
    chunk_steps: tuple[ChunkSizeSteps, ...] = ()
    uses_channel_ramp: bool = False
    sm_copy_cost: SmCopyCost | None = None
    max_nvlink_rate: BytesPerSecond = math.inf
    message_tokens: tuple[tuple[int, int], ...] = ()
    message_bytes: Bytes = math.inf

    @property
    def name(self) -> str:
        """Label for people."""
        return f"{self.algorithm} {self.protocol}"

    def is_available(self, unsupported: frozenset[str]) -> bool:
        """Whether neither its protocol nor its algorithm is among the unsupported ones."""
        return self.protocol not in unsupported and self.algorithm not in unsupported


@dataclass(frozen=True, slots=True)
class Library:
    """Constants of a communication library.

    nvlink_by_technology, network_by_technology: constants by technology; None is the default for technologies not
    listed. pcie_efficiency: fraction of nominal bandwidth reached on PCIe. included_latency: seconds of route
    latency already contained in the steps' times; only the excess of a route is added. launch_seconds: of a
    collective, on top of the variants' own times. p2p_channels: of messages, None where they never limit.
    follows_nccl_env: honours NCCL's environment variables. sm_count: SMs that its kernels occupy; kernel_time_fraction:
    fraction of a call's time that they run (the rest copies to and from its buffers); custom_algorithms:
    algorithms that a user has added, by name.
    """

    name: str
    nvlink_by_technology: Mapping[LinkTechnology | None, NvlinkConstants]
    network_by_technology: Mapping[LinkTechnology | None, NetworkConstants]
    pcie_efficiency: float
    included_latency: Mapping[Medium, Seconds]
    launch_seconds: Seconds
    pipeline: PipelineChunking
    variants: tuple[AlgorithmVariant, ...]
    published: bool
    p2p_channels: P2pChannelConstants | None = None
    follows_nccl_env: bool = False
    sm_count: int = 0
    kernel_time_fraction: float = 1.0
    custom_algorithms: Mapping[str, CollectiveAlgorithm] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(self.name)  # mappings have no hash; few libraries share a name

    def with_sm_count(self, sm_count: int | None) -> "Library":
        """The library with kernels on `sm_count` SMs; None: the default."""
        return self if sm_count is None else replace(self, sm_count=sm_count)

    def with_token_bytes(self, token_bytes: Bytes, ranks: int, message_tokens: int | None = None) -> "Library":
        """The library for tokens of `token_bytes` between `ranks` ranks.

        NVLink rates are limited by the copy rate of the SMs that the library uses, network ports' by messages.
        message_tokens: tokens of a message, None: the library's default.
        """
        return replace(
            self,
            variants=tuple(
                replace(
                    variant,
                    max_nvlink_rate=self.sm_count * variant.sm_copy_cost.sm_rate(token_bytes, ranks)
                    if variant.sm_copy_cost
                    else math.inf,
                    message_bytes=token_bytes * (message_tokens or tokens_by_ranks(variant.message_tokens, ranks))
                    if variant.message_tokens
                    else math.inf,
                )
                for variant in self.variants
            ),
        )

    def for_routed_tokens(self) -> "Library":
        """The library where its all-to-alls send routed tokens."""
        constants = {
            technology: network.for_routed_tokens() for technology, network in self.network_by_technology.items()
        }
        return self if constants == self.network_by_technology else replace(self, network_by_technology=constants)

    def launch_seconds_on(self, technologies: LinkTechnologies) -> Seconds:
        """Seconds of launching a collective on a machine with these technologies."""
        by_generation = [
            self.nvlink_constants(technology).launch_seconds for technology in technologies.nvlink_generations
        ]
        return max(
            (self.launch_seconds if seconds is None else seconds for seconds in by_generation),
            default=self.launch_seconds,
        )

    def channel_rate_on(self, technologies: LinkTechnologies) -> BytesPerSecond:
        """Bytes/s of one p2p channel on a machine with these technologies; infinite where unknown."""
        rates = (self.nvlink_constants(technology).channel_rate for technology in technologies.nvlink_generations)
        return min((rate for rate in rates if rate is not None), default=math.inf)

    def has_nvls(self, technologies: LinkTechnologies) -> bool:
        """Whether the switches of all NVLink domains can reduce (NVLS)."""
        has_switch_reduction = [
            self.nvlink_constants(technology).nvls is not None for technology in technologies.nvlink_generations
        ]
        return bool(has_switch_reduction) and all(has_switch_reduction)

    def has_sharp(self, technologies: LinkTechnologies) -> bool:
        """Whether the network's switches can reduce (SHARP)."""
        return technologies.networks == (LinkTechnology.INFINIBAND,)

    def unsupported_on(self, technologies: LinkTechnologies) -> frozenset[str]:
        """Protocols and algorithms that are not available between nodes."""
        return frozenset().union(
            *(self.network_constants(technology).unsupported for technology in technologies.networks)
        )

    def nvlink_constants(self, technology: LinkTechnology) -> NvlinkConstants:
        """Constants of an NVLink generation; raise InputError where the library has none."""
        return _select_constants(self.nvlink_by_technology, technology, self.name)

    def network_constants(self, technology: LinkTechnology) -> NetworkConstants:
        """Constants of a network; raise InputError where the library has none."""
        return _select_constants(self.network_by_technology, technology, self.name)

    def variants_for(self, collective: CollectiveType) -> tuple[AlgorithmVariant, ...]:
        """Variants from which the library chooses for one collective; may be empty."""
        return tuple(variant for variant in self.variants if variant.is_default and collective in variant.collectives)

    def algorithms_for(self, collective: CollectiveType) -> frozenset[str]:
        """Algorithms that implement a collective, whether the library chooses them by itself or not."""
        return frozenset(variant.algorithm for variant in self.variants if collective in variant.collectives)

    def algorithm(self, name: str) -> CollectiveAlgorithm:
        """The implementation of an algorithm by its name."""
        return self.custom_algorithms[name] if name in self.custom_algorithms else ALGORITHMS[name]


def _select_constants(by_technology: Mapping[LinkTechnology | None, T], technology: LinkTechnology, library: str) -> T:
    constants = by_technology.get(technology, by_technology.get(None))
    if constants is None:
        names = [listed_technology.value for listed_technology in by_technology if listed_technology]
        raise InputError(f"library {library} has no constants of {technology.value} links; it has {', '.join(names)}")
    return constants
