"""Operators of attention and another mixer side by side in one layer.

Both are one sharded region, as in a parallel block of attention and MLP: their outputs are summed before they leave
it, as are the gradients of their common input, which is saved once.
"""

from dataclasses import replace

from clustersim.model import memory_bound
from clustersim.model.attention_spec import FullAttention
from clustersim.model.mixers.full_attention import full_attention_operators
from clustersim.model.mixers.mamba2 import Mamba2, mamba2_operators
from clustersim.model.operators import Operator, ParallelRegion, RegionInput
from clustersim.model.parallel_mixers import ParallelMixers
from clustersim.model.sharded_layer import RankContext, memory_bound_operator
from clustersim.model.training import FusedKernel


def parallel_operators(rank: RankContext, mixer: ParallelMixers, *, after_norm: bool) -> list[Operator]:
    """The operators between the norm and the residual add."""
    match mixer.attention, mixer.other:
        case FullAttention() as attention, Mamba2() as mamba:
            (qkv, *attention_rest) = full_attention_operators(rank, attention, after_norm=after_norm)
            (first, *rest) = mamba2_operators(rank, mamba, after_norm=after_norm)
        case _:
            raise TypeError(f"{mixer.attention.label} next to {mixer.other.label} is not modelled")
    shared_bytes = rank.shared_input_bytes(rank.residual_elements)
    first = replace(
        first,
        region_input=RegionInput.SAME,
        saved_bytes=first.saved_bytes - shared_bytes,
        deferred_wgrad_bytes=first.deferred_wgrad_bytes - shared_bytes,
        wgrad_input_bytes=first.wgrad_input_bytes - shared_bytes,
    )
    qkv = replace(qkv, input_gradient=(*qkv.input_gradient, *_sum(rank, "mixer.gradient_sum").forward))
    return [qkv, *attention_rest, first, *rest, _sum(rank, "mixer.sum")]


def _sum(rank: RankContext, name: str) -> Operator:
    """The sum of both mixers' outputs, or of the gradients of their input."""
    spec = memory_bound.residual_spec(dropout=False, fused=rank.training.fuses(FusedKernel.RESIDUAL))
    shape = spec.shape_for(rank.shard.tokens, rank.model.hidden)
    return memory_bound_operator(ParallelRegion.SHARDED, name, rank.dtype, spec, (shape,))
