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


def one_rank(model: TransformerModel, layout: Layout) -> TransformerModel:
    """The model as one of the layout's tensor-parallel ranks holds it; tp divides heads and columns."""
    runs = (LayerGroup(_of_rank(run.spec, layout), run.count) for run in model.stack)
    return replace(model, stack=merge_groups(runs), vocab=LayerShard(1, 1, 1, tp=layout.tp).vocab_rows(model.vocab))


def _of_rank(spec: LayerSpec, layout: Layout) -> LayerSpec:
    attention, mlp, tp = spec.attention, spec.mlp, layout.tp
    heads = {} if attention is None else {"heads": attention.heads // tp, "kv_heads": max(1, attention.kv_heads // tp)}
    columns = {} if mlp is None else {"ffn": mlp.ffn // tp}
    made = change_layer(spec, **heads, **columns)
    match made.mlp:
        case MoeMlp() as routed:
            return replace(made, mlp=_own_experts(routed, layout))
    return made


def _own_experts(routed: MoeMlp, layout: Layout) -> MoeMlp:
    experts, ffn = max(routed.experts // layout.ep, routed.top_k), routed.ffn // layout.effective_etp
    router = routed.router if layout.ep == 1 else replace(routed.router, groups=1, limit=None)
    return replace(routed, experts=experts, ffn=ffn, shared=routed.shared // layout.tp, router=router)
