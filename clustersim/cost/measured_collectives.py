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
from clustersim.cost.calibration_record import CollectiveRow, Record, Spread, summed_in
from clustersim.cost.collective_cost import Kind, kind_of
from clustersim.cost.measured_kernels import own_error, standing
from clustersim.cost.payload_curve import Curve, Reading
from clustersim.cost.timing import Bound, Demand, DemandCost, ExchangeCost, ExchangeTiming
from clustersim.program.program import ProcessGroups
from clustersim.program.task import CollectiveType, CommOp

ALGORITHM: Final = "as recorded"
_Key = tuple[CollectiveType, int, int]  # ranks and nodes of a group
_Asked = tuple[Kind, Bytes, DType | None]


class Model(ExchangeCost, DemandCost, Protocol):
    """What times the exchanges that a record does not cover, such as `cost.collective_cost`."""


@dataclass(frozen=True, slots=True)
class _Covered:
    """What the record says of one exchange. groups: by curve; readings: of those whose payload it covers."""

    which: IntArray
    readings: Mapping[int, tuple[Curve, Reading]]

    def seconds(self, otherwise: FloatArray) -> FloatArray:
        """Of every group: [groups]."""
        seconds = otherwise.copy()
        for number, (_, reading) in self.readings.items():
            seconds[self.which == number] = reading.seconds
        return seconds


class RecordedExchanges:
    """Times exchanges (an `ExchangeCost` and a `DemandCost`): from a record where it covers them, else from a model.

    groups: process groups by role; nodes: [ranks] the node of each. Groups of one member take no time.
    Results are remembered inside the instance.
    """

    def __init__(self, model: Model, record: Record, groups: Mapping[str, ProcessGroups], *, nodes: IntArray) -> None:
        self._model, self._groups, self._homes = model, groups, nodes
        self._origin = record.origin
        self._curves = _curves(record)
        self._spans: dict[str, IntArray] = {}
        self._timings: dict[_Asked, ExchangeTiming] = {}
        self._demands: dict[_Asked, Demand] = {}

    def exchange(self, exchange: CommOp) -> ExchangeTiming:
        """Seconds of one collective in each group of its role, all groups at once."""
        key = (kind_of(exchange), exchange.payload, exchange.reduce_dtype)
        if key not in self._timings:
            self._timings[key] = self._time(exchange)
        return self._timings[key]

    def demand(self, exchange: CommOp) -> Demand:
        """What one collective asks of shared links in each group of its role."""
        key = (kind_of(exchange), exchange.payload, exchange.reduce_dtype)
        if key not in self._demands:
            self._demands[key] = self._ask(exchange)
        return self._demands[key]

    def _time(self, exchange: CommOp) -> ExchangeTiming:
        modelled = self._model.exchange(exchange)
        covered = self._covered(exchange)
        if not covered.readings:
            return modelled
        seconds = covered.seconds(modelled.seconds)
        slowest = covered.readings.get(int(covered.which[seconds.argmax()]))
        if slowest is None:
            return replace(modelled, seconds=seconds)
        curve, reading = slowest
        return ExchangeTiming(
            seconds=seconds,
            provenance=standing(self._origin, reading.provenance),
            bound=Bound.LATENCY if curve.floor > reading.seconds / 2.0 else Bound.BANDWIDTH,
            algorithm=ALGORITHM,
            tier=modelled.tier,
            error=own_error(self._origin, reading.error),
        )

    def _ask(self, exchange: CommOp) -> Demand:
        demand, modelled = self._model.demand(exchange), self._model.exchange(exchange).seconds
        seconds = self.exchange(exchange).seconds
        longer = np.divide(seconds, modelled, out=np.ones_like(seconds), where=modelled > 0.0)
        if (longer == 1.0).all():
            return demand
        return replace(demand, latency=demand.latency * longer, transfer=demand.transfer * longer)

    def _covered(self, exchange: CommOp) -> _Covered:
        """Readings by the number of nodes that groups span; those that the record does not know are missing."""
        if exchange.comm_group not in self._groups:
            return _Covered(np.zeros(0, np.int64), {})  # the model says what groups there are
        members = self._groups[exchange.comm_group].members
        which = self._nodes(exchange.comm_group, members)
        readings: dict[int, tuple[Curve, Reading]] = {}
        for nodes in np.unique(which[which > 0]).tolist():
            curve = self._curve((exchange.collective, members.shape[1], nodes), summed_in(exchange))
            reading = None if curve is None else curve.at(exchange.payload)
            if curve is not None and reading is not None:
                readings[nodes] = curve, reading
        return _Covered(which, readings)

    def _curve(self, key: _Key, form: DType) -> Curve | None:
        """Of the format that is summed in; where that is not known, or was not measured, FP32's, else any."""
        known = self._curves.get(key, {})
        return known.get(form) or known.get(DType.FP32) or next(iter(known.values()), None)

    def _nodes(self, role: str, members: IntArray) -> IntArray:
        """Nodes that each group of a role spans: [groups], 0 where it has more ranks on one than on another."""
        if role not in self._spans:
            self._spans[role] = _evenly_spanned(self._homes[members])
        return self._spans[role]


def _evenly_spanned(nodes: IntArray) -> IntArray:
    """How many different nodes are in each row, 0 if not all equally often: [groups] of [groups, members]."""
    ordered = np.sort(nodes, axis=1)
    new = np.ones(ordered.shape, dtype=np.bool_)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    spans = new.sum(axis=1)
    each = np.maximum(1, ordered.shape[1] // np.maximum(1, spans))
    expected = np.arange(ordered.shape[1]) % each[:, None] == 0
    even: IntArray = np.where((new == expected).all(axis=1), spans, 0)
    return even


def _curves(record: Record) -> Mapping[_Key, Mapping[DType, Curve]]:
    """By group, and by the format that is summed in, in the order of the record."""
    fits = {(fit.collective, fit.ranks, fit.nodes, fit.format): fit for fit in record.collective_fits}
    times: dict[_Key, dict[DType, dict[Bytes, Spread]]] = {}
    for row in (collective for collective in record.collectives if not collective.call.shares):
        times.setdefault(_key(row), {}).setdefault(row.call.format, {})[row.call.payload] = row.time
    return {
        key: {form: Curve(measured, fits.get((*key, form))) for form, measured in formats.items()}
        for key, formats in times.items()
    }


def _key(row: CollectiveRow) -> _Key:
    return row.call.collective, row.call.ranks, row.call.nodes
