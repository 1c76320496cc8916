"""Degradations of a machine: slow GPUs, slow or dead NICs and links, and background load.

Values are relative to the healthy machine: a GPU at speed 0.9 takes 1/0.9 of the time, a link at bandwidth
0.5 carries half. Ids are the machine's, whichever of its GPUs a job has. Temporary slowdowns of links are not
part of the fabric, which is static (see `cost.background_traffic`).

Assumptions: a background load takes its share of every link of its tier at all times; a dead link is dead
from the start, and routing has converged. Of a bundle over which traffic is spread, members are lost: it
keeps (k - 1)/k of its k links, and only the loss of the last one disconnects.
Reference: Dean and Barroso 2013, "The tail at scale", CACM 56(2); Greenberg et al. 2009, "VL2", SIGCOMM,
section 4.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.errors import InputError
from clustersim.common.units import Seconds
from clustersim.hardware.connectivity import find_partition
from clustersim.hardware.topology import LINK_KINDS, Fabric, LinkKind

SHARED_LINK_KINDS: Final = (LinkKind.NIC, LinkKind.LEAF, LinkKind.SPINE, LinkKind.WAN)
"""Links that other users of a cluster may load: all those outside of nodes."""


@dataclass(frozen=True, slots=True)
class SlowGpus:
    """GPUs whose kernels run at `speed` of the normal one."""

    gpu_ids: tuple[int, ...]
    speed: float


@dataclass(frozen=True, slots=True)
class DegradedNics:
    """NICs of some GPUs keep a fraction of their bandwidth, in both directions; 0: they are dead."""

    gpu_ids: tuple[int, ...]
    bandwidth_fraction: float


@dataclass(frozen=True, slots=True)
class SlowLinkEffect:
    """A link keeps a fraction of its bandwidth."""

    bandwidth_fraction: float

    def remaining_fraction(self, link_count: int) -> float:  # noqa: ARG002 - the same for all members of a bundle
        """Remaining fraction of the bandwidth."""
        return self.bandwidth_fraction


@dataclass(frozen=True, slots=True)
class DeadLinkEffect:
    """A link is dead, or a number of members of a bundle of parallel links."""

    lost_count: int = 1

    def remaining_fraction(self, link_count: int) -> float:
        """Remaining fraction of the bandwidth; raise InputError if the bundle has fewer members."""
        if self.lost_count > link_count:
            link_label = "a single link" if link_count == 1 else f"a bundle of {link_count} links"
            raise InputError(f"it is {link_label}, of which {self.lost_count} cannot be dead")
        return 1.0 - self.lost_count / link_count


@dataclass(frozen=True, slots=True)
class LinkDegradation:
    """Degradation of the link between two endpoints, named as by `Fabric.link_info`.

    both_directions: it also applies to the reverse link; active_period: (start, end) in seconds of slow links,
    None: at all times.
    """

    source: str
    target: str
    effect: SlowLinkEffect | DeadLinkEffect
    both_directions: bool = True
    active_period: tuple[Seconds, Seconds] | None = None

    def link_ids(self, fabric: Fabric) -> list[int]:
        """Link ids; raise InputError if there is no such link."""
        forward = fabric.find_link(self.source, self.target)
        return [forward, fabric.find_link(self.target, self.source)] if self.both_directions else [forward]


@dataclass(frozen=True, slots=True)
class Degradations:
    """All degradations; several entries of one GPU or link multiply.

    background_load: fraction of bandwidth by link kind.
    """

    slow_gpus: tuple[SlowGpus, ...] = ()
    nics: tuple[DegradedNics, ...] = ()
    links: tuple[LinkDegradation, ...] = ()
    background_load: Mapping[LinkKind, float] = field(default_factory=dict)

    @property
    def affects_network(self) -> bool:
        """Whether links are permanently degraded."""
        has_permanent = any(link.active_period is None for link in self.links)
        return bool(self.nics or has_permanent or any(self.background_load.values()))

    @property
    def temporary_links(self) -> tuple[LinkDegradation, ...]:
        """Links that are slow for a limited time."""
        return tuple(link for link in self.links if link.active_period is not None)

    def gpu_speeds(self, gpu_ids: IntArray) -> FloatArray:
        """[gpus] speed of some of the machine's GPUs relative to a healthy one."""
        speeds: FloatArray = np.ones(len(gpu_ids))
        for slow in self.slow_gpus:
            speeds[np.isin(gpu_ids, slow.gpu_ids)] *= slow.speed
        return speeds


def degrade_fabric(fabric: Fabric, degradations: Degradations, used_gpus: IntArray | None = None) -> Fabric:
    """The fabric with its degradations applied; the same object if they change nothing.

    used_gpus: GPUs that must still reach each other, None: all. Raises InputError, whose message starts
    with the entry (`links.0: ...`), for entries that do not exist and for GPUs that are disconnected.
    """
    bandwidth_fraction = np.ones(len(fabric.links.kind))
    _apply_background_load(fabric, degradations.background_load, bandwidth_fraction)
    for entry, nic in enumerate(degradations.nics):
        nic_link_ids = fabric.nic_links(np.array(nic.gpu_ids, np.int64))
        if not len(nic_link_ids):
            raise InputError(f"nics.{entry}: {format_id_ranges(np.array(nic.gpu_ids))} has no NIC in this cluster")
        bandwidth_fraction[nic_link_ids] *= nic.bandwidth_fraction
    links = zip(degradations.links, resolve_link_ids(fabric, degradations.links), strict=True)
    for entry, (degradation, link_ids) in enumerate(links):
        with _prefix_errors(f"links.{entry}"):
            for link_id in link_ids if degradation.active_period is None else ():
                bandwidth_fraction[link_id] *= degradation.effect.remaining_fraction(
                    fabric.parallel_link_count(link_id)
                )
    if not bandwidth_fraction.all():
        _require_connected(
            fabric,
            degradations,
            bandwidth_fraction,
            np.arange(fabric.gpu_count) if used_gpus is None else np.sort(used_gpus),
        )
    return fabric if (bandwidth_fraction == 1.0).all() else fabric.with_degraded_links(bandwidth_fraction)


def _apply_background_load(
    fabric: Fabric, background_load: Mapping[LinkKind, float], bandwidth_fraction: FloatArray
) -> None:
    for kind, load in background_load.items():
        loaded = fabric.links.kind == LINK_KINDS.index(kind)
        if not loaded.any():
            available = [
                name.value for name in SHARED_LINK_KINDS if (fabric.links.kind == LINK_KINDS.index(name)).any()
            ]
            raise InputError(
                f"background.{kind.value}: this cluster has no such links; {_available_kinds_message(available)}"
            )
        bandwidth_fraction[loaded] *= 1.0 - load


def _available_kinds_message(kinds: Sequence[str]) -> str:
    return f"it has {', '.join(kinds)}" if kinds else "it has none beyond its nodes"


def resolve_link_ids(fabric: Fabric, degradations: Sequence[LinkDegradation]) -> list[list[int]]:
    """Link ids of each degradation; raise InputError, as `degrade_fabric` does, for a link that does not exist."""
    link_ids = []
    for entry, degradation in enumerate(degradations):
        with _prefix_errors(f"links.{entry}"):
            link_ids.append(degradation.link_ids(fabric))
    return link_ids


@contextmanager
def _prefix_errors(key: str) -> Iterator[None]:
    """Prefix the message of an InputError with the key of its entry."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{key}: {error}") from error


def _require_connected(
    fabric: Fabric, degradations: Degradations, bandwidth_fraction: FloatArray, gpus: IntArray
) -> None:
    """Raise InputError that names the first entry that disconnects GPUs, and which GPUs."""
    if find_partition(fabric.link_endpoints, bandwidth_fraction > 0.0, gpus) is None:
        return
    alive = np.ones(len(bandwidth_fraction), np.bool_)
    for key, label, link_ids in _dead_link_entries(fabric, degradations):
        alive[link_ids] = bandwidth_fraction[link_ids] > 0.0
        partition = find_partition(fabric.link_endpoints, alive, gpus)
        if partition is not None:
            raise InputError(
                f"{key}: without {label}, {format_id_ranges(partition[0])} cannot reach "
                f"{format_id_ranges(partition[1])}"
            )


def _dead_link_entries(fabric: Fabric, degradations: Degradations) -> Iterator[tuple[str, str, IntArray]]:
    """Key, label and link ids of every entry that may contain dead links."""
    for entry, nic in enumerate(degradations.nics):
        gpus = np.array(nic.gpu_ids, np.int64)
        yield f"nics.{entry}", f"the NIC{'s' * (len(gpus) > 1)} of {format_id_ranges(gpus)}", fabric.nic_links(gpus)
    for entry, (degradation, link_ids) in enumerate(
        zip(degradations.links, resolve_link_ids(fabric, degradations.links), strict=True)
    ):
        endpoints = (
            f"between {degradation.source} and" if degradation.both_directions else f"from {degradation.source} to"
        )
        link_count = fabric.parallel_link_count(link_ids[0])
        links = "the link" if link_count == 1 else f"the {link_count} links"
        yield f"links.{entry}", f"{links} {endpoints} {degradation.target}", np.array(link_ids)


def format_id_ranges(ids: IntArray, noun: str = "GPU") -> str:
    """Format ids of GPUs (or of another noun) as ranges.

    >>> format_id_ranges(np.array([4])), format_id_ranges(np.array([0, 1, 2, 3, 8]))
    ('GPU 4', 'GPUs 0-3, 8')
    >>> format_id_ranges(np.arange(0, 40, 2))
    'GPUs 0, 2, 4 and 17 more'
    """
    spans = np.split(ids, np.flatnonzero(np.diff(ids) != 1) + 1)
    ranges = ", ".join(f"{span[0]}" if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans[:3])
    omitted = sum(map(len, spans[3:]))
    return f"{noun}{'s' * (len(ids) > 1)} {ranges}{f' and {omitted} more' if omitted else ''}"
