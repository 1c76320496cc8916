"""Which flows stand for their images?

Where GPUs of a node can change places (`hardware.rotation`), the groups of a role often do so too: the turn maps a group to
the next one, or a group of whole nodes to itself and each of its flows to the next. Both are checked here, member by
member. Then groups (or flows) of the first place in each node are routed, and links carry their images as well.
"""

from dataclasses import dataclass

import numpy as np

from clustersim.collectives.phase import Flows, Phase
from clustersim.common.arrays import IntArray
from clustersim.hardware.rotation import Turn


@dataclass(frozen=True, slots=True)
class Images:
    """kept: the groups whose images are all groups; of: [groups] place in `kept` of the group that stands for each."""

    kept: IntArray
    of: IntArray


def images(members: IntArray, turn: Turn) -> Images | None:
    """The groups [groups, size] on first places of nodes, if all others are their images; else None."""
    places, leads = np.arange(turn.places), members[:, 0]
    kept = np.flatnonzero(leads % turn.places == 0)
    if len(kept) * turn.places != len(members) or (members[kept] % turn.places != 0).any():
        return None
    row = np.full(int(leads.max(initial=0)) + turn.places, -1)
    row[leads] = np.arange(len(members))
    rows = row[leads[kept][:, None] + places]
    if any((members[rows[:, place]] != members[kept] + place).any() for place in places.tolist()):
        return None
    of = np.empty(len(members), dtype=np.int64)
    of[rows] = np.arange(len(kept))[:, None]
    return Images(kept, of)


def one_of_each(phase: Phase, turn: Turn) -> Phase | None:
    """One of the flows of a phase for each set of images, where its flows come in such sets; else None."""
    if not all(_in_turn(ends, turn.places) for part in phase.parts for ends in (part.sources, part.targets)):
        return None
    parts = (Flows(part.sources[..., 0], part.targets[..., 0], part.share, part.message) for part in phase.parts)
    return Phase(tuple(parts), phase.rounds, phase.stages)


def _in_turn(gpus: IntArray, places: int) -> bool:
    """Whether the last axis leads from each GPU once round its node."""
    if gpus.shape[-1] != places:
        return False
    first = gpus[..., :1]
    place = first % places
    return bool((gpus == first - place + (place + np.arange(places)) % places).all())
