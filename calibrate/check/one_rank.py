"""What does one tensor-parallel rank hold of a model? A model of its own, which one process can run without the others.

Its heads (keys and values at least one, which ranks then hold twice), its columns of the MLP, its rows of the
vocabulary; hidden activations and norms are whole, as they are without sequence parallelism.
"""

from dataclasses import replace

from clustersim.workload.layers import Shard
from clustersim.workload.stack import LayerRun, LayerSpec, joined
from clustersim.workload.transformer import Model, changed


def one_rank(model: Model, tp: int) -> Model:
    """The model as one of so many ranks holds it; tp divides heads and columns."""
    runs = (LayerRun(_of_rank(run.spec, tp), run.count) for run in model.stack)
    return replace(model, stack=joined(runs), vocab=Shard(1, 1, 1, tp=tp).rows(model.vocab))


def _of_rank(spec: LayerSpec, tp: int) -> LayerSpec:
    attention, mlp = spec.attention, spec.mlp
    heads = {} if attention is None else {"heads": attention.heads // tp, "kv_heads": max(1, attention.kv_heads // tp)}
    columns = {} if mlp is None else {"ffn": mlp.ffn // tp}
    return changed(spec, **heads, **columns)
