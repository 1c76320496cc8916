"""Which links do jobs on one machine share, and which of their ranks are alike?

Each job has its own ranks, groups and exchanges; links are the machine's. A link that two jobs cross is one on which
neither is alone. Ranks of two jobs never do the same, but what crosses a link tells it apart from others, whoever sends
it: so all jobs are coloured at once (`symmetry.refinement`), as one program of all their ranks that nobody runs, whose
roles are named by the job.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.cost.background_traffic import Other
from clustersim.cost.contention import Sharing, sharing
from clustersim.cost.rank_equivalence import crossed, told_by
from clustersim.cost.timing import DemandCost, ExchangeCost
from clustersim.hardware.topology import LinkTable
from clustersim.program.program import ProcessGroups, Program
from clustersim.symmetry.labels import compact_labels
from clustersim.symmetry.link_load_matrix import LinkTraffic
from clustersim.symmetry.refinement import SymmetryClasses, symmetry_classes

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One of several jobs on a machine. machine: [ranks] number, from 0 on, of what each rank runs on."""

    program: Program
    cost: ExchangeCost
    sharing: Sharing
    machine: IntArray


def sharings(
    asked: Sequence[tuple[Program, DemandCost]], owners: Sequence[IntArray], beside: tuple[Other, ...]
) -> tuple[Sharing, ...]:
    """Which exchanges of each job share links. owners: as in `sharing`, by job; beside: what else loads links.

    What is beside comes with the first job alone, as it is there once.
    """
    crosses = [_crossed_by(*item) for item in asked] if len(asked) > 1 else []
    found: list[Sharing] = []
    for number, ((program, demands), owner) in enumerate(zip(asked, owners, strict=True)):
        others = crosses[:number] + crosses[number + 1 :]
        found.append(sharing(program, demands, owner, beside, others))
    return (found[0], *(replace(element, others=()) for element in found[1:]))


def _crossed_by(program: Program, demands: DemandCost) -> IntArray:
    """The links that a job crosses, ascending."""
    crossings = dict.fromkeys(demands.demand(exchange).crossings for exchange in program.comm_ops)
    return np.unique(np.concatenate([np.zeros(0, np.int64), *(crossing.link_index for crossing in crossings)]))


def alike_together(jobs: Sequence[Job], links: LinkTable) -> tuple[SymmetryClasses, ...]:
    """Classes of each job's ranks and groups, and of the links, which are the same for all."""
    first = np.cumsum([0, *(job.program.world_size for job in jobs)]).tolist()
    kinds = np.cumsum([0, *(len(job.program.programs) for job in jobs)]).tolist()
    crossings = [crossed(job.program, job.sharing, links) for job in jobs]
    found = symmetry_classes(
        Program((), np.concatenate([kind + job.program.program_index for kind, job in zip(kinds, jobs, strict=False)]),
                _named(_moved(job.program.groups, rank) for rank, job in zip(first, jobs, strict=False))),
        _named(told_by(job.program, job.cost, job.sharing) for job in jobs),
        LinkTraffic(crossings[0].link_colours, _named(crossing.matrices for crossing in crossings)),
        device_model=np.concatenate([job.machine for job in jobs]),
    )  # fmt: skip
    own = zip(jobs, pairwise(first), strict=True)
    return tuple(_part(found, number, job.program, ranks) for number, (job, ranks) in enumerate(own))


def _named(by_role: Iterable[Mapping[str, T]]) -> dict[str, T]:
    """What each job has by role, by role and job."""
    return {_role(number, role): item for number, one in enumerate(by_role) for role, item in one.items()}


def _role(job: int, role: str) -> str:
    return f"{job} {role}"


def _moved(groups: Mapping[str, ProcessGroups], first: int) -> dict[str, ProcessGroups]:
    """Groups of ranks that are numbered from `first` on."""
    return {role: replace(group, members=group.members + first) for role, group in groups.items()}


def _part(found: SymmetryClasses, number: int, program: Program, ranks: tuple[int, int]) -> SymmetryClasses:
    """The classes of one job: its ranks are those from the first to before the last of all."""
    mine = slice(*ranks)
    groups = {role: found.group_colours[_role(number, role)] for role in program.groups}
    return SymmetryClasses(
        compact_labels(found.rank_colours[mine]), found.representative[mine] - ranks[0], groups, found.link_colours
    )
