"""What of a training step is offloaded to host memory?

Activations of some layers between forward and backward (Megatron-LM's `--cpu-offloading`, torchtune's
activation offloading, DeepSpeed's `cpu_checkpointing`); a share of the optimizer states with their update
(Megatron-LM's `--optimizer-cpu-offload`), with the gradients (DeepSpeed's ZeRO-Offload); or a full shard:
parameters, gradients and states (torch FSDP2's `CPUOffloadPolicy`).
"""

import enum
import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ActivationOffload:
    """Saved activations of some layers are offloaded to the host.

    layers: number of layers of each virtual stage, the first ones; None: the fraction `share` of them,
    rounded up to full layers; prefetch: how many layers ahead copies back are issued, and how far forward
    runs ahead of copies out.
    """

    layers: int | None = None
    share: float = 1.0
    prefetch: int = 1

    @property
    def buffer_count(self) -> int:
        """Number of layers whose saved activations are on the device at once."""
        return self.prefetch + 1

    def offloaded_layers(self, layers: int) -> int:
        """Number of offloaded layers of a stage."""
        return math.ceil(self.share * layers) if self.layers is None else min(self.layers, layers)


@dataclass(frozen=True, slots=True)
class OptimizerOffload:
    """The fraction `share` of optimizer states is on the host and updated there.

    Gradients are copied out, weights back. gradients: all of them are copied out during backward and
    accumulated on the host; otherwise before the
    update.
    """

    share: float = 1.0
    gradients: bool = False


@dataclass(frozen=True, slots=True)
class ShardOffload:
    """A rank's shards of parameters and gradients, and its optimizer states, are on the host.

    Shards are copied in before each all-gather, gradients out after each reduction; the optimizer runs on the
    CPU.
    """


class HostUpdate(enum.Enum):
    """How the CPU updates its share of the weights.

    OVERLAPPED: slices are copied while others are updated, by a kernel that also writes the compute weights.
    SEQUENTIAL: one slice after the other, each in separate passes over host memory: gradients are scaled, Adam
    updates the master weights, these are converted, and the CPU waits for their copy to the device: DeepSpeed's step
    by sub-groups (`unscale_and_clip_grads`, `_optimizer_step` and `_reassign_or_swap_out_partitioned_parameters` of
    deepspeed/runtime/zero/stage3.py). Its stages 1 and 2 do the same to all of a parameter group at once, and of
    late wait for the copy at the next one only.
    """

    OVERLAPPED = "overlapped"
    SEQUENTIAL = "sequential"


@dataclass(frozen=True, slots=True)
class Offload:
    """Offloading of activations and optimizer states; None: they stay on the device.

    update: how the CPU updates its share; threads: of each rank, on a core each; None: as many as the host's memory
    keeps busy.
    """

    activations: ActivationOffload | None = None
    states: OptimizerOffload | ShardOffload | None = None
    update: HostUpdate = HostUpdate.OVERLAPPED
    threads: int | None = None

    @property
    def share(self) -> float:
        """Fraction of the optimizer states on the host."""
        match self.states:
            case OptimizerOffload(share=share):
                return share
            case ShardOffload():
                return 1.0
        return 0.0

    @property
    def offloads_gradients(self) -> bool:
        """Whether gradients are on the host, copied out during backward."""
        return self.offloads_shards or (isinstance(self.states, OptimizerOffload) and self.states.gradients)

    @property
    def offloads_shards(self) -> bool:
        """Whether shards of parameters and gradients are on the host."""
        return isinstance(self.states, ShardOffload)


NO_OFFLOAD = Offload()
"""Everything stays on the device."""
