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
from clustersim.hardware.clos_spec import even_part
from clustersim.hardware.topology import Fabric


class Scatter(Enum):
    """What is in a random order: whole nodes, or GPUs."""

    NODES = "nodes"
    GPUS = "gpus"


@dataclass(frozen=True, slots=True)
class Units:
    """How a machine's GPUs are numbered: GPUs of a node and of an NVLink domain."""

    node: int
    domain: int


class Allocation(Protocol):
    """The seam: what says which GPUs a job gets."""

    def machine(self, gpus: int | None, units: Units) -> int:
        """How many GPUs a regular machine needs, in whole nodes, to give a job so many.

        None: as many as it has; then what is named must be there.
        """

    def places(self, fabric: Fabric, gpus: int | None, units: Units) -> IntArray:
        """The GPU of every rank, [ranks], for a job of so many (None: of all that there are for it).

        Raises InputError, whose sentence starts with the key of `cluster` that is wrong.
        """

    def step(self, units: Units) -> int:
        """Of what a job that is larger than this must have a multiple."""

    @property
    def grows(self) -> bool:
        """Whether a job of more GPUs has the same ones first."""


@dataclass(frozen=True, slots=True)
class PerNode:
    """The job uses the first `gpus` GPUs of every node."""

    gpus: int

    def of(self, fabric: Fabric) -> IntArray:
        """The node of every GPU."""
        return fabric.nodes(np.arange(fabric.gpus))

    def unit(self, units: Units) -> int:
        """GPUs of a node."""
        return units.node

    @property
    def words(self) -> tuple[str, str]:
        """Its key, and what it is a part of."""
        return "per_node", "a node"


@dataclass(frozen=True, slots=True)
class PerDomain:
    """The job uses the first `gpus` GPUs of every NVLink domain."""

    gpus: int

    def of(self, fabric: Fabric) -> IntArray:
        """The domain of every GPU."""
        return fabric.domains(np.arange(fabric.gpus))

    def unit(self, units: Units) -> int:
        """GPUs of a domain."""
        return units.domain

    @property
    def words(self) -> tuple[str, str]:
        """Its key, and what it is a part of."""
        return "per_domain", "an NVLink domain"


@dataclass(frozen=True, slots=True)
class Filled:
    """Node after node.

    part: how many GPUs of each node or domain; nodes: which, in this order, None: from the first one on. Without either
    a job is spread evenly over domains of several nodes, as it is without an allocation (`shape.spread_evenly`), if the
    machine is large enough for that.
    spare: how many more nodes the machine has than the job needs; scatter: what is in a random order, None: nothing.
    """

    part: PerNode | PerDomain | None = None
    nodes: tuple[int, ...] | None = None
    spare: int = 0
    scatter: Scatter | None = None
    seed: int = 0

    def machine(self, gpus: int | None, units: Units) -> int:
        """Nodes up to the last that is named; else whole nodes (or domains) for the job, and the spare ones."""
        if self.nodes is not None:
            return (max(self.nodes) + 1) * units.node
        if gpus is None:
            return 0
        part = self._part(gpus, units)
        unit, used = (units.node, units.node) if part is None else (part.unit(units), part.gpus)
        return -(-(-(-gpus // used) * unit) // units.node) * units.node + self.spare * units.node

    def places(self, fabric: Fabric, gpus: int | None, units: Units) -> IntArray:
        """The GPU of every rank: [ranks]."""
        free = self._in_order(fabric, self._free(fabric, gpus, units))
        sizes = np.bincount(fabric.nodes(free))
        count = self._all_but_spare(sizes) if gpus is None else gpus
        self._require_divisible(count, units)
        if not 0 < count <= len(free):
            raise InputError(f"gpus: a job of {count:,} does not fit; placement leaves it {len(free):,} GPUs")
        left = len(sizes) - 1 - int(np.searchsorted(np.cumsum(sizes), count))
        if left < self.spare:
            raise InputError(f"placement.spare: {self.spare:,}, but the machine has only {left:,} nodes to spare")
        return free[:count]

    def step(self, units: Units) -> int:
        """GPUs that the job uses of a node; where domains are used in part, what divides those and a node."""
        match self.part:
            case PerNode(gpus):
                return gpus
            case PerDomain(gpus):
                return gcd(gpus, units.node)
        return units.node

    @property
    def grows(self) -> bool:
        """Whether a job of more GPUs has the same ones first."""
        return self.scatter is None

    def _part(self, gpus: int | None, units: Units) -> PerNode | PerDomain | None:
        """How many GPUs of each node or domain; None: all."""
        if self.part is not None or self.nodes is not None or gpus is None:
            return self.part
        even = even_part(gpus, units.node, units.domain)
        return None if even == units.domain else PerDomain(even)

    def _free(self, fabric: Fabric, gpus: int | None, units: Units) -> IntArray:
        """GPUs that the job may use, ascending."""
        everyone, part = np.arange(fabric.gpus), self._part(gpus, units)
        if part is None:
            return everyone
        key, word = part.words
        most = min(part.unit(units), fabric.gpus)
        if part.gpus > most:
            raise InputError(
                f"placement.{key}: {part.gpus:,}, but {word} has {most:,} GPU{'s' * (most > 1)}, which is the most"
            )
        free = everyone[_place_within(part.of(fabric)) < part.gpus]
        too_few = gpus is not None and len(free) < gpus + self.spare * units.node
        return everyone if too_few and self.part is None else free

    def _in_order(self, fabric: Fabric, free: IntArray) -> IntArray:
        """Those GPUs in the order in which ranks take them."""
        homes = fabric.nodes(free)
        count = int(fabric.nodes(np.arange(fabric.gpus)).max()) + 1
        nodes = np.arange(count) if self.nodes is None else self._existing(count)
        if self.scatter is Scatter.NODES:
            nodes = shuffled(nodes, self.seed)
        turn = np.full(count, -1)
        turn[nodes] = np.arange(len(nodes))
        mine = free[turn[homes] >= 0]
        mine = mine[np.argsort(turn[fabric.nodes(mine)], kind="stable")]
        return shuffled(mine, self.seed) if self.scatter is Scatter.GPUS else mine

    def _all_but_spare(self, free: IntArray) -> int:
        """GPUs for the job on all nodes but the spare ones. free: [nodes] how many it may use of each."""
        if self.spare >= len(free):
            raise InputError(f"placement.spare: {self.spare:,} leaves none of the {len(free):,} nodes for the job")
        return int(free[: len(free) - self.spare].sum())

    def _existing(self, count: int) -> IntArray:
        beyond = [node for node in self.nodes or () if node >= count]
        if beyond:
            raise InputError(f"placement.nodes: there is no node {beyond[0]:,}; nodes are 0 to {count - 1:,}")
        return np.array(self.nodes, np.int64)

    def _require_divisible(self, gpus: int, units: Units) -> None:
        """A job has whole nodes, as far as it may use them, or is within one."""
        step = self.step(units)
        if gpus > step and gpus % step:
            below = gpus // step * step
            raise InputError(
                f"gpus: {gpus:,} GPUs are not a multiple of the {step} that the job uses of a node; {below:,} or "
                f"{below + step:,} are"
            )


@dataclass(frozen=True, slots=True)
class Listed:
    """GPU by GPU: rank r runs on gpus[r]."""

    gpus: tuple[int, ...]

    def machine(self, gpus: int | None, units: Units) -> int:  # noqa: ARG002 - the list says how many
        """Nodes up to that of the last GPU."""
        return (max(self.gpus) // units.node + 1) * units.node

    def places(self, fabric: Fabric, gpus: int | None, units: Units) -> IntArray:  # noqa: ARG002 - of any node
        """The list, which must be as long as the job is large."""
        if max(self.gpus) >= fabric.gpus:
            raise InputError(f"placement.order: there is no GPU {max(self.gpus):,}; GPUs are 0 to {fabric.gpus - 1:,}")
        if gpus not in (None, len(self.gpus)):
            raise InputError(
                f"placement.order: names {len(self.gpus):,} GPUs, but the job has {gpus:,} ranks; one for each fits"
            )
        return np.array(self.gpus, np.int64)

    def step(self, units: Units) -> int:  # noqa: ARG002 - whatever nodes they are of
        """One: any number may be listed."""
        return 1

    @property
    def grows(self) -> bool:
        """Whether a job of more GPUs has the same ones first."""
        return False


@dataclass(frozen=True, slots=True)
class Among:
    """As `own` on a machine that has room for other jobs, too.

    others: of jobs whose GPUs are named, and of how many they are; more: GPUs of all those that take what is left.
    """

    own: Allocation
    others: tuple[tuple[Allocation, int | None], ...]
    more: int

    def machine(self, gpus: int | None, units: Units) -> int:
        """What any of the jobs needs where it is, and whole nodes for all of them."""
        every = ((self.own, gpus), *self.others)
        count = sum(item or 0 for _, item in every) + self.more
        return max(
            -(-count // units.node) * units.node, *(allocation.machine(size, units) for allocation, size in every)
        )

    def places(self, fabric: Fabric, gpus: int | None, units: Units) -> IntArray:
        """The GPU of every rank."""
        return self.own.places(fabric, gpus, units)

    def step(self, units: Units) -> int:
        """Of what a job that is larger than this must have a multiple."""
        return self.own.step(units)

    @property
    def grows(self) -> bool:
        """Whether a job of more GPUs has the same ones first."""
        return self.own.grows


def shuffled(numbers: IntArray, seed: int) -> IntArray:
    """The numbers in a random order of a seed."""
    words = splitmix64(np.arange(len(numbers), dtype=np.uint64) + splitmix64(np.array([seed], np.uint64)))
    return numbers[np.argsort(words, kind="stable")]


def _place_within(labels: IntArray) -> IntArray:
    """The how manyth of its label each entry is: [entries]."""
    order = np.argsort(labels, kind="stable")
    starts = np.flatnonzero(np.diff(labels[order], prepend=-1))
    sizes = np.diff(np.append(starts, len(labels)))
    place = np.empty(len(labels), np.int64)
    place[order] = np.arange(len(labels)) - np.repeat(starts, sizes)
    return place


def twice(numbers: Sequence[int]) -> int | None:
    """The first number that comes a second time; None if each comes once."""
    seen: set[int] = set()
    for number in numbers:
        if number in seen:
            return number
        seen.add(number)
    return None
