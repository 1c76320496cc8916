"""Which ranks form a process group?

Ranks are numbered along the layout's order of axes, the first axis fastest; a group holds the ranks that differ only in
their coordinates on the group's axes. Members are in ascending rank, so neighbours on the fast axes stay neighbours.
"""

import numpy as np

from clustersim.arrays import IntArray
from clustersim.parallel.layout import Layout
from clustersim.program.program import Groups


def mesh(layout: Layout) -> IntArray:
    """Rank numbers as an array with one dimension per axis, in reversed order (the first axis of the order is last)."""
    degrees = [getattr(layout, axis) for axis in reversed(layout.order)]
    return np.arange(layout.world, dtype=np.int64).reshape(degrees)


def coordinate(layout: Layout, axis: str) -> IntArray:
    """Coordinate of every rank on one axis: [ranks]."""
    grid: IntArray = np.indices(mesh(layout).shape)[_dimension(layout, axis)]
    return grid.reshape(-1)


def members(layout: Layout, *axes: str) -> IntArray:
    """Groups along some axes: [groups, product of their degrees].

    >>> members(Layout(tp=2, dp=2), "dp").tolist()
    [[0, 2], [1, 3]]
    """
    grid = mesh(layout)
    dimensions = sorted(_dimension(layout, axis) for axis in axes)
    moved = np.moveaxis(grid, dimensions, range(grid.ndim - len(dimensions), grid.ndim))
    size = int(np.prod([grid.shape[dimension] for dimension in dimensions]))
    return np.ascontiguousarray(moved.reshape(-1, size))


def neighbours(layout: Layout, step: int, *, wrap: bool) -> IntArray:
    """Ordered pairs (rank, rank `step` pipeline ranks further): [pairs, 2]; `wrap` joins the last rank to the first."""
    lines = members(layout, "pp")
    targets = np.roll(lines, -step, axis=1)
    pairs = np.stack([lines, targets], axis=-1)
    if not wrap:
        pairs = pairs[:, :-step] if step > 0 else pairs[:, -step:]
    return np.ascontiguousarray(pairs.reshape(-1, 2))


def process_groups(layout: Layout, *, chunks: int = 1) -> dict[str, Groups]:
    """All groups of a layout by role.

    tp, cp: their axes; dp: ranks that hold the same weights (dp x cp); model: ranks of one replica (tp x pp);
    world: everyone; pp_next, pp_previous: ordered pairs; embedding: first and last pipeline rank.
    """
    symmetric = {
        "tp": members(layout, "tp"),
        "cp": members(layout, "cp"),
        "dp": members(layout, "dp", "cp"),
        "model": members(layout, "tp", "pp"),
        "world": members(layout, *layout.order),
    }
    groups = {role: Groups(role, ranks) for role, ranks in symmetric.items()}
    if layout.pp > 1:
        wrap = chunks > 1
        groups["pp_next"] = Groups("pp_next", neighbours(layout, 1, wrap=wrap), ordered=True)
        groups["pp_previous"] = Groups("pp_previous", neighbours(layout, -1, wrap=wrap), ordered=True)
        groups["embedding"] = Groups("embedding", members(layout, "pp")[:, [0, -1]])
    return groups


def _dimension(layout: Layout, axis: str) -> int:
    return len(layout.order) - 1 - layout.order.index(axis)
