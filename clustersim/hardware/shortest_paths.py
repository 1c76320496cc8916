"""Shortest routes through a graph.

Breadth-first from one vertex, level by level; within a level the least latency wins, and every predecessor
that attains it is kept, so that one of several equal routes can be chosen afterwards. Reference: Moore 1959;
Dijkstra 1959.
"""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

Predecessor = tuple[int, int]  # previous vertex, link id
AdjacentEdge = tuple[
    int, int, int
]  # next vertex, link id, latency in integer femtoseconds (so that equal sums compare equal)
Adjacency = dict[int, list[AdjacentEdge]]


@dataclass(frozen=True, slots=True)
class ShortestPathTree:
    """Result of a search: the least latency to each vertex, and the predecessors on all routes that attain it."""

    latency: dict[int, int]
    predecessors: dict[int, list[Predecessor]] = field(default_factory=dict)


def search_shortest(
    adjacency: Adjacency, source: int, targets: AbstractSet[int], barred: AbstractSet[int]
) -> ShortestPathTree:
    """Search until all targets are reached or nothing is left; routes pass through no barred vertex."""
    tree, level, missing = ShortestPathTree({source: 0}), [source], set(targets)
    while level and missing:
        next_level = ShortestPathTree({})
        for vertex in level:
            if vertex == source or vertex not in barred:
                _expand_vertex(adjacency.get(vertex, []), vertex, tree, next_level)
        tree.latency.update(next_level.latency)
        tree.predecessors.update(next_level.predecessors)
        missing -= next_level.latency.keys()
        level = list(next_level.latency)
    return tree


def _expand_vertex(
    edges: list[AdjacentEdge], vertex: int, tree: ShortestPathTree, next_level: ShortestPathTree
) -> None:
    """Add the edges of one vertex to the next level."""
    distance = tree.latency[vertex]
    for target, link, latency in edges:
        if target in tree.latency:
            continue
        total, best = distance + latency, next_level.latency.get(target)
        if best is None or total < best:
            next_level.latency[target], next_level.predecessors[target] = total, [(vertex, link)]
        elif total == best:
            next_level.predecessors[target].append((vertex, link))


def trace_route(tree: ShortestPathTree, target: int, choice: int) -> tuple[int, ...]:
    """Links of one route to a reached vertex; `choice` selects among equal ones, digit by digit, 0 the smallest id."""
    links: list[int] = []
    while predecessors := tree.predecessors.get(target):
        choice, digit = divmod(choice, len(predecessors))
        target, link = sorted(predecessors)[digit]
        links.append(link)
    return tuple(reversed(links))
