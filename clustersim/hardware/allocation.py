"""Which GPUs of a machine does a job get?

A scheduler allocates nodes, all or some GPUs of each; ranks are numbered in allocation order: node by node,
GPUs of a node in their own order. Nodes come in the machine's order, in a given one, or shuffled: a uniform
random permutation of the nodes (or GPUs), drawn by sorting SplitMix64 hashes of a seed, hence the same on
every machine. An explicit list of GPUs is the most general form.

Reference: SLURM allocates nodes as a list of hosts (`--nodelist`), from blocks of one NVLink domain in
segments (`topology/block`, `--segment`); racks of 72 GPUs are often used by jobs of 64, with 2 of 18 trays to
spare.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import gcd
from typing import Protocol

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.common.errors import InputError
from clustersim.common.splitmix import splitmix64
from clustersim.hardware.clos_spec import even_domain_gpus
from clustersim.hardware.topology import Fabric


class Scatter(Enum):
    """What is in random order: whole nodes, or GPUs."""

    NODES = "nodes"
    GPUS = "gpus"


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """Number of GPUs of a node and of an NVLink domain."""

    node_gpus: int
    domain_gpus: int


class Allocation(Protocol):
    """Protocol: which GPUs a job gets."""

    def machine_gpus(self, job_gpus: int | None, sizes: UnitSizes) -> int:
        """Number of GPUs, in whole nodes, that a regular machine needs for a job of `job_gpus`.

        None: the job takes the whole machine, which must contain the GPUs or nodes named.
        """

    def rank_gpus(self, fabric: Fabric, job_gpus: int | None, sizes: UnitSizes) -> IntArray:
        """[ranks] GPU of every rank, for a job of `job_gpus` GPUs (None: of all available ones).

        Raises InputError whose message starts with the offending key of `cluster`.
        """

    def job_size_multiple(self, sizes: UnitSizes) -> int:
        """The number of which the size of a job larger than it must be a multiple."""

    @property
    def is_prefix_stable(self) -> bool:
        """Whether a larger job gets the same GPUs first."""


@dataclass(frozen=True, slots=True)
class PerNode:
    """The job uses the first `gpu_count` GPUs of every node."""

    gpu_count: int

    def unit_ids(self, fabric: Fabric) -> IntArray:
        """[gpus] node of every GPU."""
        return fabric.node_ids(np.arange(fabric.gpu_count))

    def unit_gpus(self, sizes: UnitSizes) -> int:
        """Number of GPUs of a node."""
        return sizes.node_gpus

    @property
    def key_and_unit(self) -> tuple[str, str]:
        """Its configuration key, and the unit for messages."""
        return "per_node", "a node"


@dataclass(frozen=True, slots=True)
class PerDomain:
    """The job uses the first `gpu_count` GPUs of every NVLink domain."""

    gpu_count: int

    def unit_ids(self, fabric: Fabric) -> IntArray:
        """[gpus] NVLink domain of every GPU."""
        return fabric.domain_ids(np.arange(fabric.gpu_count))

    def unit_gpus(self, sizes: UnitSizes) -> int:
        """Number of GPUs of a domain."""
        return sizes.domain_gpus

    @property
    def key_and_unit(self) -> tuple[str, str]:
        """Its configuration key, and the unit for messages."""
        return "per_domain", "an NVLink domain"


@dataclass(frozen=True, slots=True)
class BlockAllocation:
    """Node by node.

    per_unit: how many GPUs of each node or domain; node_ids: the nodes, in allocation order, None: from the first
    one on. Without either, a job is spread evenly over domains of several nodes, as without an allocation
    (`clos_spec.spread_evenly`), if the machine is large enough. spare_nodes: nodes that the machine has beyond
    those of the job; scatter: what is in random order, None: nothing.
    """

    per_unit: PerNode | PerDomain | None = None
    node_ids: tuple[int, ...] | None = None
    spare_nodes: int = 0
    scatter: Scatter | None = None
    seed: int = 0

    def machine_gpus(self, job_gpus: int | None, sizes: UnitSizes) -> int:
        """Nodes up to the last one named; else whole nodes (or domains) for the job, and the spare ones."""
        if self.node_ids is not None:
            return (max(self.node_ids) + 1) * sizes.node_gpus
        if job_gpus is None:
            return 0
        per_unit = self._gpus_per_unit(job_gpus, sizes)
        unit_gpus, used_gpus = (
            (sizes.node_gpus, sizes.node_gpus) if per_unit is None else (per_unit.unit_gpus(sizes), per_unit.gpu_count)
        )
        return (
            -(-(-(-job_gpus // used_gpus) * unit_gpus) // sizes.node_gpus) * sizes.node_gpus
            + self.spare_nodes * sizes.node_gpus
        )

    def rank_gpus(self, fabric: Fabric, job_gpus: int | None, sizes: UnitSizes) -> IntArray:
        """[ranks] GPU of every rank."""
        free = self._in_allocation_order(fabric, self._eligible_gpus(fabric, job_gpus, sizes))
        free_per_node = np.bincount(fabric.node_ids(free))
        count = self._gpus_without_spare(free_per_node) if job_gpus is None else job_gpus
        self._require_divisible(count, sizes)
        if not 0 < count <= len(free):
            raise InputError(f"gpus: a job of {count:,} does not fit; placement leaves it {len(free):,} GPUs")
        spare = len(free_per_node) - 1 - int(np.searchsorted(np.cumsum(free_per_node), count))
        if spare < self.spare_nodes:
            raise InputError(
                f"placement.spare: {self.spare_nodes:,}, but the machine has only {spare:,} nodes to spare"
            )
        return free[:count]

    def job_size_multiple(self, sizes: UnitSizes) -> int:
        """GPUs used per node; where domains are used in part, a common divisor of those and a node."""
        match self.per_unit:
            case PerNode(gpus):
                return gpus
            case PerDomain(gpus):
                return gcd(gpus, sizes.node_gpus)
        return sizes.node_gpus

    @property
    def is_prefix_stable(self) -> bool:
        """Whether a larger job gets the same GPUs first."""
        return self.scatter is None

    def _gpus_per_unit(self, job_gpus: int | None, sizes: UnitSizes) -> PerNode | PerDomain | None:
        """GPUs used of each node or domain; None: all."""
        if self.per_unit is not None or self.node_ids is not None or job_gpus is None:
            return self.per_unit
        even = even_domain_gpus(job_gpus, sizes.node_gpus, sizes.domain_gpus)
        return None if even == sizes.domain_gpus else PerDomain(even)

    def _eligible_gpus(self, fabric: Fabric, job_gpus: int | None, sizes: UnitSizes) -> IntArray:
        """GPUs that the job may use, ascending."""
        all_gpus, per_unit = np.arange(fabric.gpu_count), self._gpus_per_unit(job_gpus, sizes)
        if per_unit is None:
            return all_gpus
        key, unit_label = per_unit.key_and_unit
        max_gpus = min(per_unit.unit_gpus(sizes), fabric.gpu_count)
        if per_unit.gpu_count > max_gpus:
            raise InputError(
                f"placement.{key}: {per_unit.gpu_count:,}, but {unit_label} has {max_gpus:,} "
                f"GPU{'s' * (max_gpus > 1)}, which is the most"
            )
        free = all_gpus[_index_within_label(per_unit.unit_ids(fabric)) < per_unit.gpu_count]
        too_few = job_gpus is not None and len(free) < job_gpus + self.spare_nodes * sizes.node_gpus
        return all_gpus if too_few and self.per_unit is None else free

    def _in_allocation_order(self, fabric: Fabric, free: IntArray) -> IntArray:
        """Those GPUs in the order in which they are assigned to ranks."""
        gpu_nodes = fabric.node_ids(free)
        count = int(fabric.node_ids(np.arange(fabric.gpu_count)).max()) + 1
        nodes = np.arange(count) if self.node_ids is None else self._require_existing_nodes(count)
        if self.scatter is Scatter.NODES:
            nodes = shuffle(nodes, self.seed)
        order = np.full(count, -1)
        order[nodes] = np.arange(len(nodes))
        selected = free[order[gpu_nodes] >= 0]
        selected = selected[np.argsort(order[fabric.node_ids(selected)], kind="stable")]
        return shuffle(selected, self.seed) if self.scatter is Scatter.GPUS else selected

    def _gpus_without_spare(self, free: IntArray) -> int:
        """GPUs for the job on all nodes but the spare ones. free: [nodes] eligible GPUs of each node."""
        if self.spare_nodes >= len(free):
            raise InputError(
                f"placement.spare: {self.spare_nodes:,} leaves none of the {len(free):,} nodes for the job"
            )
        return int(free[: len(free) - self.spare_nodes].sum())

    def _require_existing_nodes(self, count: int) -> IntArray:
        missing = [node for node in self.node_ids or () if node >= count]
        if missing:
            raise InputError(f"placement.nodes: there is no node {missing[0]:,}; nodes are 0 to {count - 1:,}")
        return np.array(self.node_ids, np.int64)

    def _require_divisible(self, job_gpus: int, sizes: UnitSizes) -> None:
        """A job must use whole nodes (as far as it may use them), or fit into one."""
        multiple = self.job_size_multiple(sizes)
        if job_gpus > multiple and job_gpus % multiple:
            below = job_gpus // multiple * multiple
            raise InputError(
                f"gpus: {job_gpus:,} GPUs are not a multiple of the {multiple} that the job uses of a node; "
                f"{below:,} or "
                f"{below + multiple:,} are"
            )


@dataclass(frozen=True, slots=True)
class ExplicitAllocation:
    """An explicit list: rank r runs on gpu_ids[r]."""

    gpu_ids: tuple[int, ...]

    def machine_gpus(self, job_gpus: int | None, sizes: UnitSizes) -> int:  # noqa: ARG002 - the list says how many
        """Nodes up to that of the last GPU."""
        return (max(self.gpu_ids) // sizes.node_gpus + 1) * sizes.node_gpus

    def rank_gpus(self, fabric: Fabric, job_gpus: int | None, sizes: UnitSizes) -> IntArray:  # noqa: ARG002 - of any node
        """The list, whose length must equal the size of the job."""
        if max(self.gpu_ids) >= fabric.gpu_count:
            raise InputError(
                f"placement.order: there is no GPU {max(self.gpu_ids):,}; GPUs are 0 to {fabric.gpu_count - 1:,}"
            )
        if job_gpus not in (None, len(self.gpu_ids)):
            raise InputError(
                f"placement.order: names {len(self.gpu_ids):,} GPUs, but the job has {job_gpus:,} ranks; one for "
                "each fits"
            )
        return np.array(self.gpu_ids, np.int64)

    def job_size_multiple(self, sizes: UnitSizes) -> int:  # noqa: ARG002 - whatever nodes they are of
        """One: any number of GPUs may be listed."""
        return 1

    @property
    def is_prefix_stable(self) -> bool:
        """Whether a larger job gets the same GPUs first."""
        return False


@dataclass(frozen=True, slots=True)
class CoScheduledAllocation:
    """`allocation` on a machine that also has GPUs for other jobs.

    other_jobs: allocation and size of jobs whose GPUs are named; unplaced_gpus: GPUs of all jobs that take what
    is left.
    """

    allocation: Allocation
    other_jobs: tuple[tuple[Allocation, int | None], ...]
    unplaced_gpus: int

    def machine_gpus(self, job_gpus: int | None, sizes: UnitSizes) -> int:
        """Enough GPUs for each job where it is placed, and whole nodes for all of them."""
        jobs = ((self.allocation, job_gpus), *self.other_jobs)
        count = sum(job_size or 0 for _, job_size in jobs) + self.unplaced_gpus
        return max(
            -(-count // sizes.node_gpus) * sizes.node_gpus,
            *(job_allocation.machine_gpus(size, sizes) for job_allocation, size in jobs),
        )

    def rank_gpus(self, fabric: Fabric, job_gpus: int | None, sizes: UnitSizes) -> IntArray:
        """[ranks] GPU of every rank."""
        return self.allocation.rank_gpus(fabric, job_gpus, sizes)

    def job_size_multiple(self, sizes: UnitSizes) -> int:
        """The number of which the size of a job larger than it must be a multiple."""
        return self.allocation.job_size_multiple(sizes)

    @property
    def is_prefix_stable(self) -> bool:
        """Whether a larger job gets the same GPUs first."""
        return self.allocation.is_prefix_stable


def shuffle(ids: IntArray, seed: int) -> IntArray:
    """A random permutation of the ids, determined by the seed."""
    hashes = splitmix64(np.arange(len(ids), dtype=np.uint64) + splitmix64(np.array([seed], np.uint64)))
    return ids[np.argsort(hashes, kind="stable")]


def _index_within_label(labels: IntArray) -> IntArray:
    """[entries] how many earlier entries have the same label."""
    order = np.argsort(labels, kind="stable")
    starts = np.flatnonzero(np.diff(labels[order], prepend=-1))
    label_counts = np.diff(np.append(starts, len(labels)))
    index = np.empty(len(labels), np.int64)
    index[order] = np.arange(len(labels)) - np.repeat(starts, label_counts)
    return index


def first_duplicate(ids: Sequence[int]) -> int | None:
    """The first value that occurs a second time; None if all are distinct."""
    seen: set[int] = set()
    for value in ids:
        if value in seen:
            return value
        seen.add(value)
    return None
