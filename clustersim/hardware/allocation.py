"""Which GPUs of a machine does a job get?

A scheduler hands out nodes, and of each of them all GPUs or some; ranks are numbered in the order of what it hands out:
node after node, GPUs of a node in their own order. That order is the machine's, a given one, or scattered: every order
of the nodes (or of the GPUs) is equally likely, drawn by sorting SplitMix64's words of a seed, so that a seed gives the
same machine places everywhere. A list of GPUs says all of it at once.

Reference: SLURM hands out nodes as a list of hosts (`--nodelist`), from blocks of one NVLink domain in segments
(`topology/block`, `--segment`); racks of 72 GPUs are often used by jobs of 64, with 2 of 18 trays to spare.
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
    """What is in a random order: whole nodes, or GPUs."""

    NODES = "nodes"
    GPUS = "gpus"


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """How a machine's GPUs are numbered: GPUs of a node and of an NVLink domain."""

    node_gpus: int
    domain_gpus: int


class Allocation(Protocol):
    """The seam: what says which GPUs a job gets."""

    def machine_gpus(self, job_gpus: int | None, sizes: UnitSizes) -> int:
        """How many GPUs a regular machine needs, in whole nodes, to give a job so many.

        None: as many as it has; then what is named must be there.
        """

    def rank_gpus(self, fabric: Fabric, job_gpus: int | None, sizes: UnitSizes) -> IntArray:
        """The GPU of every rank, [ranks], for a job of so many (None: of all that there are for it).

        Raises InputError, whose sentence starts with the key of `cluster` that is wrong.
        """

    def job_size_multiple(self, sizes: UnitSizes) -> int:
        """Of what a job that is larger than this must have a multiple."""

    @property
    def is_prefix_stable(self) -> bool:
        """Whether a job of more GPUs has the same ones first."""


@dataclass(frozen=True, slots=True)
class PerNode:
    """The job uses the first `gpus` GPUs of every node."""

    gpu_count: int

    def unit_ids(self, fabric: Fabric) -> IntArray:
        """The node of every GPU."""
        return fabric.node_ids(np.arange(fabric.gpu_count))

    def unit_gpus(self, sizes: UnitSizes) -> int:
        """GPUs of a node."""
        return sizes.node_gpus

    @property
    def key_and_unit(self) -> tuple[str, str]:
        """Its key, and what it is a part of."""
        return "per_node", "a node"


@dataclass(frozen=True, slots=True)
class PerDomain:
    """The job uses the first `gpus` GPUs of every NVLink domain."""

    gpu_count: int

    def unit_ids(self, fabric: Fabric) -> IntArray:
        """The domain of every GPU."""
        return fabric.domain_ids(np.arange(fabric.gpu_count))

    def unit_gpus(self, sizes: UnitSizes) -> int:
        """GPUs of a domain."""
        return sizes.domain_gpus

    @property
    def key_and_unit(self) -> tuple[str, str]:
        """Its key, and what it is a part of."""
        return "per_domain", "an NVLink domain"


@dataclass(frozen=True, slots=True)
class BlockAllocation:
    """Node after node.

    part: how many GPUs of each node or domain; nodes: which, in this order, None: from the first one on. Without either
    a job is spread evenly over domains of several nodes, as it is without an allocation (`shape.spread_evenly`), if the
    machine is large enough for that.
    spare: how many more nodes the machine has than the job needs; scatter: what is in a random order, None: nothing.
    """

    per_unit: PerNode | PerDomain | None = None
    node_ids: tuple[int, ...] | None = None
    spare_nodes: int = 0
    scatter: Scatter | None = None
    seed: int = 0

    def machine_gpus(self, job_gpus: int | None, sizes: UnitSizes) -> int:
        """Nodes up to the last that is named; else whole nodes (or domains) for the job, and the spare ones."""
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
        """The GPU of every rank: [ranks]."""
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
        """GPUs that the job uses of a node; where domains are used in part, what divides those and a node."""
        match self.per_unit:
            case PerNode(gpus):
                return gpus
            case PerDomain(gpus):
                return gcd(gpus, sizes.node_gpus)
        return sizes.node_gpus

    @property
    def is_prefix_stable(self) -> bool:
        """Whether a job of more GPUs has the same ones first."""
        return self.scatter is None

    def _gpus_per_unit(self, job_gpus: int | None, sizes: UnitSizes) -> PerNode | PerDomain | None:
        """How many GPUs of each node or domain; None: all."""
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
                f"placement.{key}: {per_unit.gpu_count:,}, but {unit_label} has {max_gpus:,} GPU{'s' * (max_gpus > 1)}, which is the most"
            )
        free = all_gpus[_index_within_label(per_unit.unit_ids(fabric)) < per_unit.gpu_count]
        too_few = job_gpus is not None and len(free) < job_gpus + self.spare_nodes * sizes.node_gpus
        return all_gpus if too_few and self.per_unit is None else free

    def _in_allocation_order(self, fabric: Fabric, free: IntArray) -> IntArray:
        """Those GPUs in the order in which ranks take them."""
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
        """GPUs for the job on all nodes but the spare ones. free: [nodes] how many it may use of each."""
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
        """A job has whole nodes, as far as it may use them, or is within one."""
        multiple = self.job_size_multiple(sizes)
        if job_gpus > multiple and job_gpus % multiple:
            below = job_gpus // multiple * multiple
            raise InputError(
                f"gpus: {job_gpus:,} GPUs are not a multiple of the {multiple} that the job uses of a node; {below:,} or "
                f"{below + multiple:,} are"
            )


@dataclass(frozen=True, slots=True)
class ExplicitAllocation:
    """GPU by GPU: rank r runs on gpus[r]."""

    gpu_ids: tuple[int, ...]

    def machine_gpus(self, job_gpus: int | None, sizes: UnitSizes) -> int:  # noqa: ARG002 - the list says how many
        """Nodes up to that of the last GPU."""
        return (max(self.gpu_ids) // sizes.node_gpus + 1) * sizes.node_gpus

    def rank_gpus(self, fabric: Fabric, job_gpus: int | None, sizes: UnitSizes) -> IntArray:  # noqa: ARG002 - of any node
        """The list, which must be as long as the job is large."""
        if max(self.gpu_ids) >= fabric.gpu_count:
            raise InputError(
                f"placement.order: there is no GPU {max(self.gpu_ids):,}; GPUs are 0 to {fabric.gpu_count - 1:,}"
            )
        if job_gpus not in (None, len(self.gpu_ids)):
            raise InputError(
                f"placement.order: names {len(self.gpu_ids):,} GPUs, but the job has {job_gpus:,} ranks; one for each fits"
            )
        return np.array(self.gpu_ids, np.int64)

    def job_size_multiple(self, sizes: UnitSizes) -> int:  # noqa: ARG002 - whatever nodes they are of
        """One: any number may be listed."""
        return 1

    @property
    def is_prefix_stable(self) -> bool:
        """Whether a job of more GPUs has the same ones first."""
        return False


@dataclass(frozen=True, slots=True)
class CoScheduledAllocation:
    """As `own` on a machine that has room for other jobs, too.

    others: of jobs whose GPUs are named, and of how many they are; more: GPUs of all those that take what is left.
    """

    allocation: Allocation
    other_jobs: tuple[tuple[Allocation, int | None], ...]
    unplaced_gpus: int

    def machine_gpus(self, job_gpus: int | None, sizes: UnitSizes) -> int:
        """What any of the jobs needs where it is, and whole nodes for all of them."""
        jobs = ((self.allocation, job_gpus), *self.other_jobs)
        count = sum(job_size or 0 for _, job_size in jobs) + self.unplaced_gpus
        return max(
            -(-count // sizes.node_gpus) * sizes.node_gpus,
            *(job_allocation.machine_gpus(size, sizes) for job_allocation, size in jobs),
        )

    def rank_gpus(self, fabric: Fabric, job_gpus: int | None, sizes: UnitSizes) -> IntArray:
        """The GPU of every rank."""
        return self.allocation.rank_gpus(fabric, job_gpus, sizes)

    def job_size_multiple(self, sizes: UnitSizes) -> int:
        """Of what a job that is larger than this must have a multiple."""
        return self.allocation.job_size_multiple(sizes)

    @property
    def is_prefix_stable(self) -> bool:
        """Whether a job of more GPUs has the same ones first."""
        return self.allocation.is_prefix_stable


def shuffle(ids: IntArray, seed: int) -> IntArray:
    """The numbers in a random order of a seed."""
    hashes = splitmix64(np.arange(len(ids), dtype=np.uint64) + splitmix64(np.array([seed], np.uint64)))
    return ids[np.argsort(hashes, kind="stable")]


def _index_within_label(labels: IntArray) -> IntArray:
    """The how manyth of its label each entry is: [entries]."""
    order = np.argsort(labels, kind="stable")
    starts = np.flatnonzero(np.diff(labels[order], prepend=-1))
    label_counts = np.diff(np.append(starts, len(labels)))
    index = np.empty(len(labels), np.int64)
    index[order] = np.arange(len(labels)) - np.repeat(starts, label_counts)
    return index


def first_duplicate(ids: Sequence[int]) -> int | None:
    """The first number that comes a second time; None if each comes once."""
    seen: set[int] = set()
    for value in ids:
        if value in seen:
            return value
        seen.add(value)
    return None
