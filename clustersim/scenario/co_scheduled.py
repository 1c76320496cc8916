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
from clustersim.common.errors import InputError, format_value
from clustersim.common.units import Seconds
from clustersim.hardware.allocation import Allocation, BlockAllocation, CoScheduledAllocation
from clustersim.hardware.cluster import Cluster
from clustersim.hardware.degradation import format_id_ranges
from clustersim.scenario.config.degradations import DegradationsConfig
from clustersim.scenario.config.scenario import ClusterConfig, ScenarioConfig
from clustersim.scenario.loaders import requested_gpu_count
from clustersim.scenario.settings import Contention

_JOB_OWNED_KEYS: Final = ("jitter",)
"""What another job's file may say of `disturbances`: all else is the machine's."""


@dataclass(frozen=True, slots=True)
class CoScheduledSpec:
    """A job that a file names. key: where; path: of its file, None: it is written there; file: what that says.

    given, own: which GPUs it has, as the file that names it and its own say.
    """

    key: str
    path: Path | None
    raw_mapping: Mapping[str, Any]
    config: ScenarioConfig
    assigned_allocation: Allocation | None
    requested_allocation: Allocation | None
    start_offset: Seconds

    @property
    def allocation(self) -> Allocation | None:
        """Which GPUs it has; None: any that nobody has."""
        return self.assigned_allocation or self.requested_allocation

    @property
    def gpu_count(self) -> int | None:
        """How many, if that is said."""
        return requested_gpu_count(self.config.cluster, self.config.layout)

    def gpu_ids(self, cluster: Cluster, gpus_by_owner: Mapping[str, IntArray]) -> IntArray:
        """The GPU of each rank: [ranks]. used: GPUs by whose they are. Raises InputError."""
        if self.allocation is None:
            return self._first_free(cluster.machine.gpu_count, gpus_by_owner)
        try:
            gpu_ids = self.allocation.rank_gpus(cluster.machine, self.gpu_count, cluster.unit_sizes)
        except InputError as error:
            raise InputError(f"{self._placement_prefix}{error}") from error
        for owner, owner_gpus in gpus_by_owner.items():
            shared = np.intersect1d(gpu_ids, owner_gpus)
            if len(shared):
                free_text = _describe_free(_free_gpus(cluster.machine.gpu_count, gpus_by_owner))
                verb = "is" if len(shared) == 1 else "are"
                raise InputError(
                    f"{self._placement_prefix}placement: {format_id_ranges(shared)} {verb} {owner} already; free {free_text}"
                )
        return gpu_ids

    @property
    def _placement_prefix(self) -> str:
        """What comes before the key of the placement."""
        return "" if self.assigned_allocation else "scenario: cluster."

    def _first_free(self, cluster_gpus: int, gpus_by_owner: Mapping[str, IntArray]) -> IntArray:
        """The first GPUs of a machine of `count` that nobody has."""
        free = _free_gpus(cluster_gpus, gpus_by_owner)
        if not len(free) or len(free) < (self.gpu_count or 1):
            demand_text = f"{self.gpu_count:,} GPUs do" if self.gpu_count else "its job does"
            raise InputError(
                f"scenario: {demand_text} not fit beside the others; free {_describe_free(free)} of {cluster_gpus:,}"
            )
        return free[: self.gpu_count]


def _free_gpus(cluster_gpus: int, gpus_by_owner: Mapping[str, IntArray]) -> IntArray:
    return np.setdiff1d(np.arange(cluster_gpus), np.concatenate([*gpus_by_owner.values()]))


def _describe_free(free: IntArray) -> str:
    return f"{'is' if len(free) < 2 else 'are'} {format_id_ranges(free) if len(free) else 'none'}"


def allocation_among(requested_allocation: Allocation | None, specs: Sequence[CoScheduledSpec]) -> Allocation | None:
    """Which GPUs a job gets on a machine with others; None: all."""
    if not specs:
        return requested_allocation
    placed_jobs = tuple((spec.allocation, spec.gpu_count) for spec in specs if spec.allocation is not None)
    return CoScheduledAllocation(
        requested_allocation or BlockAllocation(),
        placed_jobs,
        sum(co_scheduled_spec.gpu_count or 0 for co_scheduled_spec in specs if co_scheduled_spec.allocation is None),
    )


def read_job_mapping(path: Path) -> dict[str, Any]:
    """What another job's file holds."""
    return data_files.read_mapping(path)


def find_conflicts(
    shared_cluster: tuple[ClusterConfig, Path], job_config: ScenarioConfig, job_dir: Path
) -> Iterator[str]:
    """Why a file cannot be of a job on the machine of a section, whose paths start at a place, as theirs at `base`."""
    yield from _cluster_conflicts(*shared_cluster, job_config.cluster, job_dir)
    if job_config.cost.network is Contention.UNCONTENDED:
        yield "cost.network: uncontended, but jobs on one machine share its links; write shared, or leave it out"
    for key in DegradationsConfig.model_fields:
        if key not in _JOB_OWNED_KEYS and getattr(job_config.disturbances, key) != getattr(DegradationsConfig(), key):
            yield (
                f"disturbances.{key}: is of the whole machine, so the file that names this job says it; leave it out "
                f"here ({', '.join(_JOB_OWNED_KEYS)} may stay)"
            )


def _cluster_conflicts(
    shared_config: ClusterConfig, shared_dir: Path, job_config: ClusterConfig, job_dir: Path
) -> Iterator[str]:
    """What of a cluster is another's."""
    shared_name, job_name = _cluster_identity(shared_config, shared_dir), _cluster_identity(job_config, job_dir)
    if shared_name != job_name:
        yield f"cluster: is {job_name}, but the job beside which it runs is on {shared_name}; they must be on the same"
    for key in ("accelerator", "node", "fabric", "mixed"):
        job_value, shared_value = getattr(job_config, key), getattr(shared_config, key)
        if job_value and job_value != shared_value:
            expected_text = f"is {format_value(shared_value)}" if shared_value else "is the cluster's own"
            yield f"cluster.{key}: differs from the machine's, which {expected_text}; leave it out, or write the same in both"


def _cluster_identity(config: ClusterConfig, base_dir: Path) -> str:
    """The cluster that a section names, the same for all that name it."""
    return config.name or str(data_files.resolve_relative(base_dir, str(config.path)).resolve())
