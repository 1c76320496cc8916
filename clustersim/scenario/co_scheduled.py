"""Where are other jobs on the machine, and do their files agree with being there?

All jobs are on one machine: that of the file which names them, with its disturbances, large enough for all. Their own
files say what they train and how. What such a file says of its cluster must be true of the machine, as far as it says
anything.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from clustersim.common import data_files
from clustersim.common.arrays import IntArray
from clustersim.common.errors import InputError, shown
from clustersim.common.units import Seconds
from clustersim.hardware.allocation import Allocation, Among, Filled
from clustersim.hardware.cluster import Cluster
from clustersim.hardware.degradation import in_ranges
from clustersim.scenario.config.degradations import DisturbancesSection
from clustersim.scenario.config.scenario import ClusterSection, ScenarioFile
from clustersim.scenario.loaders import wanted_gpus
from clustersim.scenario.settings import Contention

_OWN: Final = ("jitter",)
"""What another job's file may say of `disturbances`: all else is the machine's."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A job that a file names. key: where; path: of its file, None: it is written there; file: what that says.

    given, own: which GPUs it has, as the file that names it and its own say.
    """

    key: str
    path: Path | None
    written: Mapping[str, Any]
    file: ScenarioFile
    given: Allocation | None
    own: Allocation | None
    start: Seconds

    @property
    def allocation(self) -> Allocation | None:
        """Which GPUs it has; None: any that nobody has."""
        return self.given or self.own

    @property
    def gpus(self) -> int | None:
        """How many, if that is said."""
        return wanted_gpus(self.file.cluster, self.file.layout)

    def places(self, machine: Cluster, used: Mapping[str, IntArray]) -> IntArray:
        """The GPU of each rank: [ranks]. used: GPUs by whose they are. Raises InputError."""
        if self.allocation is None:
            return self._free(machine.machine.gpus, used)
        try:
            places = self.allocation.places(machine.machine, self.gpus, machine.units)
        except InputError as error:
            raise InputError(f"{self._said}{error}") from error
        for whose, theirs in used.items():
            both = np.intersect1d(places, theirs)
            if len(both):
                left = _words(_left(machine.machine.gpus, used))
                are = "is" if len(both) == 1 else "are"
                raise InputError(f"{self._said}placement: {in_ranges(both)} {are} {whose} already; free {left}")
        return places

    @property
    def _said(self) -> str:
        """What comes before the key of the placement."""
        return "" if self.given else "scenario: cluster."

    def _free(self, count: int, used: Mapping[str, IntArray]) -> IntArray:
        """The first GPUs of a machine of `count` that nobody has."""
        left = _left(count, used)
        if not len(left) or len(left) < (self.gpus or 1):
            size = f"{self.gpus:,} GPUs do" if self.gpus else "its job does"
            raise InputError(f"scenario: {size} not fit beside the others; free {_words(left)} of {count:,}")
        return left[: self.gpus]


def _left(count: int, used: Mapping[str, IntArray]) -> IntArray:
    return np.setdiff1d(np.arange(count), np.concatenate([*used.values()]))


def _words(left: IntArray) -> str:
    return f"{'is' if len(left) < 2 else 'are'} {in_ranges(left) if len(left) else 'none'}"


def among(own: Allocation | None, jobs: Sequence[Listed]) -> Allocation | None:
    """Which GPUs a job gets on a machine with others; None: all."""
    if not jobs:
        return own
    named = tuple((job.allocation, job.gpus) for job in jobs if job.allocation is not None)
    return Among(own or Filled(), named, sum(listed.gpus or 0 for listed in jobs if listed.allocation is None))


def mapping_of(path: Path) -> dict[str, Any]:
    """What another job's file holds."""
    return data_files.read_mapping(path)


def disagreements(mine: tuple[ClusterSection, Path], theirs: ScenarioFile, base: Path) -> Iterator[str]:
    """Why a file cannot be of a job on the machine of a section, whose paths start at a place, as theirs at `base`."""
    yield from _of_cluster(*mine, theirs.cluster, base)
    if theirs.cost.network is Contention.NONE:
        yield "cost.network: uncontended, but jobs on one machine share its links; write shared, or leave it out"
    for key in DisturbancesSection.model_fields:
        if key not in _OWN and getattr(theirs.disturbances, key) != getattr(DisturbancesSection(), key):
            yield (
                f"disturbances.{key}: is of the whole machine, so the file that names this job says it; leave it out "
                f"here ({', '.join(_OWN)} may stay)"
            )


def _of_cluster(mine: ClusterSection, home: Path, theirs: ClusterSection, base: Path) -> Iterator[str]:
    """What of a cluster is another's."""
    one, other = _named(mine, home), _named(theirs, base)
    if one != other:
        yield f"cluster: is {other}, but the job beside which it runs is on {one}; they must be on the same"
    for key in ("accelerator", "node", "fabric", "mixed"):
        said, there = getattr(theirs, key), getattr(mine, key)
        if said and said != there:
            machine = f"is {shown(there)}" if there else "is the cluster's own"
            yield f"cluster.{key}: differs from the machine's, which {machine}; leave it out, or write the same in both"


def _named(section: ClusterSection, base: Path) -> str:
    """The cluster that a section names, the same for all that name it."""
    return section.name or str(data_files.beside(base, str(section.path)).resolve())
