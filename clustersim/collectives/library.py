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

from clustersim.collectives.chunking import Steps
from clustersim.collectives.collnet import CollNetChain, CollNetDirect, NvlsSharp
from clustersim.collectives.hierarchical import Hierarchical
from clustersim.collectives.hierarchical_dispatch import Forwarded
from clustersim.collectives.linear import Star
from clustersim.collectives.nvls import InNetwork
from clustersim.collectives.pairwise import Pairwise
from clustersim.collectives.pat import AggregatedTrees
from clustersim.collectives.phase import Algorithm
from clustersim.collectives.ring import Ring
from clustersim.collectives.tree import Tree
from clustersim.common import data_files
from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.errors import InputError, nearest
from clustersim.common.units import Bytes, BytesPerSecond, Dimension, Seconds, parse_quantity
from clustersim.hardware.link_technology import GENERATIONS, NETWORKS, TECHNOLOGIES, Technology
from clustersim.hardware.topology import LINK_KINDS, NETWORK_KINDS, LinkKind, LinkTable
from clustersim.program.task import CollectiveType, TokenDispatcher

ALGORITHMS: Final[Mapping[str, Algorithm]] = {
    "ring": Ring(),
    "tree": Tree(),
    "aggregated_trees": AggregatedTrees(),
    "collnet_chain": CollNetChain(),
    "collnet_direct": CollNetDirect(),
    "collnet_nvls": NvlsSharp(),
    "in_network": InNetwork(),
    "hierarchical": Hierarchical(),
    "pairwise": Pairwise(),
    "star": Star(),
    "forwarded": Forwarded(),
}


_STEPS: Final = ("one", "few", "many")  # domains
ANY: Final = "any"  # in files, constants of all makes that are not listed

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Makes:
    """Of what makes a machine's links are: the generations of its NVLink, and its networks."""

    generations: tuple[Technology, ...]
    networks: tuple[Technology, ...]

    @classmethod
    def of(cls, table: LinkTable) -> "Makes":
        """Those among some links."""
        nvlink = table.kind == LINK_KINDS.index(LinkKind.NVLINK)
        network = np.isin(table.kind, [LINK_KINDS.index(kind) for kind in NETWORK_KINDS])
        parts = (np.unique(table.technology[links]).tolist() for links in (nvlink, network))
        return cls(*(tuple(TECHNOLOGIES[make] for make in part) for part in parts))


class Medium(Enum):
    """Over what a message goes."""

    NVLINK = "nvlink"
    PCIE = "pcie"
    NETWORK = "network"


@dataclass(frozen=True, slots=True)
class Generation:
    """Constants of a generation of NVLink (or xGMI), the GPUs that have it among them.

    efficiency: share of a port's nominal bandwidth that a collective reaches. in_network: what the adding switch
    reaches, None if it cannot add. low_latency: rate that the LL protocol cannot exceed in groups of one, two, and more
    domains. launch: of a collective, None if the library's own holds. channel: rate of one of a message's channels,
    None if unknown. between: by algorithm, bus bandwidth that cannot be exceeded over two domains, and over more. ramp:
    of channels, None where they never limit.
    """

    efficiency: float
    in_network: "InNetworkRate | None"
    low_latency: tuple[BytesPerSecond, BytesPerSecond, BytesPerSecond] | None
    launch: Seconds | None = None
    channel: BytesPerSecond | None = None
    between: Mapping[str, tuple[BytesPerSecond, BytesPerSecond]] = field(default_factory=dict)
    ramp: "Ramp | None" = None


@dataclass(frozen=True, slots=True)
class Ramp:
    """Small payloads of LL rings use few channels: one for every `least` bytes of each rank, up to `all`."""

    all: int
    least: Bytes

    def slower(self, payload: Bytes, ranks: IntArray) -> FloatArray:
        """How many times longer bytes take than on all channels: [classes]."""
        times: FloatArray = self.all / np.clip(payload / (self.least * ranks), 1.0, self.all)
        return times


@dataclass(frozen=True, slots=True)
class InNetworkRate:
    """What an adding switch reaches: the share of the ports' rate, at the largest chunk of one domain.

    channels: that feed it, in one domain and in several; handling: what a chunk costs, as bytes that would move
    meanwhile.
    """

    share: float
    channels: tuple[int, int]
    handling: Bytes


@dataclass(frozen=True, slots=True)
class Carrier:
    """Constants of a network between nodes.

    efficiency: share of a port's nominal bandwidth that a collective reaches; latency: of a message beyond the
    library's rounds and the links' own; without: protocols and algorithms that do not work over it, or are switched
    off.
    """

    efficiency: float
    latency: Seconds
    without: frozenset[str]


@dataclass(frozen=True, slots=True)
class Channels:
    """On how many channels (thread blocks) a GPU's messages travel inside an NVLink domain.

    A message has as many as all peers leave it of `all`, but one for every `least` bytes and at least one; twice as
    many, up to all, while a channel would carry more than `most` bytes.
    """

    all: int
    least: Bytes
    most: Bytes

    def of(self, message: Bytes, ranks: int) -> int:
        """Channels of one message in a group of so many ranks."""
        fair = max(1, 2 ** int(math.log2(self.all / ranks))) if ranks < self.all else 1
        channels = max(1, min(fair, math.ceil(message / self.least)))
        while message > channels * self.most and 2 * channels <= self.all:
            channels *= 2
        return channels


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How pipelining protocols cut payloads: chunks are a fraction of the payload, at most `chunk` bytes.

    inside: the fraction in one domain, where pieces are handed on as they come; between: over several, where whole
    chunks wait for the network.
    """

    inside: float
    between: float
    chunk: Bytes

    def of(self, payload: Bytes, spans: IntArray) -> FloatArray:
        """Bytes of one chunk in groups over so many domains: [classes]."""
        cut: FloatArray = np.minimum(np.where(spans > 1, self.between, self.inside) * payload, self.chunk)
        return cut


@dataclass(frozen=True, slots=True)
class Handling:
    """How fast an SM passes rows of tokens on: `row` seconds for each, and its bytes at `rate`.

    chunk: seconds for as many rows as are handed over together; chunks: how many these are, for groups of up to so many
    ranks; larger ones are like the largest.
    """

    row: Seconds
    rate: BytesPerSecond
    chunk: Seconds = 0.0
    chunks: tuple[tuple[int, int], ...] = ()

    def of(self, row: Bytes, ranks: int) -> BytesPerSecond:
        """Rate of one SM with rows of so many bytes, between so many ranks."""
        return row / (self.row + self.chunk / self.together(ranks) + row / self.rate)

    def together(self, ranks: int) -> int:
        """Rows that are handed over at once."""
        fitting = (rows for most, rows in self.chunks if ranks <= most)
        return next(fitting, self.chunks[-1][1] if self.chunks else 1)


@dataclass(frozen=True, slots=True)
class Offer:
    """One algorithm in one protocol.

    startup: once per phase; rounds: per dependent round by medium; alone: per network round if no domain holds a second
    member, so that nothing hides the network; post: to hand one message to the network interface. efficiency: of the
    links' reachable bandwidth. chunked: the pipeline works in large chunks. capped: subject to `low_latency`.
    default: the library chooses it by itself. launched: the library's launch time comes on top of the start-up. most:
    the largest payload that it is used for. channelled: messages travel on the library's `channels`. pipeline: its own,
    where it is not the library's. pace: see `pieces`. steps: of chunks in one domain, in up to three, and in more.
    ramped: subject to `ramp`. handling: of rows of tokens by SMs, None where they are not what limits it; ceiling: rate
    that a GPU's NVLink ports cannot exceed for that.
    """

    algorithm: str
    protocol: str
    collectives: frozenset[CollectiveType]
    startup: Seconds
    rounds: Mapping[Medium, Seconds]
    alone: Seconds
    post: Seconds
    efficiency: float
    chunked: bool
    capped: bool
    default: bool
    launched: bool
    most: Bytes = math.inf
    channelled: bool = False
    pipeline: Pipeline | None = None
    pace: tuple[float, ...] = ()
    steps: tuple[Steps, ...] = ()
    ramped: bool = False
    handling: Handling | None = None
    ceiling: BytesPerSecond = math.inf

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.algorithm} {self.protocol}"

    def works(self, without: frozenset[str]) -> bool:
        """Whether it does without these protocols and algorithms."""
        return self.protocol not in without and self.algorithm not in without


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
    generations: Mapping[Technology | None, Generation]
    networks: Mapping[Technology | None, Carrier]
    efficiency: float
    included: Mapping[Medium, Seconds]
    launch: Seconds
    pipeline: Pipeline
    offers: tuple[Offer, ...]
    published: bool
    channels: Channels | None = None
    nccl: bool = False
    sms: int = 0
    kernels: float = 1.0
    own: Mapping[str, Algorithm] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(self.name)  # mappings have no hash; there are few libraries of one name

    def taking(self, sms: int | None) -> "Library":
        """The same with kernels on so many multiprocessors; None: as many as usual."""
        return self if sms is None else replace(self, sms=sms)

    def passing(self, row: Bytes, ranks: int) -> "Library":
        """The same with rows of so many bytes between so many ranks: as fast as its SMs pass them on."""
        offers = tuple(
            replace(offer, ceiling=self.sms * offer.handling.of(row, ranks)) if offer.handling else offer
            for offer in self.offers
        )
        return replace(self, offers=offers)

    def launch_on(self, makes: Makes) -> Seconds:
        """Of a collective on such a machine."""
        own = [self.generation(generation).launch for generation in makes.generations]
        return max((self.launch if item is None else item for item in own), default=self.launch)

    def channel_on(self, makes: Makes) -> BytesPerSecond:
        """Rate of one channel of a message on such a machine; infinite where nothing is known of it."""
        rates = (self.generation(generation).channel for generation in makes.generations)
        return min((rate for rate in rates if rate is not None), default=math.inf)

    def adds_on(self, makes: Makes) -> bool:
        """Whether the switches of such a machine's NVLink domains can add."""
        able = [self.generation(generation).in_network is not None for generation in makes.generations]
        return bool(able) and all(able)

    def adds_between(self, makes: Makes) -> bool:
        """Whether the network's switches of such a machine can add (SHARP)."""
        return makes.networks == (Technology.INFINIBAND,)

    def without(self, makes: Makes) -> frozenset[str]:
        """Protocols and algorithms that are not to be had between the nodes of such a machine."""
        return frozenset().union(*(self.network(network).without for network in makes.networks))

    def generation(self, technology: Technology) -> Generation:
        """The constants of a generation; raise InputError where the library has none."""
        return _of(self.generations, technology, self.name)

    def network(self, technology: Technology) -> Carrier:
        """The constants of a network; raise InputError where the library has none."""
        return _of(self.networks, technology, self.name)

    def offers_for(self, kind: CollectiveType) -> tuple[Offer, ...]:
        """Offers from which the library chooses for one collective; there may be none."""
        return tuple(offer for offer in self.offers if offer.default and kind in offer.collectives)

    def able(self, kind: CollectiveType) -> frozenset[str]:
        """Algorithms of offers that do a collective, chosen by the library itself or not."""
        return frozenset(offer.algorithm for offer in self.offers if kind in offer.collectives)

    def algorithm(self, name: str) -> Algorithm:
        """The algorithm of an offer."""
        return self.own[name] if name in self.own else ALGORITHMS[name]


def _of(known: Mapping[Technology | None, T], technology: Technology, library: str) -> T:
    found = known.get(technology, known.get(None))
    if found is None:
        names = [item.value for item in known if item]
        raise InputError(f"library {library} has no constants of {technology.value} links; it has {', '.join(names)}")
    return found


def load_library(name: str) -> Library:
    """Read a shipped library (nccl, rccl, gloo) or a file that ends in .yaml, .yml or .json."""
    return _load(data_files.find("libraries", name))


def load_dispatcher(dispatcher: TokenDispatcher) -> Library:
    """Read the constants of kernels that send tokens to experts; raise InputError if there are none of a dispatcher."""
    return _load(data_files.find("dispatchers", dispatcher.value))


def _load(path: Path) -> Library:
    return _parsed(path, data_files.read_text(path))


@lru_cache(maxsize=16)
def _parsed(path: Path, text: str) -> Library:
    """A library as its file says it is now: every simulation asks for some, which mostly stay the same."""
    content = data_files.mapping_of(path, text)
    try:
        return _library(path, content)
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{data_files.described(path)}: is not a library file: {error!r} is missing or has the wrong form"
        ) from error
    except (InputError, ValueError) as error:
        raise InputError(f"{data_files.described(path)}: {error}") from error


def _library(path: Path, content: Mapping[str, Any]) -> Library:
    links = content["links"]
    return Library(
        name=path.stem,
        generations={_make(name, GENERATIONS): _generation(entry) for name, entry in content["generations"].items()},
        networks={_make(name, NETWORKS): _carrier(entry) for name, entry in content["networks"].items()},
        efficiency=float(links["pcie"]["efficiency"]),
        included={medium: _seconds(links[medium.value]["included"]) for medium in Medium},
        launch=_seconds(content["launch"]),
        pipeline=_pipeline(content["pipeline"]),
        offers=tuple(_offer(entry) for entry in content["offers"]),
        published=bool(content["published"]),
        channels=_channels(content["channels"]) if "channels" in content else None,
        nccl=bool(content.get("nccl", False)),
        sms=int(content.get("sms", 0)),
        kernels=float(content.get("kernels", 1.0)),
    )


def _channels(entry: Mapping[str, Any]) -> Channels:
    least, most = (parse_quantity(entry[key], Dimension.SIZE) for key in ("least", "most"))
    return Channels(int(entry["all"]), least, most)


def _make(name: str, known: Mapping[str, Technology]) -> Technology | None:
    """Which make constants are of; None: of any that is not listed."""
    if name not in (*known, ANY):
        raise InputError(f"there are no links of make {name!r}; {nearest(name, (*known, ANY))}")
    return known.get(name)


def _carrier(entry: Mapping[str, Any]) -> Carrier:
    latency = _seconds(entry["latency"]) if "latency" in entry else 0.0
    return Carrier(float(entry["efficiency"]), latency, frozenset(entry.get("without", ())))


def _generation(entry: Mapping[str, Any]) -> Generation:
    ceiling = entry.get("low_latency")
    in_network = entry.get("in_network")
    return Generation(
        efficiency=float(entry["efficiency"]),
        in_network=None if in_network is None else _in_network(in_network),
        low_latency=None if ceiling is None else (_rate(ceiling[0]), _rate(ceiling[1]), _rate(ceiling[2])),
        launch=_seconds(entry["launch"]) if "launch" in entry else None,
        channel=_rate(entry["channel"]) if "channel" in entry else None,
        between={name: (_rate(two), _rate(more)) for name, (two, more) in entry.get("between", {}).items()},
        ramp=_ramp(entry["ramp"]) if "ramp" in entry else None,
    )


def _ramp(entry: Mapping[str, Any]) -> Ramp:
    return Ramp(int(entry["all"]), parse_quantity(entry["least"], Dimension.SIZE))


def _in_network(entry: Mapping[str, Any]) -> InNetworkRate:
    one, several = entry["channels"]
    return InNetworkRate(
        float(entry["share"]), (int(one), int(several)), parse_quantity(entry["handling"], Dimension.SIZE)
    )


def _offer(entry: Mapping[str, Any]) -> Offer:
    if entry["algorithm"] not in ALGORITHMS:
        raise InputError(f"there is no algorithm {entry['algorithm']!r}; {nearest(entry['algorithm'], ALGORITHMS)}")
    rounds = {medium: _seconds(entry["rounds"][medium.value]) for medium in Medium}
    return Offer(
        algorithm=entry["algorithm"],
        protocol=entry["protocol"],
        collectives=frozenset(CollectiveType(name) for name in entry["collectives"]),
        startup=_seconds(entry["startup"]),
        rounds=rounds,
        alone=_seconds(entry["rounds"]["alone"]) if "alone" in entry["rounds"] else rounds[Medium.NETWORK],
        post=_seconds(entry["post"]),
        efficiency=float(entry["efficiency"]),
        chunked=bool(entry.get("chunked", False)),
        capped=bool(entry.get("capped", False)),
        default=bool(entry.get("default", True)),
        launched=bool(entry.get("launched", True)),
        most=parse_quantity(entry["most"], Dimension.SIZE) if "most" in entry else math.inf,
        channelled=bool(entry.get("channelled", False)),
        pipeline=_pipeline(entry["pipeline"]) if "pipeline" in entry else None,
        pace=tuple(float(item) for item in entry.get("pace", ())),
        steps=tuple(_steps(entry["steps"][name]) for name in _STEPS) if "steps" in entry else (),
        ramped=bool(entry.get("ramped", False)),
        handling=_handling(entry["handling"]) if "handling" in entry else None,
    )


def _handling(entry: Mapping[str, Any]) -> Handling:
    chunks = tuple((int(most), int(rows)) for most, rows in entry.get("chunks", ()))
    return Handling(_seconds(entry["row"]), _rate(entry["rate"]), _seconds(entry.get("chunk", "0 us")), chunks)


def _pipeline(entry: Mapping[str, Any]) -> Pipeline:
    chunk = parse_quantity(entry["chunk"], Dimension.SIZE)
    return Pipeline(float(entry["inside"]), float(entry["between"]), chunk)


def _steps(entry: Sequence[Any]) -> Steps:
    largest, *smaller = entry
    sizes = tuple((parse_quantity(size, Dimension.SIZE), float(times)) for size, times in smaller)
    return Steps(parse_quantity(largest, Dimension.SIZE), sizes)


def _seconds(text: object) -> Seconds:
    return parse_quantity(text, Dimension.TIME)


def _rate(text: object) -> BytesPerSecond:
    return parse_quantity(text, Dimension.BANDWIDTH)
