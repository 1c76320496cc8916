"""Which ranks form a process group?

Every role's groups lie on one of the layout's meshes: ranks that differ along the role's axes only, in ascending order,
so that neighbours on the fast axes stay neighbours. Of those, all; or, along the pipeline, what the placement of stages
says: the ranks of the first and the last stage, or ordered pairs that send to each other.
"""

from collections.abc import Sequence

import numpy as np

from clustersim.arrays import IntArray
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import NEXT, PIPELINE, PREVIOUS, ROLES, Role, Span
from clustersim.program.placement import Placement
from clustersim.program.program import Groups

WAYS = {NEXT: 1, PREVIOUS: -1}
"""The way of a message (`Placement.way`) by its role."""


def process_groups(layout: Layout, placement: Placement) -> dict[str, Groups]:
    """All groups of a layout by role; of a role that the layout has none of, nothing."""
    meshes = layout.meshes
    made = {role.name: _groups(layout, role, placement) for role in ROLES.values() if role.mesh in meshes}
    return {name: groups for name, groups in made.items() if len(groups.members)}


def _groups(layout: Layout, role: Role, placement: Placement) -> Groups:
    if role.span is Span.ALL:
        return Groups(role.name, layout.meshes[role.mesh].members(*role.axes))
    if role.span is Span.ENDS:
        ends = placement.ranks[0], placement.ranks[-1]
        return Groups(role.name, _along(layout, [ends] if ends[0] != ends[1] else []))
    return Groups(role.name, _along(layout, placement.hops(WAYS[role])), ordered=True)


def _along(layout: Layout, pairs: Sequence[tuple[int, int]]) -> IntArray:
    """Pairs of ranks with these pairs of pipeline coordinates, on every line of the pipeline: [lines x pairs, 2]."""
    places = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return np.ascontiguousarray(layout.mesh.members(PIPELINE)[:, places].reshape(-1, 2))
