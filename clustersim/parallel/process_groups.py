"""Which ranks form a process group?

The groups of each `CommGroup` lie on one of the layout's meshes: ranks that differ along its axes only, in
ascending order, so that neighbours on the fast axes stay neighbours. Along the pipeline, a group holds only
those that the placement of stages selects: the ranks with the embedding table, or (sender, receiver) pairs.
In bidirectional pipelines the two ranks of a counterpart pair are half of the data-parallel axis apart.

An encoder on ranks of its own hands over to the model's first stage in as small groups as possible: replicas of both
that have the same images, and of the ranks of one replica those that neighbouring shards of the encoder feed.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import (
    COMM_GROUPS,
    CONTEXT,
    DATA,
    PIPELINE,
    PP_COUNTERPART_GROUP,
    PP_NEXT_GROUP,
    PP_PREVIOUS_GROUP,
    TENSOR,
    WORLD_GROUP,
    CommGroup,
    GroupSpan,
)
from clustersim.program import placement
from clustersim.program.placement import Placement
from clustersim.program.program import ProcessGroups

P2P_DIRECTIONS = {PP_NEXT_GROUP: 1, PP_PREVIOUS_GROUP: -1, PP_COUNTERPART_GROUP: placement.COUNTERPART}
"""Direction of a p2p message (`Placement.direction`) by its group."""


def process_groups(
    layout: Layout, placement: Placement, embedding_ranks: Sequence[int] | None = None
) -> dict[str, ProcessGroups]:
    """All process groups of a layout by name; groups that the layout has none of are left out.

    embedding_ranks: pipeline ranks that hold the embedding table (None: those of the first and the last stage).
    """
    table_ranks = embedding_ranks or tuple(dict.fromkeys((placement.stage_ranks[0], placement.stage_ranks[-1])))
    meshes = layout.meshes
    groups_by_name = {
        comm_group.name: _build_groups(layout, comm_group, placement, table_ranks)
        for comm_group in COMM_GROUPS.values()
        if comm_group.mesh in meshes
    }
    return {name: groups for name, groups in groups_by_name.items() if len(groups.members)}


def groups_along_axes(layout: Layout, comm_groups: Iterable[CommGroup]) -> dict[str, ProcessGroups]:
    """Process groups of all ranks along some groups' axes, independent of the placement of stages."""
    return {
        comm_group.name: _axis_groups(layout, comm_group)
        for comm_group in comm_groups
        if comm_group.mesh in layout.meshes
    }


def _axis_groups(layout: Layout, comm_group: CommGroup) -> ProcessGroups:
    if comm_group is WORLD_GROUP and layout.encoder_ranks:
        return ProcessGroups(comm_group.name, np.arange(layout.world_size, dtype=np.int64)[None])
    return ProcessGroups(comm_group.name, layout.meshes[comm_group.mesh].groups_along(*comm_group.axes))


def _build_groups(
    layout: Layout, comm_group: CommGroup, placement: Placement, embedding_ranks: Sequence[int]
) -> ProcessGroups:
    if comm_group.span is GroupSpan.ALL:
        return _axis_groups(layout, comm_group)
    if comm_group.span is GroupSpan.EMBEDDING_RANKS:
        return ProcessGroups(
            comm_group.name,
            _pipeline_groups(layout, [embedding_ranks] if len(embedding_ranks) > 1 else [], len(embedding_ranks)),
        )
    if comm_group.span in (GroupSpan.FROM_ENCODER, GroupSpan.TO_ENCODER):
        return ProcessGroups(
            comm_group.name, _encoder_groups(layout, outward=comm_group.span is GroupSpan.FROM_ENCODER)
        )
    edges = placement.edges(P2P_DIRECTIONS[comm_group])
    if layout.encoder_ranks:
        edges = tuple(edge for edge in edges if 0 not in edge)
    return ProcessGroups(
        comm_group.name,
        _counterpart_pairs(layout, edges) if comm_group is PP_COUNTERPART_GROUP else _pipeline_groups(layout, edges),
        ordered=True,
    )


def _pipeline_groups(layout: Layout, stage_ranks: Sequence[Sequence[int]], size: int = 2) -> IntArray:
    """Ranks with these pipeline coordinates, on every line of the pipeline: [lines x coordinate sets, size]."""
    coordinates = np.array(stage_ranks, dtype=np.int64).reshape(-1, size) - (layout.encoder_ranks > 0)
    return np.ascontiguousarray(layout.mesh.groups_along(PIPELINE)[:, coordinates].reshape(-1, size))


def _counterpart_pairs(layout: Layout, edges: Sequence[tuple[int, int]]) -> IntArray:
    """Ranks with one of these pipeline coordinates, and their counterparts: [pairs, 2]."""
    dp_lines = layout.mesh.groups_along(DATA)
    dp_lines = dp_lines[np.isin(layout.rank_coordinates(PIPELINE)[dp_lines[:, 0]], [sender for sender, _ in edges])]
    return np.stack([dp_lines, np.roll(dp_lines, layout.dp // 2, axis=1)], axis=-1).reshape(-1, 2)


def _encoder_groups(layout: Layout, *, outward: bool) -> IntArray:
    """Ranks of an encoder on ranks of its own, and those of the model that they exchange with: [groups, members].

    outward: the encoder's are first, else the model's.
    """
    if not layout.encoder_ranks:
        return np.zeros((0, 2), dtype=np.int64)
    cells, (tp, slots, shards), stage = layout.encoder_cells, _encoder_shards(layout), layout.rank_coordinates(PIPELINE)
    by_place = np.lexsort([layout.rank_coordinates(axis) for axis in (TENSOR, CONTEXT, DATA)])
    sides = [
        ranks.reshape(cells, -1, shards, size // shards).swapaxes(1, 2).reshape(cells * shards, -1)
        for ranks, size in ((np.arange(layout.encoder_ranks), tp), (by_place[stage[by_place] == 1], slots))
    ]
    return np.ascontiguousarray(np.concatenate(sides if outward else sides[::-1], axis=1))


def encoder_group_sizes(layout: Layout) -> tuple[int, int]:
    """Ranks of an encoder, and ranks of the model, in each group that hands over between them."""
    _, slots, shards = _encoder_shards(layout)
    groups = layout.encoder_cells * shards
    return layout.encoder_ranks // groups, layout.dp * slots // groups


def _encoder_shards(layout: Layout) -> tuple[int, int, int]:
    """Ranks of a replica of the encoder and of the model's first stage; sets of them that exchange by themselves."""
    tp, slots = layout.effective_encoder_tp, layout.tp * layout.cp
    return tp, slots, math.gcd(tp, slots)
