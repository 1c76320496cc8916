"""The shard of a model that one tensor-parallel rank holds, as a model of its own.

Its heads (at least one key/value head, which ranks then replicate), its columns of the MLP, its rows of the
vocabulary; hidden activations and norms are unsharded, as without sequence parallelism. Of an MoE layer, its
experts, or at least as many as a token selects, among which a router without groups then selects: each has
as many tokens as in the full model.
"""

from dataclasses import replace

from clustersim.model.layer_stack import LayerGroup, LayerSpec, MoeMlp, merge_groups
from clustersim.model.layers import LayerShard
from clustersim.model.transformer import TransformerModel, change_layer
from clustersim.parallel.layout import Layout


def model_of_rank(model: TransformerModel, layout: Layout) -> TransformerModel:
    """The model as one of the layout's tensor-parallel ranks holds it; tp divides heads and columns."""
    groups = (LayerGroup(_layer_of_rank(group.spec, layout), group.count) for group in model.stack)
    return replace(model, stack=merge_groups(groups), vocab=LayerShard(1, 1, 1, tp=layout.tp).vocab_rows(model.vocab))


def _layer_of_rank(spec: LayerSpec, layout: Layout) -> LayerSpec:
    attention, mlp, tp = spec.attention, spec.mlp, layout.tp
    heads = {} if attention is None else {"heads": attention.heads // tp, "kv_heads": max(1, attention.kv_heads // tp)}
    mlp_size = {} if mlp is None else {"ffn": mlp.ffn // tp}
    sharded = change_layer(spec, **heads, **mlp_size)
    match sharded.mlp:
        case MoeMlp() as routed:
            return replace(sharded, mlp=_local_experts(routed, layout))
    return sharded


def _local_experts(moe: MoeMlp, layout: Layout) -> MoeMlp:
    experts, ffn = max(moe.experts // layout.ep, moe.top_k), moe.ffn // layout.effective_etp
    router = moe.router if layout.ep == 1 else replace(moe.router, num_groups=1, group_topk=None)
    return replace(moe, experts=experts, ffn=ffn, shared=moe.shared // layout.tp, router=router)
