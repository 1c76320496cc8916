"""Which ranks form a process group?

Every role's groups lie on one of the layout's meshes: ranks that differ along the role's axes only, in ascending order,
so that neighbours on the fast axes stay neighbours. Of those, all; or, along the pipeline, what the placement of stages
says: the ranks that hold the embedding's matrix, or ordered pairs that send to each other. Where pipelines run towards
each other, those of a pair are half of the data-parallel axis apart.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import ACROSS, DATA, NEXT, PIPELINE, PREVIOUS, ROLES, Role, Span
from clustersim.program import placement as places
from clustersim.program.placement import Placement
from clustersim.program.program import ProcessGroups

WAYS = {NEXT: 1, PREVIOUS: -1, ACROSS: places.COUNTERPART}
"""The way of a message (`Placement.direction`) by its role."""


def process_groups(
    layout: Layout, placement: Placement, tables: Sequence[int] | None = None
) -> dict[str, ProcessGroups]:
    """All groups of a layout by role; of a role that the layout has none of, nothing.

    tables: pipeline ranks that hold the embedding's matrix (None: those of the first and the last stage).
    """
    ends = tables or tuple(dict.fromkeys((placement.stage_ranks[0], placement.stage_ranks[-1])))
    meshes = layout.meshes
    made = {role.name: _groups(layout, role, placement, ends) for role in ROLES.values() if role.mesh in meshes}
    return {name: groups for name, groups in made.items() if len(groups.members)}


def groups_of(layout: Layout, roles: Iterable[Role]) -> dict[str, ProcessGroups]:
    """The groups of some roles that hold all who differ along axes, whatever the placement of stages."""
    return {role.name: _whole(layout, role) for role in roles if role.mesh in layout.meshes}


def _whole(layout: Layout, role: Role) -> ProcessGroups:
    return ProcessGroups(role.name, layout.meshes[role.mesh].members(*role.axes))


def _groups(layout: Layout, role: Role, placement: Placement, tables: Sequence[int]) -> ProcessGroups:
    if role.span is Span.ALL:
        return _whole(layout, role)
    if role.span is Span.TABLES:
        return ProcessGroups(role.name, _along(layout, [tables] if len(tables) > 1 else [], len(tables)))
    hops = placement.edges(WAYS[role])
    return ProcessGroups(role.name, _across(layout, hops) if role is ACROSS else _along(layout, hops), ordered=True)


def _along(layout: Layout, places: Sequence[Sequence[int]], size: int = 2) -> IntArray:
    """Ranks with so many of these pipeline coordinates, on every line of the pipeline: [lines x places, size]."""
    coordinates = np.array(places, dtype=np.int64).reshape(-1, size)
    return np.ascontiguousarray(layout.mesh.members(PIPELINE)[:, coordinates].reshape(-1, size))


def _across(layout: Layout, places: Sequence[tuple[int, int]]) -> IntArray:
    """Ranks with one of these pipeline coordinates, and those opposite: [pairs, 2]."""
    lines = layout.mesh.members(DATA)
    lines = lines[np.isin(layout.coordinate(PIPELINE)[lines[:, 0]], [here for here, _ in places])]
    return np.stack([lines, np.roll(lines, layout.dp // 2, axis=1)], axis=-1).reshape(-1, 2)
