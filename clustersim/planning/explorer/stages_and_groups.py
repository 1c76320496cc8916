"""Which layers are on which pipeline rank, and which ranks communicate? Tables of the plan and its groups."""

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
from clustersim.planning.explorer.settings import ExplorerSpace
from clustersim.program.placement import looped_placement
from clustersim.results.explorer_tables import LookupTable

StageEntries = list[list[list[int | bool]]]


def stage_table(space: ExplorerSpace) -> LookupTable:
    """For each pipeline rank, [first layer, layers, has embedding, has head, content] of each of its stages."""
    content_index = {stack: index for index, stack in enumerate(space.stage_contents)}

    def ask(model: int, pp: int, chunks: int) -> StageEntries | None:
        if not space.has_legal_stages(model, pp, chunks):
            return None
        plan = space.plan_with(model=model, pp=pp, chunks=chunks)
        first_layers = [0, *accumulate(stage.layer_count for stage in plan.stages)]

        def stage_entry(stage: PipelineStage) -> list[int | bool]:
            content = content_index.get(stage.stack, stage.layer_count)
            return [first_layers[stage.index], stage.layer_count, stage.has_embedding, stage.has_head, content]

        return [[*map(stage_entry, plan.stages_on_rank(rank))] for rank in range(pp)]

    return space.build_table(ask, "model", "pp", "chunks")


def comm_group_axes(space: ExplorerSpace) -> dict[str, tuple[str, ...]]:
    """The axes along which the members of each process group differ, in rank order."""
    dense_layout = replace(Layout(**dict.fromkeys(DENSE_AXIS_NAMES, 2)), order=space.scenario.layout.order)  # type: ignore[arg-type]
    layout = replace(dense_layout, ep=2, etp=2) if space.is_moe else dense_layout
    groups, drawn_axes = (
        process_groups(layout, looped_placement(layout.pp)),
        {axis for axis_names in mesh_axes(space) for axis in axis_names},
    )
    comm_groups = (
        comm_group
        for comm_group in COMM_GROUPS.values()
        if comm_group.name in (drawn_axes - {"pp"}) | {ETP_EP_GROUP.name}
    )
    return {
        comm_group.name: _differing_axes(layout, comm_group, groups[comm_group.name].members[0])
        for comm_group in comm_groups
        if comm_group.name in groups
    }


def mesh_axes(space: ExplorerSpace) -> tuple[tuple[str, ...], ...]:
    """The axes of each mesh over the ranks, fastest-varying first."""
    experts = (tuple(axis.name for axis in MESHES[EXPERT_MESH]),) if space.is_moe else ()
    return (space.scenario.layout.order, *experts)


def _differing_axes(layout: Layout, comm_group: CommGroup, ranks: IntArray) -> tuple[str, ...]:
    """The mesh axes along which the members of a group differ."""
    mesh = layout.meshes[comm_group.mesh]
    axis_by_name = {axis.name: axis for axis in MESHES[comm_group.mesh]}
    return tuple(name for name in mesh.degrees if len(np.unique(mesh.rank_coordinates(axis_by_name[name])[ranks])) > 1)


def peer_table(space: ExplorerSpace) -> LookupTable:
    """By comm group, for each pipeline rank the ranks that it sends to or is grouped with."""

    def ask(pp: int, chunks: int) -> dict[str, list[list[int]]]:
        groups = process_groups(Layout(pp=pp), looped_placement(pp, chunks))
        pairs = {
            comm_group.name: groups[comm_group.name] for comm_group in COMM_GROUPS.values() if comm_group.name in groups
        }
        pairs = {name: group for name, group in pairs.items() if COMM_GROUPS[name].span is not GroupSpan.ALL}
        return {
            comm_group: [_peers(rank, group.members.tolist(), group.ordered) for rank in range(pp)]
            for comm_group, group in pairs.items()
        }

    return space.build_table(ask, "pp", "chunks")


def _peers(rank: int, groups: list[list[int]], is_p2p: bool) -> list[int]:
    """The other ranks of a rank's groups; of P2P pairs only those in which it is the sender."""
    rank_groups = (group for group in groups if (group[0] == rank if is_p2p else rank in group))
    return [peer for group in rank_groups for peer in group if peer != rank]
