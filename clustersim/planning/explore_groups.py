"""Which layers lie on which pipeline rank, and who talks to whom? The plan's and the groups' own answers, as tables."""

from dataclasses import replace
from itertools import accumulate

import numpy as np

from clustersim.analysis.exploration import Table
from clustersim.parallel.groups import process_groups
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import AXES, NAMES, ROLES, Span
from clustersim.planning.explore_space import Space
from clustersim.program.placement import looped
from clustersim.scenario.checks import check_layers

Placed = list[list[list[int | bool]]]


def stages(space: Space) -> Table:
    """For each pipeline rank [first layer, layers, embedding, head] of each of its stages."""

    def ask(model: int, pp: int, chunks: int) -> Placed | None:
        if pp not in space.pipelines or [*check_layers(space.at(model=model, pp=pp, chunks=chunks))]:
            return None
        plan = space.plan(model=model, pp=pp, chunks=chunks)
        first = [0, *accumulate(stage.layers for stage in plan.stages)]
        return [
            [[first[each.number], each.layers, each.embedding, each.head] for each in plan.stages_of(rank)]
            for rank in range(pp)
        ]

    return space.table(ask, "model", "pp", "chunks")


def roles(space: Space) -> dict[str, tuple[str, ...]]:
    """The axes along which the members of each process group differ, in the order of their ranks."""
    layout = replace(Layout(**dict.fromkeys(NAMES, 2)), order=space.scenario.layout.order)  # type: ignore[arg-type]
    groups, found = process_groups(layout, looped(layout.pp)), {}
    for role in (role for role in ROLES.values() if role.name in NAMES):
        ranks = groups[role.name].members[0]
        differ = {axis.name for axis in AXES if len(np.unique(layout.coordinate(axis)[ranks])) > 1}
        found[role.name] = tuple(name for name in layout.order if name in differ)
    return found


def partners(space: Space) -> Table:
    """By role, for each pipeline rank those that it sends to or is grouped with."""

    def ask(pp: int, chunks: int) -> dict[str, list[list[int]]]:
        groups = process_groups(Layout(pp=pp), looped(pp, chunks))
        pairs = {role.name: groups[role.name] for role in ROLES.values() if role.name in groups}
        pairs = {name: group for name, group in pairs.items() if ROLES[name].span is not Span.ALL}
        return {
            role: [_beside(rank, group.members.tolist(), group.ordered) for rank in range(pp)]
            for role, group in pairs.items()
        }

    return space.table(ask, "pp", "chunks")


def _beside(rank: int, members: list[list[int]], ordered: bool) -> list[int]:
    """The other ranks of a rank's groups; of ordered pairs, of those that it begins."""
    own = (row for row in members if (row[0] == rank if ordered else rank in row))
    return [other for row in own for other in row if other != rank]
