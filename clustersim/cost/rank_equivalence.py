"""Which ranks are alike, given what their collectives cost?

The colouring (`symmetry.refinement`) starts from what exchanges take in each group. On a shared network that is, for
those that share links with others, what they ask of them.
"""

from dataclasses import replace

import numpy as np

from clustersim.common.arrays import BoolArray, FloatArray, IntArray
from clustersim.cost.background_traffic import loaded_by
from clustersim.cost.contention import Sharing
from clustersim.cost.timing import ExchangeCost
from clustersim.hardware.topology import LinkTable
from clustersim.program.program import Program
from clustersim.program.task import CommOp
from clustersim.symmetry.labels import label_values, pair_labels
from clustersim.symmetry.link_load_matrix import LinkColourRefinement, LinkLoadMatrix, LinkTraffic
from clustersim.symmetry.refinement import SymmetryClasses, singleton_classes, symmetry_classes


def alike(program: Program, cost: ExchangeCost, *, machine: IntArray | None = None) -> SymmetryClasses:
    """Classes of ranks where every exchange takes its own time."""
    columns = [(exchange.comm_group, cost.exchange(exchange).seconds) for exchange in program.comm_ops]
    return symmetry_classes(program, _stacked(columns), device_model=machine)


def alike_shared(
    program: Program,
    cost: ExchangeCost,
    sharing: Sharing,
    links: LinkTable,
    *,
    machine: IntArray | None = None,
) -> SymmetryClasses:
    """Classes of ranks, groups and links where exchanges share the network."""
    return symmetry_classes(
        program, told_by(program, cost, sharing), crossed(program, sharing, links), device_model=machine
    )


def told_by(program: Program, cost: ExchangeCost, sharing: Sharing) -> dict[str, FloatArray]:
    """What exchanges take in each group, or ask of links that they share, in columns by role."""
    columns: list[tuple[str, FloatArray]] = []
    for exchange in program.comm_ops:
        seconds, shares = cost.exchange(exchange).seconds, _shares(program, sharing, exchange)
        columns.append((exchange.comm_group, np.where(shares, -1.0, seconds)))
        if shares.any():
            demand = sharing.demand(exchange)
            asked = (demand.latency, demand.transfer, demand.flow)
            columns += [(exchange.comm_group, np.where(shares, column, 0.0)) for column in asked]
    return _stacked(columns)


def unfolded_classes(program: Program, sharing: Sharing, links: LinkTable) -> SymmetryClasses:
    """Every rank and group its own class; links are alike that the same groups keep busy for as long."""
    apart = singleton_classes(program)
    colours = LinkColourRefinement(
        crossed(program, sharing, links),
        {role: len(group_colour) for role, group_colour in apart.group_colours.items()},
    )
    colours.refine(apart.group_colours)
    return replace(apart, link_colours=colours.colour)


def _shares(program: Program, sharing: Sharing, exchange: CommOp) -> BoolArray:
    """Which groups of an exchange are simulated on the network: [groups]."""
    groups = len(program.groups[exchange.comm_group].members)
    outside = exchange in program.task_comm_ops
    return np.ones(groups, dtype=np.bool_) if outside else sharing.inside.get(exchange, np.zeros(groups, np.bool_))


def crossed(program: Program, sharing: Sharing, links: LinkTable) -> LinkTraffic:
    """What exchanges cross that are simulated on the network."""
    crossings: dict[str, dict[tuple[LinkLoadMatrix, bytes], LinkLoadMatrix]] = {}
    for exchange in program.comm_ops:
        shares = _shares(program, sharing, exchange)
        every, known = sharing.demand(exchange).crossings, crossings.setdefault(exchange.comm_group, {})
        key = every, shares.tobytes()
        if shares.any() and key not in known:
            own = shares[every.group_index]
            known[key] = (
                every
                if own.all()
                else LinkLoadMatrix(every.group_index[own], every.link_index[own], every.seconds_per_byte[own])
            )
    return LinkTraffic(_kinds(links, sharing), {role: tuple(crossing.values()) for role, crossing in crossings.items()})


def _stacked(columns: list[tuple[str, FloatArray]]) -> dict[str, FloatArray]:
    """Columns that tell groups of one role apart, side by side."""
    telling: dict[str, list[FloatArray]] = {}
    for role, column in columns:
        if column.size and column.min() < column.max():
            telling.setdefault(role, []).append(column)
    return {role: np.stack(found, axis=1) for role, found in telling.items()}


def _kinds(links: LinkTable, sharing: Sharing) -> IntArray:
    """First colours of links: equal kind and bandwidth; those that others load are each of its own."""
    apart = np.zeros(len(links.kind), np.int64)
    loaded = loaded_by(sharing.others)
    apart[loaded] = 1 + np.arange(len(loaded))
    return pair_labels(pair_labels(links.kind, label_values(links.bandwidth)), apart)
