"""Lookup of a regular cluster's links by the names of their endpoints."""

import numpy as np

from clustersim.common.errors import InputError
from clustersim.hardware.clos_wiring import ClosWiring
from clustersim.hardware.vertex_tier import VertexTier

MAX_LISTED = 4


def find_link(wiring: ClosWiring, source: str, target: str) -> int:
    """Id of the link from one endpoint to another; raise InputError with a suggestion."""
    vertices = _find_vertex(wiring, source), _find_vertex(wiring, target)
    reachable: list[str] = []
    for link_range in wiring.link_ranges():
        if not link_range.count or not _contains_vertex(link_range.source.tier, vertices[0]):
            continue
        indices = np.flatnonzero(link_range.source.vertex_ids(link_range.count) == vertices[0])
        targets = link_range.target.tier.first_id + link_range.target.vertex_index(indices)
        if vertices[1] in targets:
            return link_range.first_id + int(indices[targets == vertices[1]][0])
        reachable += [link_range.target.vertex_name(int(index)) for index in indices[[0, -1][: len(indices)]]]
    raise InputError(f"no link leads from {source} to {target}; from {source} links lead to {_format_names(reachable)}")


def _find_vertex(wiring: ClosWiring, name: str) -> int:
    """Id of the vertex of this name; raise InputError with a suggestion."""
    tiers = [tier for tier in wiring.tiers if tier.count]
    for tier in tiers:
        vertex = tier.find_vertex(name)
        if vertex is not None:
            return vertex
    prefix = name.rstrip("0123456789.")
    spans = [tier.name_range for tier in tiers if tier.kind == prefix]
    if spans:
        raise InputError(f"there is no {name}; there are {' and '.join(spans)}")
    examples = ", ".join(tier.vertex_name(0) for tier in tiers)
    raise InputError(f"there is no {name} in this cluster; names are such as {examples}")


def _contains_vertex(tier: VertexTier, vertex: int) -> bool:
    return tier.first_id <= vertex < tier.first_id + tier.count


def _format_names(names: list[str]) -> str:
    """Some of the names, without duplicates."""
    return ", ".join(list(dict.fromkeys(names))[:MAX_LISTED]) or "nowhere"
