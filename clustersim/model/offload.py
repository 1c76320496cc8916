"""What of a training step lives on the host?

Activations of some layers between their forward and their backward (Megatron-LM's `--cpu-offloading`, torchtune's
activation offloading, DeepSpeed's `cpu_checkpointing`); a part of the optimizer's states with their update
(Megatron-LM's `--optimizer-cpu-offload`), with the gradients (DeepSpeed's ZeRO-Offload); or the whole of a shard,
parameters, gradients and states (torch FSDP2's `CPUOffloadPolicy`).
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ActivationOffload:
    """What some layers keep for backward goes to the host.

    layers: how many of each virtual stage, the first ones; None: the part `share` of them, in whole layers, rounded up;
    prefetch: how many layers ahead the copies back are, and forward is of the copies out.
    """

    layers: int | None = None
    share: float = 1.0
    prefetch: int = 1

    @property
    def buffer_count(self) -> int:
        """How many layers have what they keep on the device at once."""
        return self.prefetch + 1

    def offloaded_layers(self, layers: int) -> int:
        """How many of a stage's layers do so."""
        return math.ceil(self.share * layers) if self.layers is None else min(self.layers, layers)


@dataclass(frozen=True, slots=True)
class OptimizerOffload:
    """A part `share` of the optimizer's states is on the host, and updated there; gradients go, weights come back.

    gradients: all of them go while backward makes them, and are summed there; otherwise they go before the update.
    """

    share: float = 1.0
    gradients: bool = False


@dataclass(frozen=True, slots=True)
class ShardOffload:
    """A rank's shards of parameters and gradients, and its optimizer states, are on the host.

    Shards are copied before each gather, their gradients after each reduction; the optimizer runs on the CPU.
    """


@dataclass(frozen=True, slots=True)
class Offload:
    """activations, states: None: they stay on the device."""

    activations: ActivationOffload | None = None
    states: OptimizerOffload | ShardOffload | None = None

    @property
    def share(self) -> float:
        """The part of the optimizer's states on the host."""
        match self.states:
            case OptimizerOffload(share=share):
                return share
            case ShardOffload():
                return 1.0
        return 0.0

    @property
    def offloads_gradients(self) -> bool:
        """Whether gradients are on the host, where they go during backward."""
        return self.offloads_shards or (isinstance(self.states, OptimizerOffload) and self.states.gradients)

    @property
    def offloads_shards(self) -> bool:
        """Whether shards of parameters and gradients are on the host."""
        return isinstance(self.states, ShardOffload)


NO_OFFLOAD = Offload()
"""Everything stays on the device."""
