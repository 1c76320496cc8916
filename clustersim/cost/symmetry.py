"""Which ranks are alike, given what their collectives cost?

The colouring (`program.symmetry`) starts from what exchanges take in each group. On a shared network that is, for
exchanges outside blocks, what they ask of its links.
"""

import numpy as np

from clustersim.cost.timing import DemandCost, ExchangeCost, FloatArray
from clustersim.hardware.topology import IntArray, LinkTable
from clustersim.program.program import Program
from clustersim.program.symmetry import Classes, classes
from clustersim.program.task import Exchange
from clustersim.program.traffic import Crossings, Traffic


def alike(program: Program, cost: ExchangeCost) -> Classes:
    """Classes of ranks where every exchange takes its own time."""
    every = {exchange for each in program.programs for exchange in each.exchanges}
    columns = [(exchange.group, cost.exchange(exchange).seconds) for exchange in _sorted(every)]
    return classes(program, _stacked(columns))


def alike_shared(program: Program, cost: ExchangeCost, demands: DemandCost, links: LinkTable) -> Classes:
    """Classes of ranks, groups and links where exchanges outside blocks share the network."""
    inside = {exchange for each in program.programs for exchange in each.exchanges_inside}
    outside = {exchange for each in program.programs for exchange in each.exchanges_outside}
    columns = [(exchange.group, cost.exchange(exchange).seconds) for exchange in _sorted(inside)]
    crossings: dict[str, dict[Crossings, None]] = {}
    for exchange in _sorted(outside):
        demand = demands.demand(exchange)
        columns += [(exchange.group, column) for column in (demand.latency, demand.transfer, demand.flow)]
        crossings.setdefault(exchange.group, {})[demand.crossings] = None
    traffic = Traffic(_kinds(links), {role: tuple(each) for role, each in crossings.items()})
    return classes(program, _stacked(columns), traffic)


def _sorted(exchanges: set[Exchange]) -> list[Exchange]:
    return sorted(exchanges, key=lambda each: (each.group, each.name, each.collective.value, each.payload))


def _stacked(columns: list[tuple[str, FloatArray]]) -> dict[str, FloatArray]:
    """Columns that tell groups of one role apart, side by side."""
    telling: dict[str, list[FloatArray]] = {}
    for role, column in columns:
        if column.size and column.min() < column.max():
            telling.setdefault(role, []).append(column)
    return {role: np.stack(found, axis=1) for role, found in telling.items()}


def _kinds(links: LinkTable) -> IntArray:
    """First colours of links: equal kind and bandwidth."""
    bandwidth = np.unique(links.bandwidth, return_inverse=True)[1].reshape(-1)
    both = links.kind * (len(bandwidth) + 1) + bandwidth
    colours: IntArray = np.unique(both, return_inverse=True)[1].reshape(-1)
    return colours
