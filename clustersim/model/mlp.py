"""Which operators is a dense MLP made of on one rank?

The first matrix (with a gate, the first two as one product) by columns, the last by rows, the activation in between.
"""

from dataclasses import replace

from clustersim.model import memory_bound
from clustersim.model.kernels import MatmulShape
from clustersim.model.layer_stack import DenseMlp, Mlp
from clustersim.model.linear import Linear
from clustersim.model.lora import Projection
from clustersim.model.operators import Operator, Region
from clustersim.model.sharded_layer import OnRank, linear_operator, streamed


def dense(rank: OnRank, spec: DenseMlp, name: str = "mlp", *, behind_norm: bool = False) -> list[Operator]:
    """The operators of an MLP that every token passes, which is called so. behind_norm: a norm is in its first."""
    shard, ffn = rank.shard, spec.ffn // rank.shard.tp
    over = memory_bound.activation(spec.form, fused=rank.training.fused)
    return [
        _up(rank, spec.form, ffn, name, behind_norm=behind_norm),
        streamed(Region.SHARDED, f"{name}.activation", rank.dtype, over, (over.over(shard.tokens, ffn),)),
        _down(rank, spec.form, ffn, name),
    ]


def _up(rank: OnRank, form: Mlp, ffn: int, name: str, *, behind_norm: bool) -> Operator:
    """The fifth product of a layer; with a gate, the sixth beside it."""
    gated, tokens = form is Mlp.SWIGLU, rank.shard.tokens
    bias_tokens = tokens if rank.model.linear_bias else 0
    parts = (*(((Projection.GATE, ffn),) if gated else ()), (Projection.UP, ffn))
    up = Linear(f"{name}.up", tokens, rank.model.hidden, 2 * ffn if gated else ffn, rank.products, bias_tokens, parts)
    made = linear_operator(rank, up, rank.saved(rank.residual), behind_norm=behind_norm)
    return half_again(rank, made, replace(up, outputs=ffn if gated else 0, bias_tokens=0))


def _down(rank: OnRank, form: Mlp, ffn: int, name: str) -> Operator:
    """The last product of a layer: the seventh with a gate, else the sixth."""
    tokens = rank.shard.tokens
    bias_tokens = rank.shard.residual_tokens if rank.model.linear_bias else 0
    parts = ((Projection.DOWN, rank.model.hidden),)
    down = Linear(f"{name}.down", tokens, ffn, rank.model.hidden, rank.products, bias_tokens, parts, True)
    made = linear_operator(rank, down, rank.saved(tokens * ffn))
    seventh = form is Mlp.SWIGLU
    return half_again(rank, made, replace(down, outputs=0 if seventh else down.outputs, bias_tokens=0))


def half_again(rank: OnRank, made: Operator, again: Linear) -> Operator:
    """A linear layer of which selective recomputation by operations runs a part again and keeps the other outputs."""
    whole = made.forward[-1].shape  # behind what is cast for it
    outputs = whole.n if isinstance(whole, MatmulShape) else 0
    kernels = (*made.forward[:-1], *again.forward(rank.training.recipe)) if again.outputs else ()
    return replace(made, again=kernels, results=float(again.tokens * (outputs - again.outputs) * rank.dtype.bytes))
