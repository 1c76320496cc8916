"""Which links do co-scheduled jobs share, and which of their ranks are equivalent?

Each job has its own ranks, groups and communication ops; links belong to the cluster. A link that two jobs
cross is contended for both. Ranks of two jobs are never equivalent, but the load of a link depends on all
jobs that cross it: so all jobs are refined at once (`symmetry.refinement`), as one combined program
of all their ranks that is never run, whose communicators are prefixed by the job.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.cost.background_traffic import BackgroundFlow
from clustersim.cost.contention import ContentionMap, map_contention
from clustersim.cost.rank_equivalence import group_features, simulated_link_loads
from clustersim.cost.timing import CommCost, LinkDemandCost
from clustersim.hardware.topology import LinkTable
from clustersim.program.program import ProcessGroups, Program
from clustersim.symmetry.labels import compact_labels
from clustersim.symmetry.link_load_matrix import LinkTraffic
from clustersim.symmetry.refinement import SymmetryClasses, symmetry_classes
from clustersim.symmetry.rotation_orbits import StepOrbits

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class ContendingJob:
    """One of several jobs on a cluster. model_index: [ranks] device model of each rank, from 0 on."""

    program: Program
    comm_cost: CommCost
    contention: ContentionMap
    model_index: IntArray


def map_job_contention(
    jobs: Sequence[tuple[Program, LinkDemandCost]],
    owners: Sequence[IntArray],
    background: tuple[BackgroundFlow, ...],
    orbits: StepOrbits | None,
) -> tuple[ContentionMap, ...]:
    """Contention map of each job. owners: as in `map_contention`, by job; background: background flows.

    orbits: as in `map_contention`, of a single job. The background is attached to the first job only, since it exists
    once.
    """
    job_links = [_crossed_links(*job) for job in jobs] if len(jobs) > 1 else []
    maps: list[ContentionMap] = []
    for index, ((program, demands), owner) in enumerate(zip(jobs, owners, strict=True)):
        other_job_links = job_links[:index] + job_links[index + 1 :]
        maps.append(map_contention(program, demands, owner, background, other_job_links, orbits))
    return (maps[0], *(replace(contention_map, background=()) for contention_map in maps[1:]))


def _crossed_links(program: Program, demands: LinkDemandCost) -> IntArray:
    """Ids of the links that a job crosses, ascending."""
    link_loads = dict.fromkeys(demands.link_demand(comm_op).link_loads for comm_op in program.comm_ops)
    return np.unique(np.concatenate([np.zeros(0, np.int64), *(loads.link_index for loads in link_loads)]))


def joint_equivalence_classes(jobs: Sequence[ContendingJob], links: LinkTable) -> tuple[SymmetryClasses, ...]:
    """Equivalence classes of each job's ranks and groups, and of the links, which are the same for all."""
    rank_offsets = np.cumsum([0, *(job.program.world_size for job in jobs)]).tolist()
    program_offsets = np.cumsum([0, *(len(job.program.programs) for job in jobs)]).tolist()
    link_loads = [simulated_link_loads(job.program, job.contention, links) for job in jobs]
    joint_classes = symmetry_classes(
        Program(
            (),
            np.concatenate(
                [
                    program_offset + job.program.program_index
                    for program_offset, job in zip(program_offsets, jobs, strict=False)
                ]
            ),
            _key_by_job(
                _offset_ranks(job.program.groups, rank_offset)
                for rank_offset, job in zip(rank_offsets, jobs, strict=False)
            ),
        ),
        _key_by_job(group_features(job.program, job.comm_cost, job.contention) for job in jobs),
        LinkTraffic(link_loads[0].link_colours, _key_by_job(job_loads.matrices for job_loads in link_loads)),
        device_model=np.concatenate([job.model_index for job in jobs]),
    )
    job_ranges = zip(jobs, pairwise(rank_offsets), strict=True)
    return tuple(
        _classes_of_job(joint_classes, index, job.program, rank_range)
        for index, (job, rank_range) in enumerate(job_ranges)
    )


def _key_by_job(job_groups: Iterable[Mapping[str, T]]) -> dict[str, T]:
    """Per-job mappings by communicator, merged under keys of job and communicator."""
    return {
        _job_comm_group(job, comm_group): value
        for job, groups in enumerate(job_groups)
        for comm_group, value in groups.items()
    }


def _job_comm_group(job: int, comm_group: str) -> str:
    return f"{job} {comm_group}"


def _offset_ranks(groups: Mapping[str, ProcessGroups], rank_offset: int) -> dict[str, ProcessGroups]:
    """Groups with rank ids offset by `rank_offset`."""
    return {comm_group: replace(group, members=group.members + rank_offset) for comm_group, group in groups.items()}


def _classes_of_job(
    joint_classes: SymmetryClasses, job: int, program: Program, rank_range: tuple[int, int]
) -> SymmetryClasses:
    """The classes of one job, whose ranks are the range [start, end) of the combined program's."""
    job_slice = slice(*rank_range)
    groups = {
        comm_group: joint_classes.group_colours[_job_comm_group(job, comm_group)] for comm_group in program.groups
    }
    return SymmetryClasses(
        compact_labels(joint_classes.rank_colours[job_slice]),
        joint_classes.representative[job_slice] - rank_range[0],
        groups,
        joint_classes.link_colours,
    )
