"""What does a communication library offer, and how close does it come to the links' rates?

A library offers algorithms in protocols. A protocol trades bandwidth for latency: LL stores a flag beside every four
bytes, LL128 beside every 120, Simple synchronises once per chunk. Each offer has a start-up time, a time per dependent
round by medium, and the share of the links' bandwidth that it leaves. Links reach a share of their nominal bandwidth
that depends on their make: the generation of NVLink, the network between nodes. Where links of several makes are mixed,
each has the rate of its own, and what concerns a collective as a whole (its launch, the channels of messages, whether
switches add, which protocols there are) is the worst of all that the machine has.

The constants of NCCL are those of its own cost model (ncclTopoTuneModel), by which it chooses too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeVar

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
from clustersim.common import data_files
from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.errors import InputError, suggest_nearest
from clustersim.common.units import Bytes, BytesPerSecond, Dimension, Seconds, parse_quantity
from clustersim.hardware.link_technology import (
    NETWORK_TECHNOLOGIES,
    SCALE_UP_TECHNOLOGIES,
    TECHNOLOGIES,
    LinkTechnology,
)
from clustersim.hardware.topology import LINK_KINDS, NETWORK_KINDS, LinkKind, LinkTable
from clustersim.program.task import CollectiveType, TokenDispatcher

ALGORITHMS: Final[Mapping[str, CollectiveAlgorithm]] = {
    "ring": RingAlgorithm(),
    "tree": TreeAlgorithm(),
    "aggregated_trees": PatAlgorithm(),
    "collnet_chain": CollNetChainAlgorithm(),
    "collnet_direct": CollNetDirectAlgorithm(),
    "collnet_nvls": CollNetNvlsAlgorithm(),
    "in_network": NvlsAlgorithm(),
    "hierarchical": HierarchicalAlgorithm(),
    "pairwise": PairwiseAlgorithm(),
    "star": LinearAlgorithm(),
    "forwarded": HierarchicalDispatch(),
}


_CHUNK_STEP_KEYS: Final = ("one", "few", "many")  # domains
ANY_TECHNOLOGY: Final = "any"  # in files, constants of all makes that are not listed

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LinkTechnologies:
    """Of what makes a machine's links are: the generations of its NVLink, and its networks."""

    nvlink_generations: tuple[LinkTechnology, ...]
    networks: tuple[LinkTechnology, ...]

    @classmethod
    def from_links(cls, table: LinkTable) -> "LinkTechnologies":
        """Those among some links."""
        nvlink = table.kind == LINK_KINDS.index(LinkKind.NVLINK)
        network = np.isin(table.kind, [LINK_KINDS.index(kind) for kind in NETWORK_KINDS])
        present = (np.unique(table.technology[links]).tolist() for links in (nvlink, network))
        return cls(
            *(tuple(TECHNOLOGIES[technology_id] for technology_id in technology_ids) for technology_ids in present)
        )


class Medium(Enum):
    """Over what a message goes."""

    NVLINK = "nvlink"
    PCIE = "pcie"
    NETWORK = "network"


@dataclass(frozen=True, slots=True)
class NvlinkConstants:
    """Constants of a generation of NVLink (or xGMI), the GPUs that have it among them.

    efficiency: share of a port's nominal bandwidth that a collective reaches. in_network: what the adding switch
    reaches, None if it cannot add. low_latency: rate that the LL protocol cannot exceed in groups of one, two, and more
    domains. launch: of a collective, None if the library's own holds. channel: rate of one of a message's channels,
    None if unknown. between: by algorithm, bus bandwidth that cannot be exceeded over two domains, and over more. ramp:
    of channels, None where they never limit.
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
    """Small payloads of LL rings use few channels: one for every `least` bytes of each rank, up to `all`."""

    max_channels: int
    bytes_per_channel: Bytes

    def slowdown(self, payload: Bytes, ranks: IntArray) -> FloatArray:
        """How many times longer bytes take than on all channels: [classes]."""
        slowdown: FloatArray = self.max_channels / np.clip(
            payload / (self.bytes_per_channel * ranks), 1.0, self.max_channels
        )
        return slowdown


@dataclass(frozen=True, slots=True)
class NvlsConstants:
    """What an adding switch reaches: the share of the ports' rate, at the largest chunk of one domain.

    channels: that feed it, in one domain and in several; handling: what a chunk costs, as bytes that would move
    meanwhile.
    """

    bandwidth_share: float
    channels: tuple[int, int]
    chunk_overhead_bytes: Bytes


@dataclass(frozen=True, slots=True)
class NetworkConstants:
    """Constants of a network between nodes.

    efficiency: share of a port's nominal bandwidth that a collective reaches; latency: of a message beyond the
    library's rounds and the links' own; without: protocols and algorithms that do not work over it, or are switched
    off.
    """

    efficiency: float
    message_latency: Seconds
    unsupported: frozenset[str]


@dataclass(frozen=True, slots=True)
class P2pChannelConstants:
    """On how many channels (thread blocks) a GPU's messages travel inside an NVLink domain.

    A message has as many as all peers leave it of `all`, but one for every `least` bytes and at least one; twice as
    many, up to all, while a channel would carry more than `most` bytes.
    """

    max_channels: int
    bytes_per_channel: Bytes
    max_bytes_per_channel: Bytes

    def channel_count(self, message_bytes: Bytes, ranks: int) -> int:
        """Channels of one message in a group of so many ranks."""
        fair_share = max(1, 2 ** int(math.log2(self.max_channels / ranks))) if ranks < self.max_channels else 1
        channels = max(1, min(fair_share, math.ceil(message_bytes / self.bytes_per_channel)))
        while message_bytes > channels * self.max_bytes_per_channel and 2 * channels <= self.max_channels:
            channels *= 2
        return channels


@dataclass(frozen=True, slots=True)
class PipelineChunking:
    """How pipelining protocols cut payloads: chunks are a fraction of the payload, at most `chunk` bytes.

    inside: the fraction in one domain, where pieces are handed on as they come; between: over several, where whole
    chunks wait for the network.
    """

    intra_domain_fraction: float
    inter_domain_fraction: float
    max_chunk_bytes: Bytes

    def chunk_bytes(self, payload: Bytes, domain_count: IntArray) -> FloatArray:
        """Bytes of one chunk in groups over so many domains: [classes]."""
        chunk: FloatArray = np.minimum(
            np.where(domain_count > 1, self.inter_domain_fraction, self.intra_domain_fraction) * payload,
            self.max_chunk_bytes,
        )
        return chunk


@dataclass(frozen=True, slots=True)
class SmCopyCost:
    """How fast an SM passes rows of tokens on: `row` seconds for each, and its bytes at `rate`.

    chunk: seconds for as many rows as are handed over together; chunks: how many these are, for groups of up to so many
    ranks; larger ones are like the largest.
    """

    token_seconds: Seconds
    rate: BytesPerSecond
    chunk_seconds: Seconds = 0.0
    chunk_tokens: tuple[tuple[int, int], ...] = ()

    def sm_rate(self, token_bytes: Bytes, ranks: int) -> BytesPerSecond:
        """Rate of one SM with rows of so many bytes, between so many ranks."""
        return token_bytes / (
            self.token_seconds + self.chunk_seconds / self.tokens_per_chunk(ranks) + token_bytes / self.rate
        )

    def tokens_per_chunk(self, ranks: int) -> int:
        """Rows that are handed over at once."""
        chunk_sizes = (tokens for max_ranks, tokens in self.chunk_tokens if ranks <= max_ranks)
        return next(chunk_sizes, self.chunk_tokens[-1][1] if self.chunk_tokens else 1)


@dataclass(frozen=True, slots=True)
class AlgorithmVariant:
    """One algorithm in one protocol.

    startup: once per phase; rounds: per dependent round by medium; alone: per network round if no domain holds a second
    member, so that nothing hides the network; post: to hand one message to the network interface. efficiency: of the
    links' reachable bandwidth. chunked: the pipeline works in large chunks. capped: subject to `ll_rate_limits`.
    default: the library chooses it by itself. launched: the library's launch time comes on top of the start-up. most:
    the largest payload that it is used for. channelled: messages travel on the library's `channels`. pipeline: its own,
    where it is not the library's. pace: see `pieces`. steps: of chunks in one domain, in up to three, and in more.
    ramped: subject to `channel_ramp`. handling: of rows of tokens by SMs, None where they are not what limits it; ceiling: rate
    that a GPU's NVLink ports cannot exceed for that.
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

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.algorithm} {self.protocol}"

    def is_available(self, unsupported: frozenset[str]) -> bool:
        """Whether it does without these protocols and algorithms."""
        return self.protocol not in unsupported and self.algorithm not in unsupported


@dataclass(frozen=True, slots=True)
class Library:
    """A communication library's constants.

    generations, networks: by make; None stands for any that is not listed. efficiency: share of nominal bandwidth
    reached on PCIe. included: route latency that the rounds' times contain; what a route has beyond it is added.
    launch: of a collective, on top of the offers' own times. channels: of messages, None where they never limit these.
    nccl: it follows NCCL's environment variables. sms: multiprocessors that its kernels take; kernels: part of a call's
    time that they run (the rest copies to and from its buffers); own: algorithms that a user has added, by name.
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
    kernel_share: float = 1.0
    custom_algorithms: Mapping[str, CollectiveAlgorithm] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(self.name)  # mappings have no hash; there are few libraries of one name

    def with_sm_count(self, sm_count: int | None) -> "Library":
        """The same with kernels on so many multiprocessors; None: as many as usual."""
        return self if sm_count is None else replace(self, sm_count=sm_count)

    def with_token_bytes(self, token_bytes: Bytes, ranks: int) -> "Library":
        """The same with rows of so many bytes between so many ranks: as fast as its SMs pass them on."""
        variants = tuple(
            replace(variant, max_nvlink_rate=self.sm_count * variant.sm_copy_cost.sm_rate(token_bytes, ranks))
            if variant.sm_copy_cost
            else variant
            for variant in self.variants
        )
        return replace(self, variants=variants)

    def launch_seconds_on(self, technologies: LinkTechnologies) -> Seconds:
        """Of a collective on such a machine."""
        by_generation = [
            self.nvlink_constants(technology).launch_seconds for technology in technologies.nvlink_generations
        ]
        return max(
            (self.launch_seconds if seconds is None else seconds for seconds in by_generation),
            default=self.launch_seconds,
        )

    def channel_rate_on(self, technologies: LinkTechnologies) -> BytesPerSecond:
        """Rate of one channel of a message on such a machine; infinite where nothing is known of it."""
        rates = (self.nvlink_constants(technology).channel_rate for technology in technologies.nvlink_generations)
        return min((rate for rate in rates if rate is not None), default=math.inf)

    def has_nvls(self, technologies: LinkTechnologies) -> bool:
        """Whether the switches of such a machine's NVLink domains can add."""
        has_switch_reduction = [
            self.nvlink_constants(technology).nvls is not None for technology in technologies.nvlink_generations
        ]
        return bool(has_switch_reduction) and all(has_switch_reduction)

    def has_sharp(self, technologies: LinkTechnologies) -> bool:
        """Whether the network's switches of such a machine can add (SHARP)."""
        return technologies.networks == (LinkTechnology.INFINIBAND,)

    def unsupported_on(self, technologies: LinkTechnologies) -> frozenset[str]:
        """Protocols and algorithms that are not to be had between the nodes of such a machine."""
        return frozenset().union(
            *(self.network_constants(technology).unsupported for technology in technologies.networks)
        )

    def nvlink_constants(self, technology: LinkTechnology) -> NvlinkConstants:
        """The constants of a generation; raise InputError where the library has none."""
        return _select_constants(self.nvlink_by_technology, technology, self.name)

    def network_constants(self, technology: LinkTechnology) -> NetworkConstants:
        """The constants of a network; raise InputError where the library has none."""
        return _select_constants(self.network_by_technology, technology, self.name)

    def variants_for(self, collective: CollectiveType) -> tuple[AlgorithmVariant, ...]:
        """Offers from which the library chooses for one collective; there may be none."""
        return tuple(variant for variant in self.variants if variant.is_default and collective in variant.collectives)

    def algorithms_for(self, collective: CollectiveType) -> frozenset[str]:
        """Algorithms of offers that do a collective, chosen by the library itself or not."""
        return frozenset(variant.algorithm for variant in self.variants if collective in variant.collectives)

    def algorithm(self, name: str) -> CollectiveAlgorithm:
        """The algorithm of an offer."""
        return self.custom_algorithms[name] if name in self.custom_algorithms else ALGORITHMS[name]


def _select_constants(by_technology: Mapping[LinkTechnology | None, T], technology: LinkTechnology, library: str) -> T:
    constants = by_technology.get(technology, by_technology.get(None))
    if constants is None:
        names = [listed_technology.value for listed_technology in by_technology if listed_technology]
        raise InputError(f"library {library} has no constants of {technology.value} links; it has {', '.join(names)}")
    return constants


def load_library(name: str) -> Library:
    """Read a shipped library (nccl, rccl, gloo) or a file that ends in .yaml, .yml or .json."""
    return _load_library_file(data_files.find_file("libraries", name))


def load_dispatcher(dispatcher: TokenDispatcher) -> Library:
    """Read the constants of kernels that send tokens to experts; raise InputError if there are none of a dispatcher."""
    return _load_library_file(data_files.find_file("dispatchers", dispatcher.value))


def _load_library_file(path: Path) -> Library:
    return _parse_library_text(path, data_files.read_text(path))


@lru_cache(maxsize=16)
def _parse_library_text(path: Path, text: str) -> Library:
    """A library as its file says it is now: every simulation asks for some, which mostly stay the same."""
    content = data_files.parse_mapping(path, text)
    try:
        return _build_library(path, content)
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{data_files.display_name(path)}: is not a library file: {error!r} is missing or has the wrong form"
        ) from error
    except (InputError, ValueError) as error:
        raise InputError(f"{data_files.display_name(path)}: {error}") from error


def _build_library(path: Path, content: Mapping[str, Any]) -> Library:
    links = content["links"]
    return Library(
        name=path.stem,
        nvlink_by_technology={
            _read_technology(name, SCALE_UP_TECHNOLOGIES): _read_nvlink(entry)
            for name, entry in content["generations"].items()
        },
        network_by_technology={
            _read_technology(name, NETWORK_TECHNOLOGIES): _read_network(entry)
            for name, entry in content["networks"].items()
        },
        pcie_efficiency=float(links["pcie"]["efficiency"]),
        included_latency={medium: _parse_seconds(links[medium.value]["included"]) for medium in Medium},
        launch_seconds=_parse_seconds(content["launch"]),
        pipeline=_read_pipeline_chunking(content["pipeline"]),
        variants=tuple(_read_variant(entry) for entry in content["offers"]),
        published=bool(content["published"]),
        p2p_channels=_read_p2p_channels(content["channels"]) if "channels" in content else None,
        follows_nccl_env=bool(content.get("nccl", False)),
        sm_count=int(content.get("sms", 0)),
        kernel_share=float(content.get("kernels", 1.0)),
    )


def _read_p2p_channels(entry: Mapping[str, Any]) -> P2pChannelConstants:
    bytes_per_channel, max_bytes = (parse_quantity(entry[key], Dimension.SIZE) for key in ("least", "most"))
    return P2pChannelConstants(int(entry["all"]), bytes_per_channel, max_bytes)


def _read_technology(name: str, technologies: Mapping[str, LinkTechnology]) -> LinkTechnology | None:
    """Which make constants are of; None: of any that is not listed."""
    if name not in (*technologies, ANY_TECHNOLOGY):
        raise InputError(
            f"there are no links of make {name!r}; {suggest_nearest(name, (*technologies, ANY_TECHNOLOGY))}"
        )
    return technologies.get(name)


def _read_network(entry: Mapping[str, Any]) -> NetworkConstants:
    latency = _parse_seconds(entry["latency"]) if "latency" in entry else 0.0
    return NetworkConstants(float(entry["efficiency"]), latency, frozenset(entry.get("without", ())))


def _read_nvlink(entry: Mapping[str, Any]) -> NvlinkConstants:
    ll_limits = entry.get("low_latency")
    in_network = entry.get("in_network")
    return NvlinkConstants(
        efficiency=float(entry["efficiency"]),
        nvls=None if in_network is None else _read_nvls(in_network),
        ll_rate_limits=None
        if ll_limits is None
        else (_parse_rate(ll_limits[0]), _parse_rate(ll_limits[1]), _parse_rate(ll_limits[2])),
        launch_seconds=_parse_seconds(entry["launch"]) if "launch" in entry else None,
        channel_rate=_parse_rate(entry["channel"]) if "channel" in entry else None,
        bus_bandwidth_limits={
            name: (_parse_rate(two_domains), _parse_rate(more_domains))
            for name, (two_domains, more_domains) in entry.get("between", {}).items()
        },
        channel_ramp=_read_channel_ramp(entry["ramp"]) if "ramp" in entry else None,
    )


def _read_channel_ramp(entry: Mapping[str, Any]) -> ChannelRamp:
    return ChannelRamp(int(entry["all"]), parse_quantity(entry["least"], Dimension.SIZE))


def _read_nvls(entry: Mapping[str, Any]) -> NvlsConstants:
    one_domain, several_domains = entry["channels"]
    return NvlsConstants(
        float(entry["share"]),
        (int(one_domain), int(several_domains)),
        parse_quantity(entry["handling"], Dimension.SIZE),
    )


def _read_variant(entry: Mapping[str, Any]) -> AlgorithmVariant:
    if entry["algorithm"] not in ALGORITHMS:
        raise InputError(
            f"there is no algorithm {entry['algorithm']!r}; {suggest_nearest(entry['algorithm'], ALGORITHMS)}"
        )
    step_seconds = {medium: _parse_seconds(entry["rounds"][medium.value]) for medium in Medium}
    return AlgorithmVariant(
        algorithm=entry["algorithm"],
        protocol=entry["protocol"],
        collectives=frozenset(CollectiveType(name) for name in entry["collectives"]),
        startup_seconds=_parse_seconds(entry["startup"]),
        step_seconds=step_seconds,
        network_only_step_seconds=_parse_seconds(entry["rounds"]["alone"])
        if "alone" in entry["rounds"]
        else step_seconds[Medium.NETWORK],
        post_seconds=_parse_seconds(entry["post"]),
        efficiency=float(entry["efficiency"]),
        is_chunked=bool(entry.get("chunked", False)),
        is_ll_limited=bool(entry.get("capped", False)),
        is_default=bool(entry.get("default", True)),
        adds_launch=bool(entry.get("launched", True)),
        max_payload=parse_quantity(entry["most"], Dimension.SIZE) if "most" in entry else math.inf,
        uses_p2p_channels=bool(entry.get("channelled", False)),
        pipeline=_read_pipeline_chunking(entry["pipeline"]) if "pipeline" in entry else None,
        correction_factors=tuple(float(factor) for factor in entry.get("pace", ())),
        chunk_steps=tuple(_read_chunk_steps(entry["steps"][name]) for name in _CHUNK_STEP_KEYS)
        if "steps" in entry
        else (),
        uses_channel_ramp=bool(entry.get("ramped", False)),
        sm_copy_cost=_read_sm_copy_cost(entry["handling"]) if "handling" in entry else None,
    )


def _read_sm_copy_cost(entry: Mapping[str, Any]) -> SmCopyCost:
    chunks = tuple((int(max_ranks), int(tokens)) for max_ranks, tokens in entry.get("chunks", ()))
    return SmCopyCost(
        _parse_seconds(entry["row"]), _parse_rate(entry["rate"]), _parse_seconds(entry.get("chunk", "0 us")), chunks
    )


def _read_pipeline_chunking(entry: Mapping[str, Any]) -> PipelineChunking:
    chunk = parse_quantity(entry["chunk"], Dimension.SIZE)
    return PipelineChunking(float(entry["inside"]), float(entry["between"]), chunk)


def _read_chunk_steps(entry: Sequence[Any]) -> ChunkSizeSteps:
    largest, *smaller = entry
    sizes = tuple((parse_quantity(size, Dimension.SIZE), float(times)) for size, times in smaller)
    return ChunkSizeSteps(parse_quantity(largest, Dimension.SIZE), sizes)


def _parse_seconds(text: object) -> Seconds:
    return parse_quantity(text, Dimension.TIME)


def _parse_rate(text: object) -> BytesPerSecond:
    return parse_quantity(text, Dimension.BANDWIDTH)
