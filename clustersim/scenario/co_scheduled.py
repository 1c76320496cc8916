"""Co-scheduled jobs: which GPUs do they get, and are their files consistent with sharing the cluster?

All jobs run on the cluster of the file that names them, with its degradations, large enough for all. Their
own files define model and layout. What such a file states about its cluster must match the shared cluster.
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
"""Keys of `degradations` that a co-scheduled job's own file may set: all others belong to the cluster."""


@dataclass(frozen=True, slots=True)
class CoScheduledSpec:
    """A co-scheduled job as named by a file.

    key: its dotted key; path: of its file, None: written inline; config: its parsed file.
    assigned_allocation, requested_allocation: its GPUs according to the naming file and to its own file.
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
        """Its GPU allocation; None: any free GPUs."""
        return self.assigned_allocation or self.requested_allocation

    @property
    def gpu_count(self) -> int | None:
        """Its number of GPUs, if stated."""
        return requested_gpu_count(self.config.cluster, self.config.layout)

    def gpu_ids(self, cluster: Cluster, gpus_by_owner: Mapping[str, IntArray]) -> IntArray:
        """The GPU id of each rank: [ranks]. gpus_by_owner: GPUs in use, by owner. Raises InputError for overlaps."""
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
                    f"{self._placement_prefix}placement: {format_id_ranges(shared)} {verb} {owner} already; free "
                    f"{free_text}"
                )
        return gpu_ids

    @property
    def _placement_prefix(self) -> str:
        """Prefix of the placement's key in error messages."""
        return "" if self.assigned_allocation else "scenario: cluster."

    def _first_free(self, cluster_gpus: int, gpus_by_owner: Mapping[str, IntArray]) -> IntArray:
        """The first free GPUs of a cluster."""
        free = _free_gpus(cluster_gpus, gpus_by_owner)
        if not len(free) or len(free) < (self.gpu_count or 1):
            demand_text = f"{self.gpu_count:,} GPUs do" if self.gpu_count else "its job does"
            raise InputError(
                f"scenario: {demand_text} not fit with the other jobs; free {_describe_free(free)} of {cluster_gpus:,}"
            )
        return free[: self.gpu_count]


def _free_gpus(cluster_gpus: int, gpus_by_owner: Mapping[str, IntArray]) -> IntArray:
    return np.setdiff1d(np.arange(cluster_gpus), np.concatenate([*gpus_by_owner.values()]))


def _describe_free(free: IntArray) -> str:
    return f"{'is' if len(free) < 2 else 'are'} {format_id_ranges(free) if len(free) else 'none'}"


def allocation_among(requested_allocation: Allocation | None, specs: Sequence[CoScheduledSpec]) -> Allocation | None:
    """A job's allocation on a cluster shared with co-scheduled jobs; None: all GPUs."""
    if not specs:
        return requested_allocation
    placed_jobs = tuple((spec.allocation, spec.gpu_count) for spec in specs if spec.allocation is not None)
    return CoScheduledAllocation(
        requested_allocation or BlockAllocation(),
        placed_jobs,
        sum(co_scheduled_spec.gpu_count or 0 for co_scheduled_spec in specs if co_scheduled_spec.allocation is None),
    )


def read_job_mapping(path: Path) -> dict[str, Any]:
    """The content of a co-scheduled job's file."""
    return data_files.read_mapping(path)


def find_conflicts(
    shared_cluster: tuple[ClusterConfig, Path], job_config: ScenarioConfig, job_dir: Path
) -> Iterator[str]:
    """Why a file cannot run on a shared cluster, one sentence per conflict.

    shared_cluster: the cluster section of the naming file, with the folder of its paths; job_dir: the folder of
    the job's.
    """
    yield from _cluster_conflicts(*shared_cluster, job_config.cluster, job_dir)
    if job_config.cost.network is Contention.UNCONTENDED:
        yield "cost.network: uncontended, but jobs on one machine share its links; write shared, or leave it out"
    for key in DegradationsConfig.model_fields:
        if key not in _JOB_OWNED_KEYS and getattr(job_config.degradations, key) != getattr(DegradationsConfig(), key):
            yield (
                f"degradations.{key}: is of the whole machine, so the file that names this job says it; leave it out "
                f"here ({', '.join(_JOB_OWNED_KEYS)} may stay)"
            )


def _cluster_conflicts(
    shared_config: ClusterConfig, shared_dir: Path, job_config: ClusterConfig, job_dir: Path
) -> Iterator[str]:
    """Keys of the job's cluster section that conflict with the shared cluster."""
    shared_name, job_name = _cluster_identity(shared_config, shared_dir), _cluster_identity(job_config, job_dir)
    if shared_name != job_name:
        yield f"cluster: is {job_name}, but the co-scheduled job is on {shared_name}; they must be on the same"
    for key in ("accelerator", "node", "fabric", "mixed"):
        job_value, shared_value = getattr(job_config, key), getattr(shared_config, key)
        if job_value and job_value != shared_value:
            expected_text = f"is {format_value(shared_value)}" if shared_value else "is the cluster's own"
            yield (
                f"cluster.{key}: differs from the machine's, which {expected_text}; leave it out, or write the "
                "same in both"
            )


def _cluster_identity(config: ClusterConfig, base_dir: Path) -> str:
    """Canonical name or path of the cluster that a section names."""
    return config.name or str(data_files.resolve_relative(base_dir, str(config.path)).resolve())
