"""Which replicas are the first to be ready for an exchange of local training?

Those whose own inner steps, and what they wait for their outer gradients to reach a common site and to come back, are
shortest. Of all sites as the common one (where a syncer would be) the best is taken. An exchange that waits for a
quorum is made by the first of them, so neither a slow GPU nor a slow link outside the quorum holds the others up.

Assumption: replicas of one site share its links, each by itself in its turn.
Reference: Douillard et al. 2026, arXiv:2604.21428 (a syncer that waits for a minimum of learners).
"""

from collections.abc import Callable, Sequence

from clustersim.common.units import Bytes, Seconds
from clustersim.hardware.topology import Fabric
from clustersim.reliability.replica_places import ReplicaPlace, transfer_seconds

ReadySeconds = Callable[[int, Seconds], Seconds]
"""When a replica (by its index) has finished a round, if its exchange takes so long."""


def first_ready(
    fabric: Fabric, slots: Sequence[ReplicaPlace], payload: Bytes, *, count: int, ready: ReadySeconds
) -> tuple[int, ...]:
    """Indices of so many replicas in the order in which they are ready; all of them in their own order."""
    if count == len(slots):
        return tuple(range(count))
    first_of_site = {slot.sites: slot for slot in reversed(slots)}
    choices = []
    for hub in first_of_site.values():
        seconds = {sites: _round_trip(fabric, slot, hub, payload) for sites, slot in first_of_site.items()}
        readiness = [(ready(index, seconds[slot.sites]), index) for index, slot in enumerate(slots)]
        choices.append(sorted(readiness)[:count])
    return tuple(index for _, index in min(choices, key=lambda chosen: (chosen[-1][0], chosen)))


def _round_trip(fabric: Fabric, slot: ReplicaPlace, hub: ReplicaPlace, payload: Bytes) -> Seconds:
    """Outer gradients to the common site, and the average back."""
    if slot is hub:
        return 0.0
    return transfer_seconds(fabric, slot, hub, payload) + transfer_seconds(fabric, hub, slot, payload)
