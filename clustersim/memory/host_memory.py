"""How much host memory do the GPUs of a node need?

For each rank: the activations that its microbatches in flight keep there, the offloaded fraction of
optimizer states with the gradients that were copied to it, and, of shards that live on the host, the
parameters. Without master weights the CPU updates the weights themselves, so it has a copy of them. With 4
bytes of gradient and 12 of master weights and moments that is 16 bytes for each parameter that a rank
updates (Ren et al. 2021, arXiv:2101.06840, section 4, has 2 + 12). All ranks of a node are counted at their
own peak, though pipeline ranks need not peak at the same time. Not counted: the system's and the
framework's own memory, and the rounding up of pinned allocations.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.common.units import Bytes, format_bytes
from clustersim.memory.activations import Activations
from clustersim.parallel.parameter_groups import ParameterGroup
from clustersim.parallel.plan import Plan
from clustersim.program.action import Action, ActionKind, PipelineOrder, flatten_entries


class HostCategory(Enum):
    """What host memory is used for; the value is its label in results."""

    ACTIVATIONS = "activations"
    OPTIMIZER = "optimizer state"
    GRADIENTS = "gradients"
    PARAMETERS = "parameters"


@dataclass(frozen=True, slots=True)
class HostMemoryUse:
    """Host memory of the node that needs most. bytes_by_category: of its ranks; capacity: bytes that its host has."""

    bytes_by_category: Mapping[HostCategory, Bytes]
    capacity: Bytes

    @property
    def total_bytes(self) -> Bytes:
        """Bytes that its ranks need on the host."""
        return sum(self.bytes_by_category.values())

    @property
    def fits(self) -> bool:
        """Whether the need is within the capacity."""
        return self.total_bytes <= self.capacity

    @property
    def problems(self) -> tuple[str, ...]:
        """Error message where it does not fit, else nothing."""
        if self.fits:
            return ()
        breakdown = ", ".join(
            f"{category.value} {format_bytes(size)}" for category, size in self.bytes_by_category.items() if size
        )
        return (
            f"host memory does not fit: what the ranks of a node offload is {format_bytes(self.total_bytes)} "
            f"({breakdown}), and "
            f"its host has {format_bytes(self.capacity)}; offload less (training.offload), or use more nodes",
        )


def host_memory_use(plan: Plan, order: PipelineOrder, nodes: IntArray, capacity: Bytes) -> HostMemoryUse:
    """Host memory of the node whose ranks need most. nodes: [pipeline ranks, n] node of each rank."""
    rank_bytes = [rank_host_bytes(plan, rank, flatten_entries(entries)) for rank, entries in enumerate(order)]
    byte_table = np.array([[sizes[category] for category in HostCategory] for sizes in rank_bytes])
    node_bytes = np.zeros((int(nodes.max()) + 1, len(HostCategory)))
    for rank, rank_nodes in enumerate(nodes):
        np.add.at(node_bytes, rank_nodes, byte_table[rank])
    max_node = node_bytes[int(node_bytes.sum(axis=1).argmax())]
    return HostMemoryUse(dict(zip(HostCategory, max_node.tolist(), strict=True)), capacity)


def rank_host_bytes(plan: Plan, pipeline_rank: int, actions: Iterable[Action]) -> dict[HostCategory, Bytes]:
    """Peak bytes on the host by category for one rank that runs these actions."""
    offload, stages = plan.training.offload, plan.stages_on_rank(pipeline_rank)
    updated = [
        (group, offload.share * sum(plan.parameter_count(stage, group.name) for stage in stages) / group.shard_count)
        for group in plan.parameter_groups
    ]
    trained = [(group, count) for group, count in updated if group.is_trained]
    return {
        HostCategory.ACTIVATIONS: _peak_activation_bytes(plan, actions),
        HostCategory.OPTIMIZER: float(sum(count * _state_bytes(plan, group) for group, count in trained)),
        HostCategory.GRADIENTS: float(sum(count * group.formats.gradients.bytes for group, count in trained)),
        HostCategory.PARAMETERS: float(
            sum(count * group.formats.stored.bytes for group, count in updated if offload.offloads_shards)
        ),
    }


def _state_bytes(plan: Plan, group: ParameterGroup) -> Bytes:
    """Bytes per parameter that the CPU updates: moments, and the weights unless they are counted elsewhere."""
    formats = group.formats
    weight_format = formats.master_copy or (None if plan.training.offload.offloads_shards else formats.stored)
    return group.state_bytes + (0.0 if weight_format is None else weight_format.bytes)


def _peak_activation_bytes(plan: Plan, actions: Iterable[Action]) -> Bytes:
    """Peak bytes of microbatches in flight on the host: from forward until backward, or its first half, is done."""
    sizes = [Activations(plan).host_bytes(stage) for stage in plan.stages]
    signs = {ActionKind.FORWARD: 1.0, ActionKind.WEIGHT_GRADIENT: 0.0}
    changes = [signs.get(action.kind, -1.0) * sizes[action.stage] for action in actions]
    return float(np.cumsum(changes).max(initial=0.0))
