"""Which routes through a graph are shortest?

Breadth-first from one vertex, layer by layer; within a layer the least latency wins, and every predecessor that attains
it is kept, so that one of several equal routes can be chosen afterwards. Reference: Moore 1959; Dijkstra 1959.
"""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

Step = tuple[int, int]  # previous vertex, link number
Edge = tuple[int, int, int]  # next vertex, link number, latency in femtoseconds (whole, so that equal sums are equal)
Mesh = dict[int, list[Edge]]


@dataclass(frozen=True, slots=True)
class Reached:
    """What a search found: the least latency to each vertex, and the last steps of all routes that attain it."""

    latency: dict[int, int]
    steps: dict[int, list[Step]] = field(default_factory=dict)


def search(mesh: Mesh, source: int, targets: AbstractSet[int], barred: AbstractSet[int]) -> Reached:
    """Search until all targets are found or nothing is left; routes pass through no barred vertex."""
    reached, layer, missing = Reached({source: 0}), [source], set(targets)
    while layer and missing:
        found = Reached({})
        for vertex in layer:
            if vertex == source or vertex not in barred:
                _expand(mesh.get(vertex, []), vertex, reached, found)
        reached.latency.update(found.latency)
        reached.steps.update(found.steps)
        missing -= found.latency.keys()
        layer = list(found.latency)
    return reached


def _expand(edges: list[Edge], vertex: int, reached: Reached, found: Reached) -> None:
    """Add the edges of one vertex to the next layer."""
    so_far = reached.latency[vertex]
    for target, link, latency in edges:
        if target in reached.latency:
            continue
        total, best = so_far + latency, found.latency.get(target)
        if best is None or total < best:
            found.latency[target], found.steps[target] = total, [(vertex, link)]
        elif total == best:
            found.steps[target].append((vertex, link))


def trace(reached: Reached, target: int, choice: int) -> tuple[int, ...]:
    """Links of one route to a found vertex; `choice` picks among equals, digit by digit, 0 the smallest number."""
    links: list[int] = []
    while steps := reached.steps.get(target):
        choice, digit = divmod(choice, len(steps))
        target, link = sorted(steps)[digit]
        links.append(link)
    return tuple(reversed(links))
