"""Which ranks are alike, given what their collectives cost?

The colouring (`program.symmetry`) starts from what exchanges take in each group. On a shared network that is, for
those that share links with others, what they ask of them.
"""

from dataclasses import replace

import numpy as np

from clustersim.cost.sharing import Sharing
from clustersim.cost.timing import ExchangeCost, FloatArray
from clustersim.hardware.topology import IntArray, LinkTable
from clustersim.program.colour import joined, ranked
from clustersim.program.program import Program
from clustersim.program.symmetry import Classes, classes, unfolded
from clustersim.program.task import Exchange
from clustersim.program.traffic import Crossings, LinkColours, Traffic


def alike(program: Program, cost: ExchangeCost, *, machine: IntArray | None = None) -> Classes:
    """Classes of ranks where every exchange takes its own time."""
    every = {exchange for each in program.programs for exchange in each.exchanges}
    columns = [(exchange.group, cost.exchange(exchange).seconds) for exchange in _sorted(every)]
    return classes(program, _stacked(columns), machine=machine)


def alike_shared(
    program: Program,
    cost: ExchangeCost,
    sharing: Sharing,
    links: LinkTable,
    *,
    machine: IntArray | None = None,
) -> Classes:
    """Classes of ranks, groups and links where exchanges share the network."""
    inside = {exchange for each in program.programs for exchange in each.exchanges_inside} - sharing.inside
    columns = [(exchange.group, cost.exchange(exchange).seconds) for exchange in _sorted(inside)]
    for exchange in _shared(program, sharing):
        demand = sharing.demand(exchange)
        columns += [(exchange.group, column) for column in (demand.latency, demand.transfer, demand.flow)]
    return classes(program, _stacked(columns), _traffic(program, sharing, links), machine=machine)


def all_apart(program: Program, sharing: Sharing, links: LinkTable) -> Classes:
    """Every rank and group its own class; links are alike that the same groups keep busy for as long."""
    apart = unfolded(program)
    colours = LinkColours(_traffic(program, sharing, links), {role: len(each) for role, each in apart.groups.items()})
    colours.refine(apart.groups)
    return replace(apart, links=colours.colour)


def _shared(program: Program, sharing: Sharing) -> list[Exchange]:
    """The exchanges that are simulated on the network."""
    outside = {exchange for each in program.programs for exchange in each.exchanges_outside}
    return _sorted(outside | sharing.inside)


def _traffic(program: Program, sharing: Sharing, links: LinkTable) -> Traffic:
    """What they cross."""
    crossings: dict[str, dict[Crossings, None]] = {}
    for exchange in _shared(program, sharing):
        crossings.setdefault(exchange.group, {})[sharing.demand(exchange).crossings] = None
    return Traffic(_kinds(links), {role: tuple(each) for role, each in crossings.items()})


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
    return joined(links.kind, ranked(links.bandwidth))
