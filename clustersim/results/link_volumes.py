"""Link volumes: how many bytes does a collective put on each link?

The library selects an algorithm for every group of a process-group kind, as for timing
(`cost.collective_cost`); its flows are routed and counted, as fractions of the payload. Counted is what the
algorithm moves, without protocol overhead on the wire (flags next to the data). A byte counts once for every
link that it passes, and once for every tier that it crosses, on however many links of it (up to a switch
and down again).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from clustersim.collectives.multi_ring import spread_over_rings
from clustersim.collectives.phase import Flows
from clustersim.collectives.tuner import Selection, Tuner
from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.cached_method import cached_by
from clustersim.cost.collective_cost import CollectiveCost, comm_key
from clustersim.hardware.topology import LINK_KINDS, Fabric
from clustersim.program.task import CollectiveType, CommOp


@dataclass(frozen=True, slots=True, eq=False)
class LinkVolumes:
    """Bytes that one collective puts on links in every group, as fractions of its payload.

    group_index, link_id, fraction: [entries] load of a group on a link (a pair may occur more than once);
    sent_fraction: [groups] sum over all members' sends; crossing_fraction: [groups, LINK_KINDS] traffic that
    crosses links of each kind. Compared by identity: comm ops that differ only in payload share one object.
    """

    group_index: IntArray
    link_id: IntArray
    fraction: FloatArray
    sent_fraction: FloatArray
    crossing_fraction: FloatArray


class VolumeModel(Protocol):
    """Protocol between this analysis and what selects the library's algorithms."""

    def link_volumes(self, comm_op: CommOp) -> LinkVolumes:
        """Link volumes of one collective in each of its groups."""


class MeteredCollectiveCost(CollectiveCost):
    """Collective cost model that also reports link volumes (`VolumeModel`)."""

    def link_volumes(self, comm_op: CommOp) -> LinkVolumes:
        """Link volumes of one collective in each of its groups, by the algorithms selected for the groups."""
        members = self._members(comm_op.comm_group)
        if members.shape[1] < 2 or not len(members):
            return _no_volumes(len(members))
        algorithms, algorithm_index = _used_algorithms(self._select_variant(comm_op))
        return self._volumes_of(comm_op, algorithms, algorithm_index)

    @cached_by(
        lambda _, comm_op, algorithms, algorithm_index: (comm_key(comm_op), algorithms, algorithm_index.tobytes())
    )
    def _volumes_of(self, comm_op: CommOp, algorithms: tuple[str, ...], algorithm_index: IntArray) -> LinkVolumes:
        """algorithm_index: [groups] the algorithm of each group."""
        members, tuner = self._members(comm_op.comm_group), self._tuner_for(comm_op)
        flows = _algorithm_flows(tuner, comm_op.collective, members, algorithms, algorithm_index)
        return _count_volumes(flows, self._tuner.fabric, len(members))


def _no_volumes(group_count: int) -> LinkVolumes:
    empty = np.zeros(0, np.int64)
    return LinkVolumes(empty, empty, np.zeros(0), np.zeros(group_count), np.zeros((group_count, len(LINK_KINDS))))


def _used_algorithms(selection: Selection) -> tuple[tuple[str, ...], IntArray]:
    """Names of the algorithms in use, and the index of each group's: [groups]; protocols move the same bytes."""
    names = [selection.variants[index].algorithm for index in range(len(selection.variants))]
    used_names = tuple(dict.fromkeys(names[index] for index in np.unique(selection.variant_index).tolist()))
    index = np.array([used_names.index(name) if name in used_names else -1 for name in names], np.int64)
    return used_names, index[selection.variant_index]


def _algorithm_flows(
    tuner: Tuner, collective: CollectiveType, members: IntArray, algorithms: Sequence[str], algorithm_index: IntArray
) -> Iterator[tuple[IntArray, Flows]]:
    """Groups that use an algorithm, and their flows. algorithm_index: [groups] index of each group's algorithm."""
    for topology in tuner.group_topologies(members):
        for index, name in enumerate(algorithms):
            is_selected = algorithm_index[topology.group_indices] == index
            phases = tuner.library.algorithm(name).phases(collective, topology) if is_selected.any() else ()
            for phase_flows in (
                phase_flows for phase in phases for phase_flows in phase.flows if phase_flows.share > 0
            ):
                selected_flows = Flows(
                    phase_flows.sources[is_selected],
                    phase_flows.targets[is_selected],
                    phase_flows.share,
                    phase_flows.is_p2p,
                )
                yield from (
                    (topology.group_indices[is_selected], ring_flows)
                    for ring_flows in spread_over_rings(selected_flows, tuner.fabric)
                )


def _count_volumes(flow_sets: Iterable[tuple[IntArray, Flows]], fabric: Fabric, group_count: int) -> LinkVolumes:
    volumes, link_kind = _no_volumes(group_count), fabric.links.kind
    columns: list[tuple[IntArray, IntArray, FloatArray]] = [(volumes.group_index, volumes.link_id, volumes.fraction)]
    for group_indices, flow_set in flow_sets:
        sources, targets = flow_set.sources.reshape(-1), flow_set.targets.reshape(-1)
        links = fabric.find_paths(sources, targets).links
        flow, hops = np.nonzero(links >= 0)
        group_index, link_id = np.repeat(group_indices, flow_set.sources[0].size), links[flow, hops]
        columns.append((group_index[flow], link_id, np.full(len(flow), flow_set.share)))
        volumes.sent_fraction[:] += flow_set.share * np.bincount(group_index[sources != targets], minlength=group_count)
        crosses_kind = np.zeros((len(links), len(LINK_KINDS)), np.bool_)
        crosses_kind[flow, link_kind[link_id]] = True
        for column in np.flatnonzero(crosses_kind.any(axis=0)).tolist():
            volumes.crossing_fraction[:, column] += flow_set.share * np.bincount(
                group_index[crosses_kind[:, column]], minlength=group_count
            )
    group_index, link_id, fraction = (np.concatenate(column) for column in zip(*columns, strict=True))
    return LinkVolumes(group_index, link_id, fraction, volumes.sent_fraction, volumes.crossing_fraction)
