"""How long does a collective take, given measurements on this cluster?

Groups with a measured rank count and node count take measured times (`cost.payload_curve`: measured,
interpolated between payloads, or extrapolated). For reductions the curve of the same data type is used,
FP32 where the type is not known; where that was not measured, another type's, which moves as many bytes and
differs by the speed of the additions. All other groups, and groups with unequal rank counts per node, take
the time of the fabric and library model. Measured and modelled groups may be mixed within one communicator. A profiled
step has few payloads, and no fit: beyond them a group takes the model's time, scaled as that of the nearest payload.

Assumed: groups were measured as a layout runs them, all of one size at the same time, so that contention
among them is in the times. On a shared network the algorithm selected by the model determines the loaded
links; its latency and its transfer time are scaled by one factor, measured over modelled time. So groups
that run in step take the measured time, and one that has its links for itself takes less where the model
has contention.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np

from clustersim.common.arrays import BoolArray, FloatArray, IntArray
from clustersim.common.cached_method import cached_by, cached_method
from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes
from clustersim.cost.calibration_record import CalibrationRecord, CollectiveSample, TimeStatistics, reduction_dtype
from clustersim.cost.collective_cost import CommKey, comm_key
from clustersim.cost.measured_kernels import local_error, provenance_of
from clustersim.cost.payload_curve import CurveEstimate, PayloadCurve
from clustersim.cost.timing import Bottleneck, CommCost, CommTiming, LinkDemand, LinkDemandCost, Provenance
from clustersim.program.program import ProcessGroups
from clustersim.program.task import CollectiveType, CommOp

RECORDED_ALGORITHM: Final = "as recorded"
_GroupShape = tuple[CollectiveType, int, int]  # collective, ranks and nodes of a group


def _op_key(_model: object, comm_op: CommOp) -> tuple[CommKey, Bytes, DType | None]:
    return comm_key(comm_op), comm_op.payload, comm_op.reduce_dtype


class FallbackCommModel(CommCost, LinkDemandCost, Protocol):
    """A model that times the communication ops that a record does not cover, such as `cost.collective_cost`."""


@dataclass(frozen=True, slots=True)
class _Coverage:
    """What a record covers of one communication op.

    node_count: [groups] nodes that each group spans, 0 if unevenly; estimates: by node count, where the record
    has one.
    """

    node_count: IntArray
    estimates: Mapping[int, tuple[PayloadCurve, CurveEstimate]]

    def apply_to(self, modelled: FloatArray) -> FloatArray:
        """[groups] seconds: estimates where there are any, otherwise modelled."""
        seconds = modelled.copy()
        for nodes, (_, estimate) in self.estimates.items():
            seconds[self.node_count == nodes] = estimate.seconds
        return seconds


class MeasuredCollectives:
    """Times communication ops from a record, else from a model (a `CommCost` and a `LinkDemandCost`).

    groups: process groups by communicator; nodes: [ranks] the node of each. Groups of one member take no time.
    Results are cached in the instance.
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
        self._scales_samples = record.profile is not None
        self._curves = _curves_by_shape(record)

    @cached_by(_op_key)
    def time_comm_op(self, comm_op: CommOp) -> CommTiming:
        """Timing of one collective in all groups of its communicator at once."""
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
            nvlink_share=modelled.nvlink_share,
        )

    @cached_by(_op_key)
    def link_demand(self, comm_op: CommOp) -> LinkDemand:
        """Load of one collective on shared links in each group of its communicator."""
        demand, modelled = self._model.link_demand(comm_op), self._model.time_comm_op(comm_op).seconds
        seconds = self.time_comm_op(comm_op).seconds
        slowdown = np.divide(seconds, modelled, out=np.ones_like(seconds), where=modelled > 0.0)
        if (slowdown == 1.0).all():
            return demand
        return replace(demand, latency=demand.latency * slowdown, transfer=demand.transfer * slowdown)

    def _coverage(self, comm_op: CommOp) -> _Coverage:
        """Estimates by the number of nodes that groups span; node counts that the record does not cover are missing."""
        if comm_op.comm_group not in self._groups:
            return _Coverage(np.zeros(0, np.int64), {})  # the model reports unknown communicators
        members = self._groups[comm_op.comm_group].members
        node_count = self._node_count(comm_op.comm_group)
        estimates: dict[int, tuple[PayloadCurve, CurveEstimate]] = {}
        for nodes in np.unique(node_count[node_count > 0]).tolist():
            curve = self._curve((comm_op.collective, members.shape[1], nodes), reduction_dtype(comm_op))
            if curve is None:
                continue
            estimate = curve.estimate(comm_op.payload)
            if estimate is None and self._scales_samples:
                estimate = self._scale_nearest(curve, comm_op, node_count == nodes)
            if estimate is not None:
                estimates[nodes] = curve, estimate
        return _Coverage(node_count, estimates)

    def _scale_nearest(self, curve: PayloadCurve, comm_op: CommOp, groups: BoolArray) -> CurveEstimate:
        """The model's time in some groups ([groups]), scaled as that of the nearest measured payload.

        The error is the correction, of which nothing tells how much applies to another payload.
        """
        nearest = curve.nearest_payload(comm_op.payload)
        modelled, modelled_nearest = (
            float(self._model.time_comm_op(replace(comm_op, payload=payload)).seconds[groups].max())
            for payload in (comm_op.payload, nearest)
        )
        factor = curve.times[nearest].seconds / modelled_nearest
        return CurveEstimate(modelled * factor, Provenance.FITTED, abs(factor - 1.0))

    def _curve(self, key: _GroupShape, dtype: DType) -> PayloadCurve | None:
        """The curve of this reduction data type; if it was not measured, FP32's, else any."""
        curves = self._curves.get(key, {})
        return curves.get(dtype) or curves.get(DType.FP32) or next(iter(curves.values()), None)

    @cached_method
    def _node_count(self, comm_group: str) -> IntArray:
        """Nodes that each group spans: [groups], 0 where ranks are spread unevenly over them."""
        return _even_node_count(self._node_of_rank[self._groups[comm_group].members])


def _even_node_count(nodes: IntArray) -> IntArray:
    """Number of distinct nodes per group, 0 if not all occur equally often: [groups] of [groups, members]."""
    ordered = np.sort(nodes, axis=1)
    starts_node = np.ones(ordered.shape, dtype=np.bool_)
    starts_node[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    node_count = starts_node.sum(axis=1)
    ranks_per_node = np.maximum(1, ordered.shape[1] // np.maximum(1, node_count))
    expected = np.arange(ordered.shape[1]) % ranks_per_node[:, None] == 0
    even_count: IntArray = np.where((starts_node == expected).all(axis=1), node_count, 0)
    return even_count


def _curves_by_shape(record: CalibrationRecord) -> Mapping[_GroupShape, Mapping[DType, PayloadCurve]]:
    """Curves by group shape and reduction data type, in the order of the record."""
    fits = {(fit.collective, fit.ranks, fit.nodes, fit.dtype): fit for fit in record.collective_fits}
    times: dict[_GroupShape, dict[DType, dict[Bytes, TimeStatistics]]] = {}
    for sample in (candidate for candidate in record.collectives if not candidate.call.shares):
        times.setdefault(_group_shape(sample), {}).setdefault(sample.call.dtype, {})[sample.call.payload] = sample.time
    return {
        key: {dtype: PayloadCurve(payload_times, fits.get((*key, dtype))) for dtype, payload_times in by_dtype.items()}
        for key, by_dtype in times.items()
    }


def _group_shape(sample: CollectiveSample) -> _GroupShape:
    return sample.call.collective, sample.call.ranks, sample.call.nodes
