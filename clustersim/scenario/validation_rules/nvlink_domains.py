"""Which groups of a layout lie badly on the NVLink domains of a cluster?

Tensor- and context-parallel groups that reach beyond a domain send to each other over the network in every layer.
Other groups reach beyond one on purpose, but as many routes lead out of each domain as the one with the fewest members
has (`collectives.phase`), so that the NICs of the others are idle. What would be even is tried, not guessed: as many
ranks on every domain as divide the job, most first, down to half a domain.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np

from clustersim.common.arrays import BoolArray, IntArray
from clustersim.parallel.mesh import (
    CP_GROUP,
    DP_GROUP,
    DP_REPLICATE_GROUP,
    DP_SHARD_GROUP,
    HYBRID_MESH,
    TP_GROUP,
    CommGroup,
)
from clustersim.scenario.nearest_values import divisors, multiples_around
from clustersim.scenario.resolved import Setup

_WHOLE: Final = "the machine's own order (no cluster.placement)"


def straddling(scenario: Setup) -> Iterator[str]:
    """Sentences about groups that reach beyond domains, and about those that fill them unevenly."""
    domains = scenario.cluster.fabric.domains(np.arange(scenario.layout.world_size))
    yield from _beyond(scenario, domains)
    if _largest(domains) > 1:
        yield from _uneven(scenario, domains)


def _beyond(scenario: Setup, domains: IntArray) -> Iterator[str]:
    """Tensor-parallel groups that leave a domain; context-parallel ones if some do and some do not."""
    for role in (TP_GROUP, CP_GROUP):
        groups = _groups(scenario, role)
        split = int(np.count_nonzero(_spread(domains[groups])))
        if split and (role is TP_GROUP or split < len(groups)):
            degree, most = groups.shape[1], _largest(domains)
            yield (
                f"{split:,} of {len(groups):,} {_words(role, degree)} reach beyond one NVLink domain "
                f"and use the network for every layer{_better(scenario) if degree <= most else ''}"
            )


def _uneven(scenario: Setup, domains: IntArray) -> Iterator[str]:
    """Groups with more members in one domain than in another, role by role, but for those that should be inside."""
    for role in _roles(scenario)[1:]:  # the first are the tensor-parallel ones
        groups = _groups(scenario, role)
        least, most = _members(domains[groups])
        uneven = least != most
        if uneven.any():
            count = int(np.count_nonzero(uneven))
            yield (
                f"{count:,} of {len(groups):,} {_words(role, groups.shape[1])} fill NVLink domains unevenly, with "
                f"{least[uneven].min():,} to {most[uneven].max():,} members in each: between domains each has "
                f"only as many routes as the smallest has members{_better(scenario)}"
            )


def _roles(scenario: Setup) -> tuple[CommGroup, ...]:
    """Roles whose groups exchange much, and all at once."""
    hybrid = HYBRID_MESH in scenario.layout.meshes
    return (TP_GROUP, CP_GROUP, *((DP_SHARD_GROUP, DP_REPLICATE_GROUP) if hybrid else (DP_GROUP,)))


def _groups(scenario: Setup, role: CommGroup) -> IntArray:
    return scenario.layout.meshes[role.mesh].groups_along(*role.axes)


def _words(role: CommGroup, degree: int) -> str:
    return f"{role.accounted_axis.label} groups ({role.label} {degree:,})"


def _better(scenario: Setup) -> str:
    """What would be even, and inside for tensor parallelism: ranks on each domain, or else GPUs of the job."""
    world, whole = scenario.layout.world_size, scenario.cluster.units.domain
    for ranks in reversed([divisor for divisor in divisors(world) if whole / 2 <= divisor <= whole]):
        if not any(_bad(scenario, role, ranks) for role in _roles(scenario)):
            return f"; {_WHOLE if ranks == whole else f'cluster.placement {{per_domain: {ranks}}} alone'} is even"
    return f"; {multiples_around(world, whole)} GPUs fill whole domains" if world % whole else ""


def _bad(scenario: Setup, role: CommGroup, ranks: int) -> bool:
    """Whether groups of a role would lie badly on domains of so many ranks."""
    domains = _groups(scenario, role) // ranks
    least, most = _members(domains)
    return bool((least != most).any() or (role is TP_GROUP and _spread(domains).any()))


def _spread(domains: IntArray) -> BoolArray:
    """Whether each row has several domains: [groups]."""
    several: BoolArray = domains.min(axis=1) != domains.max(axis=1)
    return several


def _members(domains: IntArray) -> tuple[IntArray, IntArray]:
    """Of each row the fewest and the most members in one domain: [groups] each."""
    ordered = np.sort(domains, axis=1)
    starts = np.diff(ordered, axis=1, prepend=-1) != 0
    place = np.flatnonzero(starts.reshape(-1))
    sizes = np.diff(np.append(place, starts.size))
    row = place // domains.shape[1]
    least, most = np.full(len(domains), domains.shape[1]), np.zeros(len(domains), np.int64)
    np.minimum.at(least, row, sizes)
    np.maximum.at(most, row, sizes)
    return least, most


def _largest(domains: IntArray) -> int:
    """Ranks of the domain that has most."""
    return int(np.bincount(domains).max())
