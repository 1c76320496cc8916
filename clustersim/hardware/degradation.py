"""What is wrong with a machine?

GPUs that are slower than others, NICs and links that are slower or dead, and links that others load as well. Parts are
of the healthy machine: a GPU at speed 0.9 takes 1/0.9 of the time, a link at bandwidth 0.5 carries half. Numbers are
the machine's, whichever of its GPUs a job has.

What is slow for a while is not the fabric's matter, which knows no time (`cost.background_traffic`).

Assumptions: a background load leaves the rest of every link of its tier at all times; a link that is dead is dead from
the start, routes are those of a network that has converged. Of a bundle over which traffic is spread, members are lost:
it keeps (k - 1)/k of its k links, and only the last one disconnects.
Reference: Dean and Barroso 2013, "The tail at scale", CACM 56(2); Greenberg et al. 2009, "VL2", SIGCOMM, section 4.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.errors import InputError
from clustersim.common.units import Seconds
from clustersim.hardware.connectivity import islands
from clustersim.hardware.topology import LINK_KINDS, Fabric, LinkKind

SHARED_TIERS: Final = (LinkKind.NIC, LinkKind.LEAF, LinkKind.SPINE)
"""Links that other users of a cluster may load: all that are not inside a node."""


@dataclass(frozen=True, slots=True)
class Slow:
    """GPUs whose kernels run at `speed` of the normal one."""

    gpus: tuple[int, ...]
    speed: float


@dataclass(frozen=True, slots=True)
class SlowNic:
    """The NICs that serve some GPUs have a part of their bandwidth, in both directions; 0: they are dead."""

    gpus: tuple[int, ...]
    bandwidth: float


@dataclass(frozen=True, slots=True)
class SlowLink:
    """A link has a part of its bandwidth."""

    bandwidth: float

    def left(self, members: int) -> float:  # noqa: ARG002 - all members of a bundle alike
        """Part of the bandwidth that is left."""
        return self.bandwidth


@dataclass(frozen=True, slots=True)
class DeadLink:
    """A link is gone, or so many members of a bundle of parallel links."""

    lost: int = 1

    def left(self, members: int) -> float:
        """Part of the bandwidth that is left; raise InputError if the bundle has fewer members."""
        if self.lost > members:
            what = "a single link" if members == 1 else f"a bundle of {members} links"
            raise InputError(f"it is {what}, of which {self.lost} cannot be dead")
        return 1.0 - self.lost / members


@dataclass(frozen=True, slots=True)
class LinkChange:
    """What is wrong with the link between two ends, named as by `Fabric.link`; both_ways: and with its twin.

    during: from when to when (of slow links), None: at all times.
    """

    source: str
    target: str
    what: SlowLink | DeadLink
    both_ways: bool = True
    during: tuple[Seconds, Seconds] | None = None

    def numbers(self, fabric: Fabric) -> list[int]:
        """Link numbers; raise InputError if there is no such link."""
        first = fabric.find(self.source, self.target)
        return [first, fabric.find(self.target, self.source)] if self.both_ways else [first]


@dataclass(frozen=True, slots=True)
class Disturbances:
    """All that is wrong; what several entries say of one GPU or link multiplies. background: load by kind of link."""

    slow: tuple[Slow, ...] = ()
    nics: tuple[SlowNic, ...] = ()
    links: tuple[LinkChange, ...] = ()
    background: Mapping[LinkKind, float] = field(default_factory=dict)

    @property
    def network(self) -> bool:
        """Whether links are at all times not as they should be."""
        lasting = any(link.during is None for link in self.links)
        return bool(self.nics or lasting or any(self.background.values()))

    @property
    def passing(self) -> tuple[LinkChange, ...]:
        """Links that are slow for a while."""
        return tuple(link for link in self.links if link.during is not None)

    def speeds(self, gpus: IntArray) -> FloatArray:
        """Speed of some of the machine's GPUs relative to an undisturbed one: [gpus]."""
        speeds: FloatArray = np.ones(len(gpus))
        for slow in self.slow:
            speeds[np.isin(gpus, slow.gpus)] *= slow.speed
        return speeds


def disturbed(fabric: Fabric, disturbances: Disturbances, used: IntArray | None = None) -> Fabric:
    """The fabric as its disturbances leave it; itself if they leave it alone.

    used: the GPUs that must still reach each other, None: all. Raises InputError, whose sentence starts
    with the entry (`links.0: ...`), for what does not exist and for GPUs that are cut off.
    """
    left = np.ones(len(fabric.links.kind))
    _load(fabric, disturbances.background, left)
    for entry, nic in enumerate(disturbances.nics):
        numbers = fabric.nics(np.array(nic.gpus, np.int64))
        if not len(numbers):
            raise InputError(f"nics.{entry}: {in_ranges(np.array(nic.gpus))} has no NIC in this cluster")
        left[numbers] *= nic.bandwidth
    links = zip(disturbances.links, placed(fabric, disturbances.links), strict=True)
    for entry, (change, found) in enumerate(links):
        with _naming(f"links.{entry}"):
            for number in found if change.during is None else ():
                left[number] *= change.what.left(fabric.members(number))
    if not left.all():
        _refuse_islands(fabric, disturbances, left, np.arange(fabric.gpus) if used is None else np.sort(used))
    return fabric if (left == 1.0).all() else fabric.changed(left)


def _load(fabric: Fabric, background: Mapping[LinkKind, float], left: FloatArray) -> None:
    for kind, load in background.items():
        loaded = fabric.links.kind == LINK_KINDS.index(kind)
        if not loaded.any():
            there = [name.value for name in SHARED_TIERS if (fabric.links.kind == LINK_KINDS.index(name)).any()]
            raise InputError(f"background.{kind.value}: this cluster has no such links; {_there(there)}")
        left[loaded] *= 1.0 - load


def _there(kinds: Sequence[str]) -> str:
    return f"it has {', '.join(kinds)}" if kinds else "it has none beyond its nodes"


def placed(fabric: Fabric, changes: Sequence[LinkChange]) -> list[list[int]]:
    """Numbers of the links of each change; raise InputError, as `disturbed` does, for a link that does not exist."""
    found = []
    for entry, change in enumerate(changes):
        with _naming(f"links.{entry}"):
            found.append(change.numbers(fabric))
    return found


@contextmanager
def _naming(key: str) -> Iterator[None]:
    """Whose entry an error is about."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{key}: {error}") from error


def _refuse_islands(fabric: Fabric, disturbances: Disturbances, left: FloatArray, gpus: IntArray) -> None:
    """Name the first entry after which GPUs are cut off, and which."""
    if islands(fabric.ends, left > 0.0, gpus) is None:
        return
    alive = np.ones(len(left), np.bool_)
    for key, what, numbers in _entries(fabric, disturbances):
        alive[numbers] = left[numbers] > 0.0
        apart = islands(fabric.ends, alive, gpus)
        if apart is not None:
            raise InputError(f"{key}: without {what}, {in_ranges(apart[0])} cannot reach {in_ranges(apart[1])}")


def _entries(fabric: Fabric, disturbances: Disturbances) -> Iterator[tuple[str, str, IntArray]]:
    """Key, name and link numbers of every entry that may name dead links."""
    for entry, nic in enumerate(disturbances.nics):
        gpus = np.array(nic.gpus, np.int64)
        yield f"nics.{entry}", f"the NIC{'s' * (len(gpus) > 1)} of {in_ranges(gpus)}", fabric.nics(gpus)
    for entry, (change, numbers) in enumerate(zip(disturbances.links, placed(fabric, disturbances.links), strict=True)):
        ends = f"between {change.source} and" if change.both_ways else f"from {change.source} to"
        members = fabric.members(numbers[0])
        links = "the link" if members == 1 else f"the {members} links"
        yield f"links.{entry}", f"{links} {ends} {change.target}", np.array(numbers)


def in_ranges(numbers: IntArray, word: str = "GPU") -> str:
    """GPUs (or what the word says) by their numbers, in ranges.

    >>> in_ranges(np.array([4])), in_ranges(np.array([0, 1, 2, 3, 8])), in_ranges(np.arange(0, 40, 2))
    ('GPU 4', 'GPUs 0-3, 8', 'GPUs 0, 2, 4 and 17 more')
    """
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    words = ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:3])
    more = sum(map(len, runs[3:]))
    return f"{word}{'s' * (len(numbers) > 1)} {words}{f' and {more} more' if more else ''}"
