"""How long do exchanges take whose members get unlike parts of the payload?

Tokens go to where their experts are, so the rank with the most rows gets the most bytes, and sends the most back. Every
rank's ports are its own, so the fullest rank's carry what its rows are of the mean, and an exchange takes what an even
one of so much larger a payload would. Where tokens travel once to each node (DeepEP, Hybrid-EP), what comes to a node
is spread over its ports, so the network carries what the fullest node's rows are, NVLink the fullest rank's; whichever
takes longer counts. Copies that are saved because tokens have several experts at one place are those of even loads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Bytes
from clustersim.cost.host_transfers import Others
from clustersim.cost.timing import Demand, ExchangeTiming
from clustersim.hardware.topology import LINK_KINDS, Fabric, LinkKind
from clustersim.program.program import Program
from clustersim.program.task import CommOp
from clustersim.symmetry.link_load_matrix import LinkLoadMatrix

_NVLINK = LINK_KINDS.index(LinkKind.NVLINK)


@dataclass(frozen=True, slots=True)
class UnevenExchanges:
    """Times exchanges of a program with loads, those without by `even` (an `ExchangeCost` and a `DemandCost`)."""

    even: Others
    program: Program
    fabric: Fabric
    _times: dict[CommOp, FloatArray] = field(default_factory=dict)
    _timings: dict[CommOp, ExchangeTiming] = field(default_factory=dict)
    _crossings: dict[tuple[bytes, tuple[int, ...]], LinkLoadMatrix] = field(default_factory=dict)

    def exchange(self, exchange: CommOp) -> ExchangeTiming:
        """Seconds of one exchange in each group of its role."""
        if exchange.load_index is None:
            return self.even.exchange(exchange)
        if exchange not in self._timings:
            self._timings[exchange] = self._time(exchange)
        return self._timings[exchange]

    def demand(self, exchange: CommOp) -> Demand:
        """What one exchange asks of links in each group of its role."""
        if exchange.load_index is None:
            return self.even.demand(exchange)
        times = self._fullest(exchange)
        parts = {time: self.even.demand(_larger(exchange, time)) for time in np.unique(times).tolist()}
        latency, transfer, per_byte, flow = (
            _picked(times, {item: getattr(demand, name) for item, demand in parts.items()})
            for name in ("latency", "transfer", "per_byte", "flow")
        )
        crossings = self._joined(times, {element: demand.crossings for element, demand in parts.items()})
        return Demand(latency, transfer, per_byte, flow, exchange.payload, crossings)

    def _time(self, exchange: CommOp) -> ExchangeTiming:
        times = self._fullest(exchange)
        parts = {time: self.even.exchange(_larger(exchange, time)) for time in np.unique(times).tolist()}
        seconds = _picked(times, {item: timing.seconds for item, timing in parts.items()})
        return replace(parts[float(times[seconds.argmax()])], seconds=seconds)

    def _fullest(self, exchange: CommOp) -> FloatArray:
        """By how much each group's payload counts as larger than an even one's: [groups]."""
        if exchange not in self._times:
            self._times[exchange] = self._larger_by(exchange)
        return self._times[exchange]

    def _larger_by(self, exchange: CommOp) -> FloatArray:
        members = self.program.groups[exchange.comm_group].members
        factors = self.program.expert_loads.factors[exchange.load_index or 0][members]
        rank: FloatArray = factors.max(axis=1)
        if not exchange.collective.is_token_routing:
            return rank
        inside = self._inside(exchange, len(members))
        return np.maximum(_by_node(self.fabric.nodes(members), factors), rank * inside)

    def _inside(self, exchange: CommOp, groups: int) -> FloatArray:
        """Of what the busiest link of each group takes for an even payload, what its busiest NVLink port does."""
        crossings = self.even.demand(replace(exchange, load_index=None)).crossings
        own = self.fabric.links.kind[crossings.link_index] == _NVLINK
        every, nvlink = np.zeros((2, groups))
        np.maximum.at(every, crossings.group_index, crossings.seconds_per_byte)
        np.maximum.at(nvlink, crossings.group_index[own], crossings.seconds_per_byte[own])
        return np.divide(nvlink, every, out=np.ones(groups), where=every > 0.0)

    def _joined(self, times: FloatArray, parts: Mapping[float, LinkLoadMatrix]) -> LinkLoadMatrix:
        """What groups cross that count as so much larger; one object for the same, since they are told apart by it."""
        different = dict.fromkeys(parts.values())
        if len(different) == 1:
            return next(iter(different))
        numbers = {link_load_matrix: number for number, link_load_matrix in enumerate(different)}
        taken = _picked(times, {item: np.full(len(times), float(numbers[part])) for item, part in parts.items()})
        key = taken.tobytes(), tuple(map(id, different))
        if key not in self._crossings:
            pairs = [(element, taken[element.group_index] == number) for element, number in numbers.items()]
            columns = [
                (entry.group_index[own], entry.link_index[own], entry.seconds_per_byte[own]) for entry, own in pairs
            ]
            self._crossings[key] = LinkLoadMatrix(*(np.concatenate(column) for column in zip(*columns, strict=True)))
        return self._crossings[key]


def _larger(exchange: CommOp, times: float) -> CommOp:
    payload: Bytes = exchange.payload * times
    return replace(exchange, payload=payload, load_index=None)


def _picked(times: FloatArray, parts: Mapping[float, FloatArray]) -> FloatArray:
    """For each group the entry of the part that its number names: [groups]."""
    found = np.zeros(len(times))
    for item, values in parts.items():
        own = times == item
        found[own] = values[own]
    return found


def _by_node(nodes: IntArray, factors: FloatArray) -> FloatArray:
    """The mean of the fullest node's members in each group: [groups] of [groups, members]."""
    most = np.zeros(len(nodes))
    for number, (own, values) in enumerate(zip(nodes, factors, strict=True)):
        place = np.unique(own, return_inverse=True)[1].reshape(-1)
        most[number] = (np.bincount(place, values) / np.bincount(place)).max()
    return most
