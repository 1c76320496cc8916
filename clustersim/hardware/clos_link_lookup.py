"""Which link of a regular cluster does a user mean by the names of its ends?"""

import numpy as np

from clustersim.common.errors import InputError
from clustersim.hardware.clos_wiring import Wiring
from clustersim.hardware.vertex_tier import Layer

MOST_LISTED = 4


def find(wiring: Wiring, source: str, target: str) -> int:
    """The number of the link from one end to another; raise InputError that says what is near."""
    ends = _vertex(wiring, source), _vertex(wiring, target)
    onwards: list[str] = []
    for run in wiring.runs():
        if not run.count or not _within(run.source.layer, ends[0]):
            continue
        leaving = np.flatnonzero(run.source.vertices(run.count) == ends[0])
        targets = run.target.layer.first + run.target.place(leaving)
        if ends[1] in targets:
            return run.first + int(leaving[targets == ends[1]][0])
        onwards += [run.target.name(int(index)) for index in leaving[[0, -1][: len(leaving)]]]
    raise InputError(f"no link leads from {source} to {target}; from {source} links lead to {_list(onwards)}")


def _vertex(wiring: Wiring, name: str) -> int:
    """The number of a vertex."""
    layers = [layer for layer in wiring.layers if layer.count]
    for layer in layers:
        vertex = layer.find(name)
        if vertex is not None:
            return vertex
    word = name.rstrip("0123456789.")
    alike = [layer.span for layer in layers if layer.word == word]
    if alike:
        raise InputError(f"there is no {name}; there are {' and '.join(alike)}")
    some = ", ".join(layer.name(0) for layer in layers)
    raise InputError(f"there is no {name} in this cluster; names are such as {some}")


def _within(layer: Layer, vertex: int) -> bool:
    return layer.first <= vertex < layer.first + layer.count


def _list(names: list[str]) -> str:
    """Some names, each once."""
    return ", ".join(list(dict.fromkeys(names))[:MOST_LISTED]) or "nowhere"
