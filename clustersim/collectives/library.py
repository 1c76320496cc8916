"""What does a communication library offer, and how close does it come to the links' rates?

A library offers algorithms in protocols. A protocol trades bandwidth for latency: LL stores a flag beside every four
bytes, LL128 beside every 120, Simple synchronises once per chunk. Each offer has a start-up time, a time per dependent
round by medium, and the share of the links' bandwidth that it leaves. Links reach a share of their nominal
bandwidth that depends on their kind and, for NVLink, on the generation, which the bandwidth of a GPU's port tells.

The constants of NCCL are those of its own cost model (ncclTopoTuneModel), by which it chooses too.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from clustersim import shipped
from clustersim.collectives.aggregated_trees import AggregatedTrees
from clustersim.collectives.hierarchical import Hierarchical
from clustersim.collectives.in_network import InNetwork
from clustersim.collectives.pairwise import Pairwise
from clustersim.collectives.phase import Algorithm
from clustersim.collectives.ring import Ring
from clustersim.collectives.star import Star
from clustersim.collectives.tree import Tree
from clustersim.errors import InputError, nearest
from clustersim.program.task import Collective
from clustersim.units import Bytes, BytesPerSecond, Dimension, Seconds, parse_quantity

ALGORITHMS: Final[Mapping[str, Algorithm]] = {
    "ring": Ring(),
    "tree": Tree(),
    "aggregated_trees": AggregatedTrees(),
    "in_network": InNetwork(),
    "hierarchical": Hierarchical(),
    "pairwise": Pairwise(),
    "star": Star(),
}


class Medium(Enum):
    """Over what a message goes."""

    NVLINK = "nvlink"
    PCIE = "pcie"
    NETWORK = "network"


@dataclass(frozen=True, slots=True)
class Generation:
    """A generation of NVLink (or xGMI). bandwidth: of a GPU's port, nominal, by which it is recognised.

    efficiency: share of it that a collective reaches. in_network: share of that which the adding switch reaches, None
    if it cannot add. low_latency: rate that the LL protocol cannot exceed in groups of one, two, and more domains.
    launch: of a collective, None if the library's own holds. channel: rate of one of a message's channels, None if
    unknown.
    """

    name: str
    bandwidth: BytesPerSecond
    efficiency: float
    in_network: float | None
    low_latency: tuple[BytesPerSecond, BytesPerSecond, BytesPerSecond] | None
    launch: Seconds | None = None
    channel: BytesPerSecond | None = None


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
    """How pipelining protocols cut payloads: chunks are `fraction` of the payload, at most `chunk` bytes."""

    fraction: float
    chunk: Bytes


@dataclass(frozen=True, slots=True)
class Offer:
    """One algorithm in one protocol.

    startup: once per phase; rounds: per dependent round by medium; alone: per network round if no domain holds a second
    member, so that nothing hides the network; post: to hand one message to the network interface. efficiency: of the
    links' reachable bandwidth. chunked: the pipeline works in large chunks. capped: subject to `low_latency`.
    default: the library chooses it by itself. launched: the library's launch time comes on top of the start-up. most:
    the largest payload that it is used for. channelled: messages travel on the library's `channels`.
    """

    algorithm: str
    protocol: str
    collectives: frozenset[Collective]
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

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.algorithm} {self.protocol}"


@dataclass(frozen=True, slots=True)
class Library:
    """A communication library's constants.

    efficiency: share of nominal bandwidth reached on links other than NVLink. included: route latency that the rounds'
    times contain; what a route has beyond it is added. launch: of a collective, on top of the offers' own times.
    channels: of messages, None where they never limit these. nccl: it follows NCCL's environment variables.
    """

    name: str
    generations: tuple[Generation, ...]
    efficiency: Mapping[Medium, float]
    included: Mapping[Medium, Seconds]
    launch: Seconds
    pipeline: Pipeline
    offers: tuple[Offer, ...]
    published: bool
    channels: Channels | None = None
    nccl: bool = False

    def launch_on(self, port: BytesPerSecond) -> Seconds:
        """Of a collective among GPUs with such NVLink ports; port: 0 without NVLink."""
        own = self.generation(port).launch if port else None
        return self.launch if own is None else own

    def channel_on(self, port: BytesPerSecond) -> BytesPerSecond:
        """Rate of one channel of a message over such NVLink ports; infinite where nothing is known of it."""
        own = self.generation(port).channel if port else None
        return math.inf if own is None else own

    def generation(self, bandwidth: BytesPerSecond) -> Generation:
        """The generation whose port is nearest to this bandwidth."""
        return min(self.generations, key=lambda known: abs(known.bandwidth - bandwidth))

    def offers_for(self, kind: Collective) -> tuple[Offer, ...]:
        """Offers from which the library chooses for one collective; there may be none."""
        return tuple(offer for offer in self.offers if offer.default and kind in offer.collectives)

    def offered(self, kind: Collective, algorithm: str | None = None) -> tuple[Offer, ...]:
        """Offers for one collective: those that the library chooses from, or those of the named algorithm."""
        able = [offer for offer in self.offers if kind in offer.collectives]
        named = tuple(offer for offer in able if offer.algorithm == algorithm)
        chosen = named if algorithm else self.offers_for(kind)
        if chosen:
            return chosen
        if algorithm is None:
            raise InputError(f"library {self.name} has no algorithm for {kind.value}")
        hint = nearest(algorithm, {offer.algorithm for offer in able})
        raise InputError(f"library {self.name} does not offer {algorithm!r} for {kind.value}; {hint}")


def load_library(name: str) -> Library:
    """Read a shipped library (nccl, rccl, gloo) or a file that ends in .yaml, .yml or .json."""
    path = shipped.find("libraries", name)
    content = shipped.read_mapping(path)
    try:
        return _library(path, content)
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{shipped.described(path)}: is not a library file: {error!r} is missing or has the wrong form"
        ) from error
    except (InputError, ValueError) as error:
        raise InputError(f"{shipped.described(path)}: {error}") from error


def _library(path: Path, content: Mapping[str, Any]) -> Library:
    links, pipeline = content["links"], content["pipeline"]
    others = (Medium.PCIE, Medium.NETWORK)
    return Library(
        name=path.stem,
        generations=tuple(_generation(entry) for entry in content["generations"]),
        efficiency={medium: float(links[medium.value]["efficiency"]) for medium in others},
        included={medium: _seconds(links[medium.value]["included"]) for medium in Medium},
        launch=_seconds(content["launch"]),
        pipeline=Pipeline(float(pipeline["fraction"]), parse_quantity(pipeline["chunk"], Dimension.SIZE)),
        offers=tuple(_offer(entry) for entry in content["offers"]),
        published=bool(content["published"]),
        channels=_channels(content["channels"]) if "channels" in content else None,
        nccl=bool(content.get("nccl", False)),
    )


def _channels(entry: Mapping[str, Any]) -> Channels:
    least, most = (parse_quantity(entry[key], Dimension.SIZE) for key in ("least", "most"))
    return Channels(int(entry["all"]), least, most)


def _generation(entry: Mapping[str, Any]) -> Generation:
    ceiling = entry.get("low_latency")
    in_network = entry.get("in_network")
    return Generation(
        name=entry["name"],
        bandwidth=_rate(entry["bandwidth"]),
        efficiency=float(entry["efficiency"]),
        in_network=None if in_network is None else float(in_network),
        low_latency=None if ceiling is None else (_rate(ceiling[0]), _rate(ceiling[1]), _rate(ceiling[2])),
        launch=_seconds(entry["launch"]) if "launch" in entry else None,
        channel=_rate(entry["channel"]) if "channel" in entry else None,
    )


def _offer(entry: Mapping[str, Any]) -> Offer:
    if entry["algorithm"] not in ALGORITHMS:
        raise InputError(f"there is no algorithm {entry['algorithm']!r}; {nearest(entry['algorithm'], ALGORITHMS)}")
    rounds = {medium: _seconds(entry["rounds"][medium.value]) for medium in Medium}
    return Offer(
        algorithm=entry["algorithm"],
        protocol=entry["protocol"],
        collectives=frozenset(Collective(name) for name in entry["collectives"]),
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
    )


def _seconds(text: object) -> Seconds:
    return parse_quantity(text, Dimension.TIME)


def _rate(text: object) -> BytesPerSecond:
    return parse_quantity(text, Dimension.BANDWIDTH)
