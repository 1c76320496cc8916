"""How long do collectives with imbalanced splits take (MoE all-to-all)?

Tokens go to where their experts are, so the most loaded rank receives the most bytes, and sends the most
back. Every rank has its own ports, so those of the most loaded rank carry its tokens over the mean, and a
collective takes the time of a balanced one with a payload larger by that factor. Where tokens are sent once
to each node (DeepEP, Hybrid-EP), what arrives at a node is spread over its ports, so the network factor is
that of the most loaded node, the NVLink factor that of the most loaded rank; the larger time counts.
Savings from several experts of a token at one destination are those of balanced loads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.cached_method import cached_method
from clustersim.common.units import Bytes
from clustersim.cost.host_transfers import CommModel
from clustersim.cost.timing import CommTiming, LinkDemand
from clustersim.hardware.topology import Fabric
from clustersim.program.program import Program
from clustersim.program.task import CommOp
from clustersim.symmetry.link_load_matrix import LinkLoadMatrix


@dataclass(frozen=True)
class ImbalancedComm:
    """Times imbalanced communication ops, and others by `balanced` (a `CommCost` and a `LinkDemandCost`)."""

    balanced: CommModel
    program: Program
    fabric: Fabric
    _link_load_cache: dict[tuple[bytes, tuple[LinkLoadMatrix, ...]], LinkLoadMatrix] = field(default_factory=dict)

    def time_comm_op(self, comm_op: CommOp) -> CommTiming:
        """Timing of one communication op in each group of its communicator."""
        if comm_op.load_index is None:
            return self.balanced.time_comm_op(comm_op)
        return self._imbalanced_timing(comm_op)

    def link_demand(self, comm_op: CommOp) -> LinkDemand:
        """Link demand of one communication op in each group of its communicator."""
        if comm_op.load_index is None:
            return self.balanced.link_demand(comm_op)
        factors = self._payload_factors(comm_op)
        demands = {
            factor: self.balanced.link_demand(_scale_payload(comm_op, factor)) for factor in np.unique(factors).tolist()
        }
        latency, transfer, per_byte, flow = (
            _select_by_factor(factors, {factor: getattr(demand, name) for factor, demand in demands.items()})
            for name in ("latency", "transfer", "per_byte", "flow")
        )
        link_loads = self._merged_link_loads(factors, {factor: demand.link_loads for factor, demand in demands.items()})
        return LinkDemand(latency, transfer, per_byte, flow, comm_op.payload, link_loads)

    @cached_method
    def _imbalanced_timing(self, comm_op: CommOp) -> CommTiming:
        factors = self._payload_factors(comm_op)
        timings = {
            factor: self.balanced.time_comm_op(_scale_payload(comm_op, factor))
            for factor in np.unique(factors).tolist()
        }
        seconds = _select_by_factor(factors, {factor: timing.seconds for factor, timing in timings.items()})
        return replace(timings[float(factors[seconds.argmax()])], seconds=seconds)

    @cached_method
    def _payload_factors(self, comm_op: CommOp) -> FloatArray:
        """[groups] factor by which each group's payload counts as larger than a balanced one."""
        members = self.program.groups[comm_op.comm_group].members
        factors = self.program.expert_loads.factors[comm_op.load_index or 0][members]
        rank_factor: FloatArray = factors.max(axis=1)
        if not comm_op.collective.is_token_routing:
            return rank_factor
        nvlink_share = self.balanced.time_comm_op(replace(comm_op, load_index=None)).nvlink_share
        node_factor = _max_node_load(self.fabric.node_ids(members), factors)
        return node_factor if nvlink_share is None else np.maximum(node_factor, rank_factor * nvlink_share)

    def _merged_link_loads(
        self, factors: FloatArray, loads_by_factor: Mapping[float, LinkLoadMatrix]
    ) -> LinkLoadMatrix:
        """Link loads of groups with these factors; equal results are one object, so that identity decides equality."""
        distinct = dict.fromkeys(loads_by_factor.values())
        if len(distinct) == 1:
            return next(iter(distinct))
        index_of = {loads: index for index, loads in enumerate(distinct)}
        group_source = _select_by_factor(
            factors,
            {factor: np.full(len(factors), float(index_of[source])) for factor, source in loads_by_factor.items()},
        )
        key = group_source.tobytes(), tuple(distinct)
        if key not in self._link_load_cache:
            selections = [(loads, group_source[loads.group_index] == index) for loads, index in index_of.items()]
            columns = [
                (loads.group_index[mask], loads.link_index[mask], loads.seconds_per_byte[mask])
                for loads, mask in selections
            ]
            self._link_load_cache[key] = LinkLoadMatrix(
                *(np.concatenate(column) for column in zip(*columns, strict=True))
            )
        return self._link_load_cache[key]


def _scale_payload(comm_op: CommOp, factor: float) -> CommOp:
    payload: Bytes = comm_op.payload * factor
    return replace(comm_op, payload=payload, load_index=None)


def _select_by_factor(factors: FloatArray, values_by_factor: Mapping[float, FloatArray]) -> FloatArray:
    """[groups] each group's entry of the values for its factor."""
    selected = np.zeros(len(factors))
    for factor, values in values_by_factor.items():
        mask = factors == factor
        selected[mask] = values[mask]
    return selected


def _max_node_load(nodes: IntArray, factors: FloatArray) -> FloatArray:
    """[groups] mean load of the most loaded node's members, of [groups, members]."""
    max_load = np.zeros(len(nodes))
    for group, (group_nodes, values) in enumerate(zip(nodes, factors, strict=True)):
        node_index = np.unique(group_nodes, return_inverse=True)[1].reshape(-1)
        max_load[group] = (np.bincount(node_index, values) / np.bincount(node_index)).max()
    return max_load
