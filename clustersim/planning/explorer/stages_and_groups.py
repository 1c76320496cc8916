"""Which layers lie on which pipeline rank, and who talks to whom? The plan's and the groups' own answers, as tables."""

from dataclasses import replace
from itertools import accumulate

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.parallel.layer_partition import PipelineStage
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import (
    COMM_GROUPS,
    DENSE_AXIS_NAMES,
    ETP_EP_GROUP,
    EXPERT_MESH,
    MESHES,
    CommGroup,
    GroupSpan,
)
from clustersim.parallel.process_groups import process_groups
from clustersim.planning.explorer.settings import Space
from clustersim.program.placement import looped_placement
from clustersim.results.explorer_tables import Table

Placed = list[list[list[int | bool]]]


def stages(space: Space) -> Table:
    """For each pipeline rank [first layer, layers, embedding, head, content] of each of its stages."""
    contents = {stack: place for place, stack in enumerate(space.contents)}

    def ask(model: int, pp: int, chunks: int) -> Placed | None:
        if not space.lays(model, pp, chunks):
            return None
        plan = space.plan(model=model, pp=pp, chunks=chunks)
        first = [0, *accumulate(stage.layer_count for stage in plan.stages)]

        def row(stage: PipelineStage) -> list[int | bool]:
            content = contents.get(stage.stack, stage.layer_count)
            return [first[stage.index], stage.layer_count, stage.has_embedding, stage.has_head, content]

        return [[*map(row, plan.stages_on_rank(rank))] for rank in range(pp)]

    return space.table(ask, "model", "pp", "chunks")


def roles(space: Space) -> dict[str, tuple[str, ...]]:
    """The axes along which the members of each process group differ, in the order of their ranks."""
    plain = replace(Layout(**dict.fromkeys(DENSE_AXIS_NAMES, 2)), order=space.scenario.layout.order)  # type: ignore[arg-type]
    layout = replace(plain, ep=2, etp=2) if space.mixture else plain
    groups, orders = (
        process_groups(layout, looped_placement(layout.pp)),
        {axis for order in axes(space) for axis in order},
    )
    drawn = (role for role in COMM_GROUPS.values() if role.name in (orders - {"pp"}) | {ETP_EP_GROUP.name})
    return {role.name: _along(layout, role, groups[role.name].members[0]) for role in drawn if role.name in groups}


def axes(space: Space) -> tuple[tuple[str, ...], ...]:
    """The axes of each mesh over the ranks, the one with adjacent ranks first."""
    experts = (tuple(axis.name for axis in MESHES[EXPERT_MESH]),) if space.mixture else ()
    return (space.scenario.layout.order, *experts)


def _along(layout: Layout, role: CommGroup, ranks: IntArray) -> tuple[str, ...]:
    """The axes of its mesh along which the members of a group differ."""
    mesh = layout.meshes[role.mesh]
    there = {axis.name: axis for axis in MESHES[role.mesh]}
    return tuple(name for name in mesh.degrees if len(np.unique(mesh.rank_coordinates(there[name])[ranks])) > 1)


def partners(space: Space) -> Table:
    """By role, for each pipeline rank those that it sends to or is grouped with."""

    def ask(pp: int, chunks: int) -> dict[str, list[list[int]]]:
        groups = process_groups(Layout(pp=pp), looped_placement(pp, chunks))
        pairs = {role.name: groups[role.name] for role in COMM_GROUPS.values() if role.name in groups}
        pairs = {name: group for name, group in pairs.items() if COMM_GROUPS[name].span is not GroupSpan.ALL}
        return {
            role: [_beside(rank, group.members.tolist(), group.ordered) for rank in range(pp)]
            for role, group in pairs.items()
        }

    return space.table(ask, "pp", "chunks")


def _beside(rank: int, members: list[list[int]], ordered: bool) -> list[int]:
    """The other ranks of a rank's groups; of ordered pairs, of those that it begins."""
    own = (row for row in members if (row[0] == rank if ordered else rank in row))
    return [other for row in own for other in row if other != rank]
