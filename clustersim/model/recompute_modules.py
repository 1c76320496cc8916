"""Which modules of a layer can be recomputed selectively?

Modules have the names of Megatron-LM's `--recompute-modules` and its semantics. What a module saves for
its backward is discarded, its inputs stay, and its forward is run again before its backward, collectives
included. Of most modules the output stays where a later operator reads it, as in
`torch.utils.checkpoint`: the attention core; a dense MLP, which all-reduces or reduce-scatters over
tensor-parallel ranks again; a MoE layer, which routes, dispatches and combines again; its shared experts.
Of the others the output is discarded, too, as soon as the operator that reads it has run, and is
recomputed for that operator's backward: the norms before attention and MLP, the MLA up projections with
rotary positions, the experts' activation function.

A module nested in another one that is recomputed (an activation within its MoE layer) is run a third
time. Assumed: what is recomputed is there before the layer's backward, all at once, as the attention core
always was; Megatron-LM recomputes each module just before its own backward, so its layers need less
memory for a moment.

With Transformer Engine a norm before plain attention or a dense MLP is fused into the following linear
layer: it is no module by itself, but belongs to the MLP's (`overheads.norm_in_linear`).

Reference: NVIDIA/Megatron-LM, megatron/core/transformer/{transformer_config,transformer_layer,attention,
multi_latent_attention}.py, transformer/moe/{moe_layer,experts}.py, tensor_parallel/random.py
(`checkpoint`, `CheckpointWithoutOutput`); the norms' module, models/gpt/gpt_layer_specs.py.
"""

from typing import NamedTuple

from clustersim.common.enums import IdentityEnum
from clustersim.common.units import Bytes


class RecomputeModule(IdentityEnum):
    """A module of a layer that can be recomputed; the value is Megatron-LM's name for it."""

    LAYERNORM = "layernorm"
    MLA_UP_PROJECTION = "mla_up_proj"
    CORE_ATTENTION = "core_attn"
    MLP = "mlp"
    MOE = "moe"
    SHARED_EXPERTS = "shared_experts"
    MOE_ACTIVATION = "moe_act"

    @property
    def discards_output(self) -> bool:
        """Whether its output is discarded, too, and recomputed for the operator that reads it."""
        return self in (RecomputeModule.LAYERNORM, RecomputeModule.MLA_UP_PROJECTION, RecomputeModule.MOE_ACTIVATION)


class ModuleMembership(NamedTuple):
    """Membership of an operator in a module.

    input_bytes: bytes of the module's inputs, which stay, that this operator saves.
    """

    module: RecomputeModule
    input_bytes: Bytes = 0.0
