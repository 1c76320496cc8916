"""How long does a collective take, from what was measured on this cluster?

Groups of as many ranks on as many nodes as were measured take what they took (`cost.payload_curve`: measured, between measured
payloads, or beyond them). Of reductions those count that sum in the same format, FP32 where it is not known; where none
were measured, those of another one, which move as many bytes and differ by how fast these are added. All others take
what the model of the fabric and the library says, and so do groups that have more ranks on one node than on another.
Record and model may meet in one role, group by group.

Assumed: groups were measured as a layout runs them, all of one size at the same time, so that what they share is in the
times. On a shared network the algorithm that the model takes says which links are kept busy; its latency and its
transfer are longer by one and the same factor, that by which the record is slower than the model. So groups that are in
step take what was measured, and one that has the links for itself takes less where the model says that they share them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes
from clustersim.cost.calibration_record import CalibrationRecord, CollectiveSample, TimeStatistics, reduction_dtype
from clustersim.cost.collective_cost import CommKey, comm_key
from clustersim.cost.measured_kernels import local_error, provenance_of
from clustersim.cost.payload_curve import CurveEstimate, PayloadCurve
from clustersim.cost.timing import Bottleneck, CommCost, CommTiming, LinkDemand, LinkDemandCost
from clustersim.program.program import ProcessGroups
from clustersim.program.task import CollectiveType, CommOp

RECORDED_ALGORITHM: Final = "as recorded"
_GroupShape = tuple[CollectiveType, int, int]  # ranks and nodes of a group
_CacheKey = tuple[CommKey, Bytes, DType | None]


class FallbackCommModel(CommCost, LinkDemandCost, Protocol):
    """What times the exchanges that a record does not cover, such as `cost.collective_cost`."""


@dataclass(frozen=True, slots=True)
class _Coverage:
    """What the record says of one exchange. groups: by curve; readings: of those whose payload it covers."""

    node_count: IntArray
    estimates: Mapping[int, tuple[PayloadCurve, CurveEstimate]]

    def apply_to(self, modelled: FloatArray) -> FloatArray:
        """Of every group: [groups]."""
        seconds = modelled.copy()
        for nodes, (_, estimate) in self.estimates.items():
            seconds[self.node_count == nodes] = estimate.seconds
        return seconds


class MeasuredCollectives:
    """Times exchanges (an `CommCost` and a `LinkDemandCost`): from a record where it covers them, else from a model.

    groups: process groups by role; nodes: [ranks] the node of each. Groups of one member take no time.
    Results are remembered inside the instance.
    """

    def __init__(
        self,
        model: FallbackCommModel,
        record: CalibrationRecord,
        groups: Mapping[str, ProcessGroups],
        *,
        nodes: IntArray,
    ) -> None:
        self._model, self._groups, self._node_of_rank = model, groups, nodes
        self._origin = record.origin
        self._curves = _curves_by_shape(record)
        self._node_counts: dict[str, IntArray] = {}
        self._timing_cache: dict[_CacheKey, CommTiming] = {}
        self._demand_cache: dict[_CacheKey, LinkDemand] = {}

    def time_comm_op(self, comm_op: CommOp) -> CommTiming:
        """Seconds of one collective in each group of its role, all groups at once."""
        key = (comm_key(comm_op), comm_op.payload, comm_op.reduce_dtype)
        if key not in self._timing_cache:
            self._timing_cache[key] = self._comm_timing(comm_op)
        return self._timing_cache[key]

    def link_demand(self, comm_op: CommOp) -> LinkDemand:
        """What one collective asks of shared links in each group of its role."""
        key = (comm_key(comm_op), comm_op.payload, comm_op.reduce_dtype)
        if key not in self._demand_cache:
            self._demand_cache[key] = self._scaled_demand(comm_op)
        return self._demand_cache[key]

    def _comm_timing(self, comm_op: CommOp) -> CommTiming:
        modelled = self._model.time_comm_op(comm_op)
        coverage = self._coverage(comm_op)
        if not coverage.estimates:
            return modelled
        seconds = coverage.apply_to(modelled.seconds)
        slowest = coverage.estimates.get(int(coverage.node_count[seconds.argmax()]))
        if slowest is None:
            return replace(modelled, seconds=seconds)
        curve, estimate = slowest
        return CommTiming(
            seconds=seconds,
            provenance=provenance_of(self._origin, estimate.provenance),
            bottleneck=Bottleneck.LATENCY
            if curve.smallest_payload_seconds > estimate.seconds / 2.0
            else Bottleneck.BANDWIDTH,
            algorithm=RECORDED_ALGORITHM,
            tier=modelled.tier,
            error=local_error(self._origin, estimate.error),
        )

    def _scaled_demand(self, comm_op: CommOp) -> LinkDemand:
        demand, modelled = self._model.link_demand(comm_op), self._model.time_comm_op(comm_op).seconds
        seconds = self.time_comm_op(comm_op).seconds
        slowdown = np.divide(seconds, modelled, out=np.ones_like(seconds), where=modelled > 0.0)
        if (slowdown == 1.0).all():
            return demand
        return replace(demand, latency=demand.latency * slowdown, transfer=demand.transfer * slowdown)

    def _coverage(self, comm_op: CommOp) -> _Coverage:
        """Readings by the number of nodes that groups span; those that the record does not know are missing."""
        if comm_op.comm_group not in self._groups:
            return _Coverage(np.zeros(0, np.int64), {})  # the model says what groups there are
        members = self._groups[comm_op.comm_group].members
        node_count = self._node_count(comm_op.comm_group, members)
        estimates: dict[int, tuple[PayloadCurve, CurveEstimate]] = {}
        for nodes in np.unique(node_count[node_count > 0]).tolist():
            curve = self._curve((comm_op.collective, members.shape[1], nodes), reduction_dtype(comm_op))
            estimate = None if curve is None else curve.estimate(comm_op.payload)
            if curve is not None and estimate is not None:
                estimates[nodes] = curve, estimate
        return _Coverage(node_count, estimates)

    def _curve(self, key: _GroupShape, dtype: DType) -> PayloadCurve | None:
        """Of the format that is summed in; where that is not known, or was not measured, FP32's, else any."""
        curves = self._curves.get(key, {})
        return curves.get(dtype) or curves.get(DType.FP32) or next(iter(curves.values()), None)

    def _node_count(self, comm_group: str, members: IntArray) -> IntArray:
        """Nodes that each group of a role spans: [groups], 0 where it has more ranks on one than on another."""
        if comm_group not in self._node_counts:
            self._node_counts[comm_group] = _even_node_count(self._node_of_rank[members])
        return self._node_counts[comm_group]


def _even_node_count(nodes: IntArray) -> IntArray:
    """How many different nodes are in each row, 0 if not all equally often: [groups] of [groups, members]."""
    ordered = np.sort(nodes, axis=1)
    starts_node = np.ones(ordered.shape, dtype=np.bool_)
    starts_node[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    node_count = starts_node.sum(axis=1)
    ranks_per_node = np.maximum(1, ordered.shape[1] // np.maximum(1, node_count))
    expected = np.arange(ordered.shape[1]) % ranks_per_node[:, None] == 0
    even_count: IntArray = np.where((starts_node == expected).all(axis=1), node_count, 0)
    return even_count


def _curves_by_shape(record: CalibrationRecord) -> Mapping[_GroupShape, Mapping[DType, PayloadCurve]]:
    """By group, and by the format that is summed in, in the order of the record."""
    fits = {(fit.collective, fit.ranks, fit.nodes, fit.format): fit for fit in record.collective_fits}
    times: dict[_GroupShape, dict[DType, dict[Bytes, TimeStatistics]]] = {}
    for sample in (candidate for candidate in record.collectives if not candidate.call.shares):
        times.setdefault(_group_shape(sample), {}).setdefault(sample.call.format, {})[sample.call.payload] = sample.time
    return {
        key: {dtype: PayloadCurve(payload_times, fits.get((*key, dtype))) for dtype, payload_times in by_dtype.items()}
        for key, by_dtype in times.items()
    }


def _group_shape(sample: CollectiveSample) -> _GroupShape:
    return sample.call.collective, sample.call.ranks, sample.call.nodes
