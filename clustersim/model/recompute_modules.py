"""Which parts of a layer can be recomputed by themselves?

The parts have the names of Megatron-LM's `--recompute-modules`; what is said here of each is what it does with it.
Whatever a part keeps for its backward is dropped, its inputs stay, and before its backward its forward is run again,
collectives included. Of most parts the result stays where a later operator reads it, as
`torch.utils.checkpoint` has it: the attention core; a dense MLP, which sums or scatters over tensor-parallel ranks
again; a mixture, which routes, dispatches and combines again; its shared experts. Of the others the result is dropped,
too, as soon as the operator that reads it has run, and is made again for that operator's backward: the norms before
attention and MLP, the projections of latent attention from its compressed vectors and the turning of positions, the
experts' activation function.

A part within another that is run again (an activation within its mixture) is run a third time. Assumed: what comes back
is there before the layer's backward, all at once, as that of the attention core always was; Megatron-LM brings each
part back when its backward is next, so its layers need less for a moment.

With Transformer Engine a norm before plain attention or a dense MLP is within the linear layer behind it: no part of
its own, but one of the MLP's (`overheads.norm_in_linear`).

Reference: NVIDIA/Megatron-LM, megatron/core/transformer/{transformer_config,transformer_layer,attention,
multi_latent_attention}.py, transformer/moe/{moe_layer,experts}.py, tensor_parallel/random.py (`checkpoint`,
`CheckpointWithoutOutput`); the norms' place, models/gpt/gpt_layer_specs.py.
"""

from typing import NamedTuple

from clustersim.common.enums import IdentityEnum
from clustersim.common.units import Bytes


class RecomputeModule(IdentityEnum):
    """A part of a layer that can be recomputed; the value is Megatron-LM's name for it."""

    LAYERNORM = "layernorm"
    MLA_UP_PROJECTION = "mla_up_proj"
    CORE_ATTENTION = "core_attn"
    MLP = "mlp"
    MOE = "moe"
    SHARED_EXPERTS = "shared_experts"
    MOE_ACTIVATION = "moe_act"

    @property
    def discards_output(self) -> bool:
        """Whether its result is dropped, too, and made again for the operator that reads it."""
        return self in (RecomputeModule.LAYERNORM, RecomputeModule.MLA_UP_PROJECTION, RecomputeModule.MOE_ACTIVATION)


class ModuleMembership(NamedTuple):
    """That an operator is in a module. comes: bytes of the module's inputs, which stay, that this operator keeps."""

    module: RecomputeModule
    input_bytes: Bytes = 0.0
