"""What does one tensor-parallel rank hold of a model? A model of its own, which one process can run without the others.

Its heads (keys and values at least one, which ranks then hold twice), its columns of the MLP, its rows of the
vocabulary; hidden activations and norms are whole, as they are without sequence parallelism. Of a mixture its experts,
or as many as a token chooses, among which a router without groups then chooses: they have as many rows as in the whole.
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
    router = moe.router if layout.ep == 1 else replace(moe.router, groups=1, limit=None)
    return replace(moe, experts=experts, ffn=ffn, shared=moe.shared // layout.tp, router=router)
