"""Which comm groups of a layout are badly mapped to the cluster's NVLink domains?

Tensor- and context-parallel groups that span several domains communicate over the network in every layer.
Other groups span domains on purpose, but the number of rails between domains is that of the domain with the
fewest members (`collectives.phase`), so the NICs of the other members are idle. The suggested even placement
is found by search: all divisors of the world size as ranks per domain, descending, down to half a domain.
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
from clustersim.scenario.nearest_values import divisors, nearest_multiples
from clustersim.scenario.resolved import ResolvedScenario

_DEFAULT_ORDER_TEXT: Final = "the machine's own order (no cluster.placement)"


def nvlink_domain_warnings(scenario: ResolvedScenario) -> Iterator[str]:
    """Warnings about groups that span domains, and about groups that fill domains unevenly."""
    domain_ids = scenario.cluster.fabric.domain_ids(np.arange(scenario.layout.world_size))
    yield from _cross_domain_groups(scenario, domain_ids)
    if _max_domain_size(domain_ids) > 1:
        yield from _unevenly_spread_groups(scenario, domain_ids)


def _cross_domain_groups(scenario: ResolvedScenario, domain_ids: IntArray) -> Iterator[str]:
    """Tensor-parallel groups that span domains; context-parallel ones if some do and some do not."""
    for comm_group in (TP_GROUP, CP_GROUP):
        groups = _group_members(scenario, comm_group)
        split_count = int(np.count_nonzero(_spans_domains(domain_ids[groups])))
        if split_count and (comm_group is TP_GROUP or split_count < len(groups)):
            degree, max_domain_size = groups.shape[1], _max_domain_size(domain_ids)
            yield (
                f"{split_count:,} of {len(groups):,} {_describe_groups(comm_group, degree)} reach beyond one NVLink "
                "domain "
                "and use the network for every "
                f"layer{_suggest_placement(scenario) if degree <= max_domain_size else ''}"
            )


def _unevenly_spread_groups(scenario: ResolvedScenario, domain_ids: IntArray) -> Iterator[str]:
    """Groups with unequal member counts per domain, except tensor-parallel ones, which should not span any."""
    for comm_group in _high_volume_comm_groups(scenario)[1:]:  # the first are tensor-parallel
        groups = _group_members(scenario, comm_group)
        min_members, max_members = _min_max_members_per_domain(domain_ids[groups])
        is_uneven = min_members != max_members
        if is_uneven.any():
            count = int(np.count_nonzero(is_uneven))
            yield (
                f"{count:,} of {len(groups):,} {_describe_groups(comm_group, groups.shape[1])} fill NVLink domains "
                "unevenly, with "
                f"{min_members[is_uneven].min():,} to {max_members[is_uneven].max():,} members in each: between "
                "domains each has "
                f"only as many routes as the smallest has members{_suggest_placement(scenario)}"
            )


def _high_volume_comm_groups(scenario: ResolvedScenario) -> tuple[CommGroup, ...]:
    """Kinds of comm groups that communicate much, and all at once."""
    is_hybrid = HYBRID_MESH in scenario.layout.meshes
    return (TP_GROUP, CP_GROUP, *((DP_SHARD_GROUP, DP_REPLICATE_GROUP) if is_hybrid else (DP_GROUP,)))


def _group_members(scenario: ResolvedScenario, comm_group: CommGroup) -> IntArray:
    return scenario.layout.meshes[comm_group.mesh].groups_along(*comm_group.axes)


def _describe_groups(comm_group: CommGroup, degree: int) -> str:
    return f"{comm_group.accounted_axis.label} groups ({comm_group.label} {degree:,})"


def _suggest_placement(scenario: ResolvedScenario) -> str:
    """A suggestion: a number of ranks per domain, or of GPUs, that gives an even placement."""
    world, domain_size = scenario.layout.world_size, scenario.cluster.unit_sizes.domain_gpus
    for ranks_per_domain in reversed(
        [divisor for divisor in divisors(world) if domain_size / 2 <= divisor <= domain_size]
    ):
        if not any(
            _is_badly_placed(scenario, comm_group, ranks_per_domain)
            for comm_group in _high_volume_comm_groups(scenario)
        ):
            even_order = (
                _DEFAULT_ORDER_TEXT
                if ranks_per_domain == domain_size
                else f"cluster.placement {{per_domain: {ranks_per_domain}}} alone"
            )
            return f"; {even_order} is even"
    return f"; {nearest_multiples(world, domain_size)} GPUs fill whole domains" if world % domain_size else ""


def _is_badly_placed(scenario: ResolvedScenario, comm_group: CommGroup, ranks_per_domain: int) -> bool:
    """Whether groups of a kind would be badly mapped with this number of ranks per domain."""
    domain_ids = _group_members(scenario, comm_group) // ranks_per_domain
    min_members, max_members = _min_max_members_per_domain(domain_ids)
    return bool((min_members != max_members).any() or (comm_group is TP_GROUP and _spans_domains(domain_ids).any()))


def _spans_domains(domain_ids: IntArray) -> BoolArray:
    """Whether each group spans several domains: [groups]."""
    is_split: BoolArray = domain_ids.min(axis=1) != domain_ids.max(axis=1)
    return is_split


def _min_max_members_per_domain(domain_ids: IntArray) -> tuple[IntArray, IntArray]:
    """Minimum and maximum number of a group's members in one domain: [groups] each. domain_ids: [groups, size]."""
    ordered = np.sort(domain_ids, axis=1)
    is_run_start = np.diff(ordered, axis=1, prepend=-1) != 0
    run_starts = np.flatnonzero(is_run_start.reshape(-1))
    sizes = np.diff(np.append(run_starts, is_run_start.size))
    group_index = run_starts // domain_ids.shape[1]
    min_members, max_members = np.full(len(domain_ids), domain_ids.shape[1]), np.zeros(len(domain_ids), np.int64)
    np.minimum.at(min_members, group_index, sizes)
    np.maximum.at(max_members, group_index, sizes)
    return min_members, max_members


def _max_domain_size(domain_ids: IntArray) -> int:
    """Number of ranks in the largest domain."""
    return int(np.bincount(domain_ids).max())
