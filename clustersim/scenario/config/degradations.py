"""What may a scenario file say about what is wrong with the cluster?

Sections of `disturbances`, and of `cluster.mixed`, which picks nodes in the same words.
"""

from math import inf
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from clustersim.common.errors import shown
from clustersim.cost.background_traffic import Traffic
from clustersim.cost.jitter import Distribution, Jitter
from clustersim.hardware.degradation import SHARED_TIERS, DeadLink, LinkChange, SlowLink
from clustersim.hardware.topology import LinkKind
from clustersim.program.task import CollectiveType
from clustersim.scenario.config.co_scheduled import JobSection
from clustersim.scenario.config_reader import Duration, Name, Section, Size, duration, member, mistake, reads, share
from clustersim.scenario.id_ranges import MOST_SEED, Ranges

LEAST = 0.001  # of a speed or bandwidth: what is slower is dead
MOST_SPEED = 10.0
MOST_BANDWIDTH = 1.0
MOST_LOAD = 0.99
MOST_JITTER = 10.0
MOST_LOST = 2**20
_SENT = tuple(collective_type for collective_type in CollectiveType if not collective_type.is_token_routing)
_ENDS = "[leaf0.0, spine0.0]"


Load = Annotated[float, share(0.0, MOST_LOAD)]


def listed(value: object) -> list[Any]:
    """One entry may stand alone."""
    return value if isinstance(value, list) else [value]


class MixedSection(Section):
    """An entry of `cluster.mixed`: nodes with another accelerator."""

    example: ClassVar[str] = "{nodes: 0-7, accelerator: h200-sxm-141gb}"
    node: Ranges = ()
    """a node or several; left out: none"""
    nodes: Ranges = ()
    """the same word in the plural; left out: none"""
    accelerator: Name = Field(examples=["h200-sxm-141gb"])
    """what they have, a file of topologies/accelerators"""

    @model_validator(mode="after")
    def _some_nodes(self) -> Self:
        if not self.node and not self.nodes:
            raise mistake("names no node; write node: 3, or nodes: 0-7")
        return self


class GpusSection(Section):
    """Some GPUs, named one by one or by their nodes."""

    gpu: Ranges = ()
    """GPUs by number; left out: none"""
    gpus: Ranges = ()
    """the same word in the plural; left out: none"""
    node: Ranges = ()
    """all GPUs of these nodes; left out: none"""
    nodes: Ranges = ()
    """the same word in the plural; left out: none"""

    @model_validator(mode="after")
    def _some_gpus(self) -> Self:
        if not (self.gpu or self.gpus or self.node or self.nodes):
            raise mistake("names no GPU; write gpu: 17, gpus: 8-15, node: 3 or nodes: [3, 4]")
        return self


class SlowSection(GpusSection):
    """An entry of `disturbances.slow`."""

    example: ClassVar[str] = "{gpu: 17, speed: 0.9}"
    speed: Annotated[float, share(LEAST, MOST_SPEED)] = Field(examples=[0.9])
    """at which their kernels run"""


Bandwidth = Annotated[float | None, share(LEAST, MOST_BANDWIDTH, "; write dead: true for one that is gone")]


def _lost(value: object) -> object:
    """`true` is one link; `false` is no disturbance."""
    if value is False:
        raise mistake("false is what links are anyway; leave the entry out")
    return 1 if value is True else value


def _gone(value: object) -> object:
    """A NIC is one, so it is dead or not."""
    if _lost(value) != 1:
        raise mistake(f"{shown(value)} is not true; write dead: true")
    return True


class NicSection(GpusSection):
    """An entry of `disturbances.nics`."""

    example: ClassVar[str] = "{gpu: 12, bandwidth: 50 %}"
    bandwidth: Bandwidth = None
    """what is left of it, both directions; left out: all"""
    dead: Annotated[bool, reads(_gone, "true")] = False
    """the NIC is gone, and its GPUs send by a neighbour's"""

    @model_validator(mode="after")
    def _one_change(self) -> Self:
        if (self.bandwidth is None) != self.dead:
            raise mistake("needs bandwidth (the part that is left) or dead: true, and not both")
        return self

    @property
    def left(self) -> float:
        """The part of the bandwidth that is left."""
        return self.bandwidth or 0.0


def _pair(value: object) -> object:
    if not (isinstance(value, list) and len(value) == 2 and all(isinstance(end, str) and end.strip() for end in value)):
        raise mistake(f"{shown(value)} is not a pair of ends such as {_ENDS}")
    return value


def _during(value: object) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise mistake(f"{shown(value)} is not a pair of times such as [10 ms, 40 ms]")
    first, last = map(duration, value)
    if first >= last:
        raise mistake(f"{shown(value)} ends before it begins; write the earlier time first")
    return first, last


class LinkSection(Section):
    """An entry of `disturbances.links`."""

    example: ClassVar[str] = f"{{between: {_ENDS}, bandwidth: 50 %}}"
    between: Annotated[list[str] | None, reads(_pair, "a pair of names", _ENDS)] = None
    """the ends of a link, both directions; left out: from and to"""
    source: Name | None = Field(None, alias="from")
    """the end that sends, for one direction; left out: none"""
    target: Name | None = Field(None, alias="to")
    """the end that receives; left out: none"""
    bandwidth: Bandwidth = None
    """what is left of it; left out: all"""
    dead: Annotated[int, Field(ge=1, le=MOST_LOST), reads(_lost, f"true, or 1 to {MOST_LOST:,}")] | None = None
    """true, or how many links of a bundle are gone; left out: none"""
    during: Annotated[tuple[float, float] | None, reads(_during, "a pair of times", "[10 ms, 40 ms]")] = None
    """from when to when of the run it has that bandwidth; left out: at all times"""

    @model_validator(mode="after")
    def _one_place_and_one_change(self) -> Self:
        if self.between is None and (self.source is None or self.target is None):
            raise mistake(f"names no link; write between: {_ENDS}, or from and to for one direction")
        if self.between is not None and (self.source, self.target) != (None, None):
            raise mistake("has both between and from or to; keep one")
        if (self.bandwidth is None) == (self.dead is None):
            raise mistake("needs bandwidth (the part that is left) or dead: true, and not both")
        if self.during is not None and self.dead is not None:
            raise mistake("has dead and during, but routes do not change while a step runs; write bandwidth: 0.1 %")
        return self

    def change(self) -> LinkChange:
        """The change as the inside knows it."""
        what = SlowLink(self.bandwidth) if self.bandwidth is not None else DeadLink(self.dead or 1)
        source, target = self.between or (str(self.source), str(self.target))
        return LinkChange(source, target, what, both_ways=self.between is not None, during=self.during)


class JitterSection(Section):
    """`disturbances.jitter`: how much kernels vary from one run to the next."""

    short: ClassVar[str | None] = "std"
    std: Annotated[float, share(0.0, MOST_JITTER)] = Field(examples=["1 %"])
    """standard deviation of every kernel's time over its mean"""
    distribution: Annotated[Distribution, member(Distribution)] = Distribution.NORMAL
    """of these times; exponential only adds time"""
    seed: Annotated[int, Field(ge=0, le=MOST_SEED)] = 0
    """another seed draws other times"""

    def jitter(self) -> Jitter | None:
        """The jitter as the inside knows it; None where kernels do not vary."""
        return Jitter(self.std, self.distribution, self.seed) if self.std else None


class BackgroundSection(Section):
    """`disturbances.background`: the part of each link of a tier that others use."""

    nic: Load = 0.0
    """of links between NICs and leaves"""
    leaf: Load = 0.0
    """of links between leaf and spine"""
    spine: Load = 0.0
    """of links between spine and core"""

    def loads(self) -> dict[LinkKind, float]:
        """Load by kind of link, where there is any."""
        loads = {kind: getattr(self, kind.value) for kind in SHARED_TIERS}
        return {kind: load for kind, load in loads.items() if load}


class TrafficSection(Section):
    """An entry of `disturbances.traffic`: what others send on the network, see [Traffic](scenario.md#traffic)."""

    example: ClassVar[str] = "{gpus: [8, 16], bytes: 64 MB, every: 5 ms}"
    gpus: Ranges = Field(examples=["[8, 16]"])
    """among which of the machine's GPUs, the root or sender first"""
    collective: Annotated[CollectiveType, member(CollectiveType, *_SENT)] = CollectiveType.SEND_RECV
    """what it is; a message needs two GPUs"""
    payload: Size = Field(alias="bytes", examples=["64 MB"])
    """its payload, as nccl-tests count it"""
    start: Duration = 0.0
    """when it first begins"""
    every: Duration | None = None
    """after how long it begins again, or when it has ended if that is later; left out: it does not"""
    until: Duration | None = None
    """when it no longer begins again; left out: with the end of the run"""

    @model_validator(mode="after")
    def _of_one_kind(self) -> Self:
        count = sum(map(len, self.gpus))
        if count < 2 or (self.collective is CollectiveType.SEND_RECV and count != 2):
            raise mistake(f"names {count:,} GPU{'s' * (count != 1)}; a message needs two, a collective two or more")
        if self.every == 0.0:
            raise mistake("every: 0 would never end; leave it out for once")
        return self

    def traffic(self, gpus: tuple[int, ...]) -> Traffic:
        """As the inside knows it."""
        every, until = (inf if item is None else item for item in (self.every, self.until))
        return Traffic(gpus, self.collective, self.payload, self.start, every, until)


class DisturbancesSection(Section):
    """`disturbances`: what is wrong with the cluster."""

    slow: Annotated[list[SlowSection], reads(listed, "one or a list", of=list[SlowSection] | SlowSection)] = Field([])
    """GPUs whose kernels run at a part of their speed; left out: none"""
    jitter: JitterSection | None = None
    """variation of every kernel of every rank; left out: none"""
    nics: Annotated[list[NicSection], reads(listed, "one or a list", of=list[NicSection] | NicSection)] = Field([])
    """NICs that serve some GPUs; left out: none"""
    links: Annotated[list[LinkSection], reads(listed, "one or a list", of=list[LinkSection] | LinkSection)] = Field([])
    """links by the names of their ends, see [Disturbances](scenario.md#disturbances); left out: none"""
    traffic: Annotated[
        list[TrafficSection], reads(listed, "one or a list", of=list[TrafficSection] | TrafficSection)
    ] = Field([])
    """what others send meanwhile; left out: nothing"""
    jobs: Annotated[list[JobSection], reads(listed, "one or a list", of=list[JobSection] | JobSection)] = Field([])
    """other jobs that train meanwhile on other GPUs; left out: none"""
    background: BackgroundSection = BackgroundSection()
    """the part of each link of a tier that others use"""
