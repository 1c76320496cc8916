"""What may a scenario file say about what is wrong with the cluster?

Sections of `disturbances`, and of `cluster.mixed`, which picks nodes in the same words. GPUs and nodes are numbers,
ranges ("8-15") or lists of both.
"""

import re
from typing import Annotated, ClassVar, Self

from pydantic import BeforeValidator, Field, model_validator

from clustersim.cost.jitter import Distribution, Jitter
from clustersim.errors import shown
from clustersim.hardware.cluster import MOST_GPUS
from clustersim.hardware.disturbance import SHARED_TIERS, DeadLink, LinkChange, SlowLink
from clustersim.hardware.topology import LinkKind
from clustersim.scenario.section import Section, member, mistake, share

LEAST = 0.001  # of a speed or bandwidth: what is slower is dead
MOST_SPEED = 10.0
MOST_BANDWIDTH = 100.0
MOST_LOAD = 0.99
MOST_JITTER = 10.0
MOST_SEED = 2**63 - 1
MOST_LOST = 2**20
_RANGE = re.compile(r"\s*(\d{1,9})\s*-\s*(\d{1,9})\s*")


def _numbers(value: object) -> tuple[int, ...]:
    """Numbers, ranges or a list of both as numbers in order, each once."""
    found = [number for item in (value if isinstance(value, list) else [value]) for number in _range(item)]
    if not found:
        raise mistake("is empty; write a number, a range such as 8-15, or a list of them")
    return tuple(dict.fromkeys(found))


def _range(item: object) -> range:
    if isinstance(item, int) and not isinstance(item, bool) and 0 <= item < MOST_GPUS:
        return range(item, item + 1)
    match = _RANGE.fullmatch(item) if isinstance(item, str) else None
    if match is None or not int(match[1]) <= int(match[2]) < MOST_GPUS:
        raise mistake(f"{shown(item)} is neither a number from 0 up nor a range such as 8-15")
    return range(int(match[1]), int(match[2]) + 1)


Load = Annotated[float, share(0.0, MOST_LOAD)]
Numbers = Annotated[tuple[int, ...], BeforeValidator(_numbers)]


def listed(value: object) -> object:
    """One entry may stand alone."""
    return [value] if isinstance(value, dict) else value


class MixedSection(Section):
    """An entry of `cluster.mixed`: nodes with another accelerator."""

    node: Numbers = ()
    nodes: Numbers = ()
    accelerator: str

    @model_validator(mode="after")
    def _some_nodes(self) -> Self:
        if not self.node and not self.nodes:
            raise mistake("names no node; write node: 3, or nodes: 0-7")
        return self

    @property
    def chosen(self) -> tuple[int, ...]:
        """The nodes that are meant, each once."""
        return tuple(dict.fromkeys((*self.node, *self.nodes)))


class GpusSection(Section):
    """Some GPUs, named one by one or by their nodes."""

    gpu: Numbers = ()
    gpus: Numbers = ()
    node: Numbers = ()
    nodes: Numbers = ()

    @model_validator(mode="after")
    def _some_gpus(self) -> Self:
        if not (self.gpu or self.gpus or self.node or self.nodes):
            raise mistake("names no GPU; write gpu: 17, gpus: 8-15, node: 3 or nodes: [3, 4]")
        return self


class SlowSection(GpusSection):
    """An entry of `disturbances.slow`."""

    speed: Annotated[float, share(LEAST, MOST_SPEED)]


class NicSection(GpusSection):
    """An entry of `disturbances.nics`."""

    bandwidth: Annotated[float, share(LEAST, MOST_BANDWIDTH)]


def _lost(value: object) -> object:
    """`true` is one link; `false` is no disturbance."""
    if value is False:
        raise mistake("false is what links are anyway; leave the entry out")
    return 1 if value is True else value


class LinkSection(Section):
    """An entry of `disturbances.links`."""

    between: list[str] | None = None
    source: str | None = Field(None, alias="from")
    target: str | None = Field(None, alias="to")
    bandwidth: Annotated[float, share(LEAST, MOST_BANDWIDTH, "; write dead: true for a link that is gone")] | None = (
        None
    )
    dead: Annotated[int, Field(ge=1, le=MOST_LOST), BeforeValidator(_lost)] | None = None

    @model_validator(mode="after")
    def _one_place_and_one_change(self) -> Self:
        if self.between is None and (self.source is None or self.target is None):
            raise mistake("names no link; write between: [leaf0.0, spine0.0], or from and to for one direction")
        if self.between is not None and (self.source, self.target) != (None, None):
            raise mistake("has both between and from or to; keep one")
        if self.between is not None and len(self.between) != 2:
            raise mistake(f"between is {shown(self.between)}, not the two ends of a link such as [leaf0.0, spine0.0]")
        if (self.bandwidth is None) == (self.dead is None):
            raise mistake("needs bandwidth (the part that is left) or dead: true, and not both")
        return self

    def change(self) -> LinkChange:
        """The change as the inside knows it."""
        what = SlowLink(self.bandwidth) if self.bandwidth is not None else DeadLink(self.dead or 1)
        source, target = self.between or (str(self.source), str(self.target))
        return LinkChange(source, target, what, both_ways=self.between is not None)


class JitterSection(Section):
    """`disturbances.jitter`: how much kernels vary from one run to the next."""

    short: ClassVar[str | None] = "std"
    std: Annotated[float, share(0.0, MOST_JITTER)]
    distribution: Annotated[Distribution, member(Distribution)] = Distribution.NORMAL
    seed: Annotated[int, Field(ge=0, le=MOST_SEED)] = 0

    def jitter(self) -> Jitter | None:
        """The jitter as the inside knows it; None where kernels do not vary."""
        return Jitter(self.std, self.distribution, self.seed) if self.std else None


class BackgroundSection(Section):
    """`disturbances.background`: the part of each link of a tier that others use."""

    nic: Load = 0.0
    leaf: Load = 0.0
    spine: Load = 0.0

    def loads(self) -> dict[LinkKind, float]:
        """Load by kind of link, where there is any."""
        loads = {kind: getattr(self, kind.value) for kind in SHARED_TIERS}
        return {kind: load for kind, load in loads.items() if load}


class DisturbancesSection(Section):
    """`disturbances`: what is wrong with the cluster."""

    slow: Annotated[list[SlowSection], BeforeValidator(listed)] = Field([])
    jitter: JitterSection | None = None
    nics: Annotated[list[NicSection], BeforeValidator(listed)] = Field([])
    links: Annotated[list[LinkSection], BeforeValidator(listed)] = Field([])
    background: BackgroundSection = BackgroundSection()
