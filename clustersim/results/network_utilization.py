"""Network utilization: how much is each tier of links used, when, and by which axis?

A tier is all links of one kind (`LinkKind`) except those that end at a GPU outside the job. Its utilization
in a time bin is the bytes that its links carry in it over what they could carry at their nominal bandwidth;
that of one link is the time that its bytes take at its full rate over the step. Protocol overhead on the
wire, and the fraction of the nominal bandwidth that a library cannot reach, keep a busy tier below 100 %.

Bytes are counted for all groups, including those of ranks that were not simulated: a group acts like its
first member (for a message, the sender), when the rank that represents that member does. The bytes of a
collective or message are spread uniformly over its span, those of comm ops inside a segment uniformly over
the segment. Where links are not shared (`cost.network: uncontended`) concurrent comm ops on a link do not
slow each other, so that more than 100 % shows where contention would occur; with contention a full step
never exceeds 100 %, but a short bin may, because of the uniform spread.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.common.arrays import BoolArray, FloatArray, IntArray, SmallIntArray
from clustersim.common.units import Bytes, BytesPerSecond, Seconds
from clustersim.hardware.topology import LINK_KINDS, Fabric, LinkInfo, LinkKind
from clustersim.results.link_volumes import VolumeModel
from clustersim.results.time_bins import DEFAULT_BIN_COUNT
from clustersim.results.trace_table import TraceTable
from clustersim.results.transfer_events import CommVolume, bytes_by_link_kind, collect_comm_volumes, find_transfers
from clustersim.symmetry.labels import unique_by_columns

MAX_BUSY_LINKS: Final = 8
"""Maximum number of busiest links that are listed: one of each set of equivalent links, and few of one kind."""
_MAX_PER_KIND: Final = 2
_UTILIZATION_TOLERANCE: Final = (
    1e-4  # fraction of the step: links used by each axis equally long within this are equivalent
)


@dataclass(frozen=True, slots=True)
class TierUtilization:
    """Utilization of one kind of links.

    capacity: total bytes/s; utilization_over_time: [bins]; max_link_utilization: of the busiest link over the
    step.
    """

    kind: LinkKind
    link_count: int
    capacity: BytesPerSecond
    utilization_over_time: FloatArray
    max_link_utilization: float

    @property
    def mean_utilization(self) -> float:
        """Utilization over the full run."""
        return float(self.utilization_over_time.mean())

    @property
    def peak_utilization(self) -> float:
        """Utilization of the busiest bin."""
        return float(self.utilization_over_time.max())


@dataclass(frozen=True, slots=True)
class BusyLink:
    """One of the busiest links.

    equivalent_count: number of links of its kind and bandwidth with the same load per axis, including itself;
    cable_count: number of parallel cables it stands for; transfer_seconds: time that the bytes of a step take
    at its full rate; bytes_by_axis: bytes per step.
    """

    link: LinkInfo
    equivalent_count: int
    cable_count: int
    transfer_seconds: Seconds
    utilization: float
    bytes_by_axis: dict[str, Bytes]


@dataclass(frozen=True, slots=True)
class AxisTraffic:
    """Bytes that all groups of one axis, or of a group kind such as embedding, move per step.

    sent_bytes: bytes that members send; tier_bytes: [tiers] those of them that cross each tier.
    """

    axis: str
    sent_bytes: Bytes
    tier_bytes: FloatArray


@dataclass(frozen=True, slots=True)
class NetworkUtilization:
    """Network utilization of a run.

    makespan: seconds of the full run, covered by equal bins; gpu_count: GPUs of the job.
    """

    makespan: Seconds
    gpu_count: int
    tiers: tuple[TierUtilization, ...]
    busiest_links: tuple[BusyLink, ...]
    axis_traffic: tuple[AxisTraffic, ...]


def network_utilization(
    table: TraceTable, fabric: Fabric, volumes: VolumeModel, bin_count: int = DEFAULT_BIN_COUNT
) -> NetworkUtilization | None:
    """Count the bytes of a run on the links of a fabric; None where nothing is moved."""
    transfers = find_transfers(table)
    comm_volumes = list(collect_comm_volumes(table, transfers, volumes))
    if not comm_volumes:
        return None
    bytes_by_axis = _link_bytes_by_axis(comm_volumes, len(fabric.links.kind))
    step_time = table.trace.makespan / table.step_count
    tiers = tuple(
        _tier_utilization(
            bytes_by_link_kind(table, fabric, transfers, comm_volumes, bin_count), bytes_by_axis, fabric, table
        )
    )
    present = [LINK_KINDS.index(tier.kind) for tier in tiers]
    return NetworkUtilization(
        makespan=table.trace.makespan,
        gpu_count=table.program.world_size,
        tiers=tiers,
        busiest_links=tuple(_busiest_links(bytes_by_axis, fabric, step_time)),
        axis_traffic=tuple(_axis_traffic(comm_volumes, present)),
    )


def _link_bytes_by_axis(comm_volumes: list[CommVolume], link_count: int) -> dict[str, FloatArray]:
    """Bytes per step on every link, by axis: [links]."""
    totals: dict[str, FloatArray] = {}
    for comm_volume in comm_volumes:
        link_volumes = comm_volume.link_volumes
        amount = link_volumes.fraction * comm_volume.class_bytes[comm_volume.class_of_group[link_volumes.group_index]]
        totals[comm_volume.axis] = totals.get(comm_volume.axis, np.zeros(link_count)) + np.bincount(
            link_volumes.link_id, amount, minlength=link_count
        )
    return totals


def _tier_utilization(
    bytes_by_kind: FloatArray, bytes_by_axis: dict[str, FloatArray], fabric: Fabric, trace_table: TraceTable
) -> Iterator[TierUtilization]:
    """Utilization of every kind of links present. bytes_by_kind: [LINK_KINDS, bins]."""
    bin_width, step_time = (
        trace_table.trace.makespan / bytes_by_kind.shape[1],
        trace_table.trace.makespan / trace_table.step_count,
    )
    is_usable, link_table = _job_links(fabric, trace_table.program.world_size), fabric.links
    seconds = _transfer_seconds(np.sum(list(bytes_by_axis.values()), axis=0), link_table.bandwidth)
    for kind in np.unique(link_table.kind[is_usable]).tolist():
        in_tier = is_usable & (link_table.kind == kind)
        capacity = float(link_table.bandwidth[in_tier].sum())
        max_utilization = float(seconds[in_tier].max()) / step_time
        yield TierUtilization(
            LINK_KINDS[kind],
            int(in_tier.sum()),
            capacity,
            bytes_by_kind[kind] / (capacity * bin_width),
            max_utilization,
        )


def _job_links(fabric: Fabric, gpu_count: int) -> BoolArray:
    """Mask of links that do not end at a GPU outside the job, whose GPUs are the first ones: [links]."""
    if fabric.gpu_count <= gpu_count:
        return np.ones(len(fabric.links.kind), np.bool_)
    ends = fabric.link_endpoints
    is_outside = [(end >= gpu_count) & (end < fabric.gpu_count) for end in (ends.source, ends.target)]
    is_usable: BoolArray = ~(is_outside[0] | is_outside[1])
    return is_usable


def _transfer_seconds(link_bytes: FloatArray, bandwidth: FloatArray) -> FloatArray:
    """Seconds that bytes take at the full rate of their links; 0 on dead links."""
    seconds: FloatArray = np.divide(link_bytes, bandwidth, out=np.zeros_like(link_bytes), where=bandwidth > 0.0)
    return seconds


def _busiest_links(bytes_by_axis: dict[str, FloatArray], fabric: Fabric, step_time: Seconds) -> Iterator[BusyLink]:
    """The links with the highest utilization; equivalent ones are reported once."""
    link_table, axes = fabric.links, np.stack(list(bytes_by_axis.values()))
    links = np.flatnonzero(axes.any(axis=0))
    loads, bandwidth = axes[:, links], link_table.bandwidth[links]
    rounded = [np.round(_transfer_seconds(load, bandwidth) / step_time / _UTILIZATION_TOLERANCE) for load in loads]
    labels, first_index = unique_by_columns([link_table.kind[links], bandwidth, *rounded])
    seconds = _transfer_seconds(loads.sum(axis=0), bandwidth)[first_index]
    equivalent_counts = np.bincount(labels)
    order = np.lexsort((links[first_index], -np.round(seconds / step_time / _UTILIZATION_TOLERANCE)))
    for label in _limit_per_kind(order, link_table.kind[links[first_index]]):
        axis_bytes = dict(zip(bytes_by_axis, loads[:, first_index[label]].tolist(), strict=True))
        busy_seconds = float(seconds[label])
        yield BusyLink(
            link=fabric.link_info(int(links[first_index[label]])),
            equivalent_count=int(equivalent_counts[label]),
            cable_count=fabric.parallel_link_count(int(links[first_index[label]])),
            transfer_seconds=busy_seconds,
            utilization=busy_seconds / step_time,
            bytes_by_axis={axis: amount for axis, amount in axis_bytes.items() if amount > 0.0},
        )


def _limit_per_kind(order: IntArray, kind: SmallIntArray) -> list[int]:
    """The first entries of an order, with a limited number of each kind."""
    rank_in_kind = np.zeros(len(order), np.int64)
    for value in np.unique(kind).tolist():
        is_kind = kind[order] == value
        rank_in_kind[is_kind] = np.arange(is_kind.sum())
    return [int(value) for value in order[rank_in_kind < _MAX_PER_KIND][:MAX_BUSY_LINKS].tolist()]


def _axis_traffic(comm_volumes: list[CommVolume], tiers: list[int]) -> Iterator[AxisTraffic]:
    """Bytes that each axis moves per step."""
    for axis in dict.fromkeys(comm_volume.axis for comm_volume in comm_volumes):
        axis_volumes = [comm_volume for comm_volume in comm_volumes if comm_volume.axis == axis]
        sent = sum(
            float(comm_volume.bytes_per_step(comm_volume.link_volumes.sent_fraction).sum())
            for comm_volume in axis_volumes
        )
        crossing = sum(
            comm_volume.bytes_per_step(comm_volume.link_volumes.crossing_fraction).sum(axis=0)
            for comm_volume in axis_volumes
        )
        yield AxisTraffic(axis, sent, np.asarray(crossing)[tiers])
