"""Which groups and flows are rotations of each other?

Where rotating the local ranks of all nodes is an automorphism of the fabric (`hardware.rotation`), it often
maps groups to each other too: a group to the next one, or a group of complete nodes to itself and each of its
flows to the next. Both are checked here, member by member. Then only groups (or flows) of local rank 0 are
routed, and links carry their rotated images as well.
"""

from dataclasses import dataclass

import numpy as np

from clustersim.collectives.phase import Flows, Phase
from clustersim.common.arrays import IntArray
from clustersim.hardware.rotation import FabricRotation


@dataclass(frozen=True, slots=True)
class RotatedImages:
    """Orbits of groups. representatives: groups whose images are all groups.

    representative_index: [groups] index in `representatives` of the one that each group is an image of.
    """

    representatives: IntArray
    representative_index: IntArray


def rotated_images(members: IntArray, rotation: FabricRotation) -> RotatedImages | None:
    """Orbits of groups [groups, size] if those on local rank 0 represent all others; else None."""
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
    """One flow of each orbit, where the flows of a phase form complete orbits along their last axis; else None."""
    if not all(
        _is_full_rotation(ends, rotation.period) for flows in phase.flows for ends in (flows.sources, flows.targets)
    ):
        return None
    representatives = (
        Flows(flows.sources[..., 0], flows.targets[..., 0], flows.share, flows.is_p2p) for flows in phase.flows
    )
    return Phase(tuple(representatives), phase.latency_steps, phase.fill_stages)


def _is_full_rotation(gpus: IntArray, gpus_per_node: int) -> bool:
    """Whether the last axis visits all local ranks of a node in rotation, starting at each first GPU."""
    if gpus.shape[-1] != gpus_per_node:
        return False
    first = gpus[..., :1]
    local_rank = first % gpus_per_node
    return bool((gpus == first - local_rank + (local_rank + np.arange(gpus_per_node)) % gpus_per_node).all())
