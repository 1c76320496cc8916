"""Operators of a dense MLP that runs on one tile of the sequence after the other.

DeepSpeed's `TiledMLP` (deepspeed/runtime/sequence_parallel/ulysses_sp.py; Bekman et al. 2025, arXiv:2506.13996) and
Liger's (liger_kernel/ops/tiled_mlp.py) run forward without autograd, save the MLP's input and run each tile again
before its backward, so that a layer that is checkpointed runs its MLP three times. A loop over tiles in a layer's
forward, as TRL's guide to long contexts has it (huggingface/trl pull request 6846), saves all that backward reads, but
has one tile's gradients at a time. Both collect the tiles' outputs, and gradients of their inputs, in one tensor, and
add every tile's weight gradients up.
"""

from collections.abc import Sequence
from dataclasses import replace

from clustersim.common.units import Bytes
from clustersim.model import memory_bound
from clustersim.model.kernels import Kernel
from clustersim.model.layer_stack import DenseMlp
from clustersim.model.mlp import mlp_operators
from clustersim.model.operators import Operator
from clustersim.model.overheads import Accumulation
from clustersim.model.sharded_layer import RankContext
from clustersim.model.training import TiledMlp


def tiled_mlp_operators(rank: RankContext, spec: DenseMlp, tiling: TiledMlp) -> list[Operator]:
    """The operators of an MLP, each with its kernels for all tiles."""
    count = tiling.tile_count(rank.shard.sequence, rank.model.hidden)
    tile_rank = replace(rank, shard=replace(rank.shard, sequence=-(-rank.shard.sequence // count)))
    tile = mlp_operators(tile_rank, spec)
    added = mlp_operators(_adding_rank(tile_rank), spec)
    pairs = zip(tile, added, strict=True)
    up, *others = [_repeat(operator, adding, count, tiling) for operator, adding in pairs]
    return _with_memory([up, *others], tile, rank, tiling)


def _adding_rank(rank: RankContext) -> RankContext:
    """The rank whose weight gradients are added to those of earlier tiles."""
    overheads = replace(rank.training.overheads, accumulation=Accumulation.ADDED)
    return replace(rank, training=replace(rank.training, overheads=overheads))


def _repeat(operator: Operator, adding: Operator, count: int, tiling: TiledMlp) -> Operator:
    """An operator of one tile for all of them; the gradients of the last one are accumulated as those of all layers."""
    again = operator.forward if tiling.recomputes else ()
    override = operator.recompute_override
    return replace(
        operator,
        forward=count * operator.forward,
        input_gradient=count * (*again, *operator.input_gradient),
        weight_gradient=((count - 1) * adding.weight_gradient) + operator.weight_gradient,
        recompute_override=() if tiling.recomputes else None if override is None else count * override,
    )


def _with_memory(
    operators: Sequence[Operator], tile: Sequence[Operator], rank: RankContext, tiling: TiledMlp
) -> list[Operator]:
    """What the MLP saves, which only its first operator frees, but for the last tile's; and what one tile needs."""
    up, activation, down = operators
    input_bytes = rank.saved_input_bytes(rank.residual_elements)
    inside = sum(operator.saved_bytes for operator in tile) - tile[0].saved_bytes
    collected = _collect_kernel(rank, up.name), _collect_kernel(rank, f"{up.name}.gradient")
    down = replace(down, forward=(*down.forward, collected[0]))
    up = replace(up, input_gradient=(*up.input_gradient, collected[1]))
    if tiling.recomputes:
        held = inside + rank.residual_bytes
        return [
            _saving(up, input_bytes),
            replace(_saving(activation, 0.0), temporary_bytes=held),
            replace(_saving(down, 0.0), saves_outputs=True),
        ]
    count = tiling.tile_count(rank.shard.sequence, rank.model.hidden)
    return [
        _saving(up, input_bytes + (count - 1) * inside),
        replace(activation, temporary_bytes=rank.residual_bytes),
        replace(down, saved_output_bytes=count * down.saved_output_bytes),
    ]


def _saving(operator: Operator, saved_bytes: Bytes) -> Operator:
    """The operator with what it saves; nothing is left for a weight gradient that runs apart."""
    return replace(operator, saved_bytes=saved_bytes, wgrad_input_bytes=min(operator.wgrad_input_bytes, saved_bytes))


def _collect_kernel(rank: RankContext, name: str) -> Kernel:
    """The copy of all tiles' results into one tensor."""
    return memory_bound.copy_kernel(f"{name}.tiles", rank.dtype, rank.residual_elements)
