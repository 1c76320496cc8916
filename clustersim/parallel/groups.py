"""Which ranks form a process group?

Every role's groups lie on the layout's mesh: ranks that differ along the role's axes only, in ascending order, so that
neighbours on the fast axes stay neighbours; of those, all, the two ends, or ordered pairs of neighbours.
"""

import numpy as np

from clustersim.arrays import IntArray
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import PIPELINE, ROLES, Role, Span
from clustersim.program.program import Groups

_STEPS = {Span.NEXT: 1, Span.PREVIOUS: -1}


def neighbours(layout: Layout, step: int, *, wrap: bool) -> IntArray:
    """Ordered pairs (rank, rank `step` pipeline ranks further): [pairs, 2]; `wrap` joins the last rank to the first."""
    lines = layout.mesh.members(PIPELINE)
    targets = np.roll(lines, -step, axis=1)
    pairs = np.stack([lines, targets], axis=-1)
    if not wrap:
        pairs = pairs[:, :-step] if step > 0 else pairs[:, -step:]
    return np.ascontiguousarray(pairs.reshape(-1, 2))


def process_groups(layout: Layout, *, chunks: int = 1) -> dict[str, Groups]:
    """All groups of a layout by role; what needs a pipeline is left out where there is none."""
    return {
        role.name: _groups(layout, role, wrap=chunks > 1)
        for role in ROLES.values()
        if role.span is Span.ALL or layout.pp > 1
    }


def _groups(layout: Layout, role: Role, *, wrap: bool) -> Groups:
    if role.span in _STEPS:
        return Groups(role.name, neighbours(layout, _STEPS[role.span], wrap=wrap), ordered=True)
    members = layout.meshes[role.mesh].members(*role.axes)
    return Groups(role.name, members[:, [0, -1]] if role.span is Span.ENDS else members)
