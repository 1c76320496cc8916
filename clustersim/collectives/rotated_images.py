"""Which flows stand for their images?

Where GPUs of a node can change places (`hardware.rotation`), the groups of a role often do so too: the turn maps a group to
the next one, or a group of whole nodes to itself and each of its flows to the next. Both are checked here, member by
member. Then groups (or flows) of the first place in each node are routed, and links carry their images as well.
"""

from dataclasses import dataclass

import numpy as np

from clustersim.collectives.phase import Flows, Phase
from clustersim.common.arrays import IntArray
from clustersim.hardware.rotation import FabricRotation


@dataclass(frozen=True, slots=True)
class RotatedImages:
    """kept: the groups whose images are all groups; of: [groups] place in `kept` of the group that stands for each."""

    representatives: IntArray
    representative_index: IntArray


def rotated_images(members: IntArray, rotation: FabricRotation) -> RotatedImages | None:
    """The groups [groups, size] on first places of nodes, if all others are their images; else None."""
    local_ranks, first_members = np.arange(rotation.period), members[:, 0]
    representatives = np.flatnonzero(first_members % rotation.period == 0)
    if (
        len(representatives) * rotation.period != len(members)
        or (members[representatives] % rotation.period != 0).any()
    ):
        return None
    group_of_leader = np.full(int(first_members.max(initial=0)) + rotation.period, -1)
    group_of_leader[first_members] = np.arange(len(members))
    image_groups = group_of_leader[first_members[representatives][:, None] + local_ranks]
    if any(
        (members[image_groups[:, local_rank]] != members[representatives] + local_rank).any()
        for local_rank in local_ranks.tolist()
    ):
        return None
    representative_index = np.empty(len(members), dtype=np.int64)
    representative_index[image_groups] = np.arange(len(representatives))[:, None]
    return RotatedImages(representatives, representative_index)


def representative_flows(phase: Phase, rotation: FabricRotation) -> Phase | None:
    """One of the flows of a phase for each set of images, where its flows come in such sets; else None."""
    if not all(
        _is_full_rotation(ends, rotation.period) for flows in phase.flows for ends in (flows.sources, flows.targets)
    ):
        return None
    representatives = (
        Flows(flows.sources[..., 0], flows.targets[..., 0], flows.share, flows.is_p2p) for flows in phase.flows
    )
    return Phase(tuple(representatives), phase.latency_steps, phase.fill_stages)


def _is_full_rotation(gpus: IntArray, gpus_per_node: int) -> bool:
    """Whether the last axis leads from each GPU once round its node."""
    if gpus.shape[-1] != gpus_per_node:
        return False
    first = gpus[..., :1]
    local_rank = first % gpus_per_node
    return bool((gpus == first - local_rank + (local_rank + np.arange(gpus_per_node)) % gpus_per_node).all())
