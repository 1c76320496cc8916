"""Which model is trained? A stack of layers between an embedding and a head, and its exact parameter count.

A layer is norm, attention, residual, norm, MLP, residual (pre-norm, GPT-2 and after), where it has both, or as its
`BlockForm` says; a final norm and the logits matrix follow. Vaswani et al. 2017 (arXiv:1706.03762), Radford et al. 2019
(GPT-2), Touvron et al. 2023 (arXiv:2302.13971).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, Final

from clustersim.common.errors import InputError
from clustersim.model.layer_stack import (
    Attention,
    BlockForm,
    DenseMlp,
    FullAttention,
    LatentAttention,
    LayerRun,
    LayerSpec,
    Mlp,
    QkNorm,
    RoutedMlp,
    Stack,
    count,
    cut,
    joined,
)
from clustersim.model.lora import Lora, Projection


class Norm(Enum):
    """LayerNorm has weight and bias, RMSNorm a weight."""

    LAYERNORM = "layernorm"
    RMSNORM = "rmsnorm"


class Positions(Enum):
    """Learned positions are a table added to the embedding; rotary ones are applied to queries and keys.

    ALIBI adds a slope to the scores and has no parameters.
    """

    LEARNED = "learned"
    ROTARY = "rotary"
    ALIBI = "alibi"


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder-only transformer. stack: its layers in order.

    linear_bias: the attention output and the MLP have biases; tied_embeddings: the logits matrix is the embedding;
    vocab is used as it is (frameworks pad it: give the padded size); embedding_norm: the embedding is normalised before
    the first layer (BLOOM); logit_softcap: a tanh caps the logits (Gemma 2); spare_positions: rows of the table of
    learned positions beyond `max_positions` (OPT has 2); head_bias: the logits have one (Phi); mtp_layers: how many
    layers behind the stack predict a token further on each (multi-token prediction), of the stack's last kind.
    """

    name: str
    stack: Stack
    hidden: int
    vocab: int
    max_positions: int
    norm: Norm
    positions: Positions
    tied_embeddings: bool
    linear_bias: bool
    dropout: bool = False
    embedding_norm: bool = False
    logit_softcap: bool = False
    spare_positions: int = 0
    head_bias: bool = False
    mtp_layers: int = 0

    @property
    def layers(self) -> int:
        """How many layers there are, without those that predict further tokens."""
        return count(self.stack)

    @property
    def ahead(self) -> Stack:
        """The layers that predict further tokens."""
        kinds = (replace(run.spec, ahead=True) for run in self.stack[-1:])
        return tuple(LayerRun(spec, self.mtp_layers) for spec in kinds) if self.mtp_layers else ()

    @property
    def every(self) -> Stack:
        """All layers, those that predict further tokens last."""
        return (*self.stack, *self.ahead)

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        """The different kinds of layers, in the order in which they first come."""
        return tuple(dict.fromkeys(run.spec for run in self.every))

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The different kinds of attention, in the order in which they first come."""
        return tuple(dict.fromkeys(spec.attention for spec in self.specs if spec.attention is not None))

    @property
    def position_rows(self) -> int:
        """Rows of the table of learned positions."""
        return self.max_positions + self.spare_positions

    @property
    def mlps(self) -> tuple[DenseMlp, ...]:
        """The different kinds of dense MLP, in the order in which they first come."""
        return tuple(dict.fromkeys(spec.mlp for spec in self.specs if isinstance(spec.mlp, DenseMlp)))

    @property
    def routed(self) -> tuple[RoutedMlp, ...]:
        """The mixture of each layer that has one, in model order."""
        runs = ((run.spec.mlp, run.count) for run in self.every)
        return tuple(mlp for mlp, count in runs if isinstance(mlp, RoutedMlp) for _ in range(count))

    @property
    def mixtures(self) -> tuple[RoutedMlp, ...]:
        """The different mixtures of experts, in the order in which they first come."""
        return tuple(dict.fromkeys(spec.mlp for spec in self.specs if isinstance(spec.mlp, RoutedMlp)))


_OF_MODEL: Final = tuple(field.name for field in fields(Model) if field.name != "stack")
_OF_ATTENTION: Final = tuple(field.name for field in fields(FullAttention))
_NOT_LATENT: Final = tuple(name for name in _OF_ATTENTION if name != "heads")
_OF_MLP: Final = {"ffn": "ffn", "mlp": "form"}


def uniform(*, layers: int, ffn: int, mlp: Mlp, block: BlockForm = BlockForm.PRE_NORM, **dimensions: Any) -> Model:
    """A model of equal layers; dimensions: the fields of `FullAttention`, and of `Model` but for its stack."""
    attention = FullAttention(**{name: dimensions.pop(name) for name in _OF_ATTENTION if name in dimensions})
    return Model(stack=(LayerRun(LayerSpec(attention, DenseMlp(ffn, mlp), block), layers),), **dimensions)


def dimensions(model: Model) -> dict[str, Any]:
    """What `uniform` takes to make the model; raise InputError where its layers differ."""
    match model.stack:
        case (LayerRun(LayerSpec(FullAttention() as attention, DenseMlp() as mlp, block), layers),):
            of_layer = {"layers": layers, "ffn": mlp.ffn, "mlp": mlp.form, "block": block}
            of_attention = {name: getattr(attention, name) for name in _OF_ATTENTION}
            return of_layer | of_attention | {name: getattr(model, name) for name in _OF_MODEL}
    raise InputError(f"{model.name} has layers that differ: there are no dimensions that all of them have")


def resized(model: Model, layers: int | None = None, **changes: Any) -> Model:
    """The model with some dimensions changed, those of layers in all its layers; layers: how many it keeps.

    Raise InputError for more layers than it has, where they differ.
    """
    whole = {name: changes.pop(name) for name in _OF_MODEL if name in changes}
    stack = model.stack if layers is None else _lengthened(model, layers)
    return replace(model, stack=joined(LayerRun(changed(run.spec, **changes), run.count) for run in stack), **whole)


def changed(spec: LayerSpec, **changes: Any) -> LayerSpec:
    """A layer with other dimensions: those of its attention, of its MLP (ffn, mlp), or its block, as it has them."""
    if isinstance(spec.attention, LatentAttention) and (
        wrong := [change for change in changes if change in _NOT_LATENT]
    ):
        raise InputError(f"{wrong[0]}: latent attention has heads of its own dimensions; leave it out")
    of_mlp = {_OF_MLP[name]: value for name, value in changes.items() if name in _OF_MLP}
    of_attention = {name: value for name, value in changes.items() if name not in (*_OF_MLP, "block")}
    match spec.mlp:
        case RoutedMlp():  # whose experts have a width of their own
            of_mlp.pop("ffn", None)
    return LayerSpec(
        None if spec.attention is None else replace(spec.attention, **of_attention),
        None if spec.mlp is None else replace(spec.mlp, **of_mlp),
        changes.get("block", spec.block),
        spec.ahead,
    )


def _lengthened(model: Model, layers: int) -> Stack:
    """The first layers of a model, or more where all are equal."""
    if layers <= model.layers:
        return cut(model.stack, 0, layers)
    if len(model.stack) > 1:
        raise InputError(
            f"{model.name} has {model.layers} layers that differ, so nothing says what {layers} would be; "
            f"at most {model.layers} fits"
        )
    return tuple(LayerRun(run.spec, layers) for run in model.stack)


def norm_parameters(model: Model) -> int:
    """Parameters of one norm over the hidden dimension."""
    return model.hidden * (2 if model.norm is Norm.LAYERNORM else 1)


def projections(model: Model, spec: LayerSpec) -> dict[Projection, tuple[int, int]]:
    """The matrices of one layer, and how many inputs and outputs each has."""
    found: dict[Projection, tuple[int, int]] = {}
    if isinstance(attention := spec.attention, FullAttention):
        queries, keys = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
        found |= {Projection.Q: (model.hidden, queries), Projection.K: (model.hidden, keys)}
        found |= {Projection.V: (model.hidden, keys), Projection.O: (queries, model.hidden)}
    mlp = spec.mlp.alone if isinstance(spec.mlp, RoutedMlp) else spec.mlp
    return found if mlp is None else found | _mlp_projections(model, mlp)


def _mlp_projections(model: Model, mlp: DenseMlp) -> dict[Projection, tuple[int, int]]:
    gate = {Projection.GATE: (model.hidden, mlp.ffn)} if mlp.form is Mlp.SWIGLU else {}
    return {**gate, Projection.UP: (model.hidden, mlp.ffn), Projection.DOWN: (mlp.ffn, model.hidden)}


def every_projection(model: Model) -> frozenset[Projection]:
    """The matrices that some layer or expert has."""
    found = {projection for spec in model.specs for projection in projections(model, spec)}
    single = (DenseMlp(mixture.ffn, mixture.form) for mixture in model.mixtures)
    return frozenset(found.union(*(_mlp_projections(model, dense_mlp) for dense_mlp in single)))


def adapter_parameters(model: Model, lora: Lora) -> int:
    """Parameters of all adapters: of each so many ranks of its inputs and of its outputs."""
    return sum(run.count * _adapter_parameters(projections(model, run.spec), lora) for run in model.stack)


def _adapter_parameters(there: Mapping[Projection, tuple[int, int]], lora: Lora) -> int:
    count = 0
    for target in lora.targets:
        sizes = [there[projection] for projection in target.covers if projection in there]
        count += lora.rank * (sizes[0][0] + sum(outputs for _, outputs in sizes)) if sizes else 0
    return count


def layer_parameters(model: Model, spec: LayerSpec) -> int:
    """Parameters of one layer: attention and MLP, and its norms."""
    attention = 0 if spec.attention is None else _attention_parameters(model, spec.attention)
    match spec.mlp:
        case DenseMlp() as dense:
            mlp = _mlp_parameters(model, dense)
        case RoutedMlp() as routed:
            mlp = mixture_parameters(model, routed, routed.experts)
        case None:
            mlp = 0
    joined_to = _joining_matrix(model) + 3 * norm_parameters(model) if spec.ahead else 0
    return attention + mlp + joined_to + _norms(spec) * norm_parameters(model)


def _joining_matrix(model: Model) -> int:
    """Elements of the matrix that makes the input of a layer which predicts a further token, [2 hidden -> hidden]."""
    return 2 * model.hidden**2


def _norms(spec: LayerSpec) -> int:
    """Norms of a layer over the hidden dimension."""
    branches = sum(part is not None for part in (spec.attention, spec.mlp))
    if spec.block is BlockForm.PARALLEL:
        return 1
    return branches * (spec.block.before + spec.block.after)


def embedding_parameters(model: Model) -> int:
    """Parameters of the token table, of learned positions and of a norm."""
    positions = model.position_rows if model.positions is Positions.LEARNED else 0
    normed = norm_parameters(model) if model.embedding_norm else 0
    return (model.vocab + positions) * model.hidden + normed


def head_parameters(model: Model) -> int:
    """Parameters of the final norm, of a logits matrix that is not tied to the embedding, and of its bias."""
    matrix = 0 if model.tied_embeddings else model.vocab * model.hidden
    return norm_parameters(model) + matrix + (model.vocab if model.head_bias else 0)


def parameters(model: Model) -> int:
    """Parameters of the whole model, tied ones once, with those of layers that predict further tokens."""
    layers = sum(run.count * layer_parameters(model, run.spec) for run in model.every)
    return layers + embedding_parameters(model) + head_parameters(model)


def mtp_parameters(model: Model) -> int:
    """Parameters of the layers that predict further tokens; embedding and logits matrix are the model's own."""
    return sum(run.count * layer_parameters(model, run.spec) for run in model.ahead)


def layer_matrix_parameters(model: Model, spec: LayerSpec) -> int:
    """Parameters of one layer that multiply a token's activations: matrices, without biases and norms.

    Of a mixture those of the experts that one token passes.
    """
    found = 0
    match spec.attention:
        case FullAttention(heads, kv_heads, head_dim):
            found += 2 * model.hidden * (heads + kv_heads) * head_dim
        case LatentAttention() as latent:
            found += _latent_matrices(model, latent)
    match spec.mlp:
        case DenseMlp(ffn, form):
            found += model.hidden * _matrices(form) * ffn
        case RoutedMlp() as routed:
            found += _mixture_matrices(model, routed, routed.top_k)
    return found + (_joining_matrix(model) if spec.ahead else 0)


def matrix_parameters(model: Model) -> int:
    """Parameters that multiply activations: the layers' matrices and the logits matrix, tied or not.

    The logits matrix counts once more for each layer that predicts a further token.
    """
    layers = sum(run.count * layer_matrix_parameters(model, run.spec) for run in model.every)
    return layers + (1 + model.mtp_layers) * model.vocab * model.hidden


def _latent_matrices(model: Model, latent: LatentAttention) -> int:
    """Elements of the matrices that make queries, keys and values, and of that of the output."""
    hidden, rank = model.hidden, latent.query_rank
    queries = hidden * latent.query_width if rank is None else rank * (hidden + latent.query_width)
    keys_values = hidden * (latent.kv_rank + latent.rope) + latent.kv_rank * latent.kv_width
    return queries + keys_values + latent.heads * latent.value_dim * hidden


def _attention_parameters(model: Model, attention: Attention) -> int:
    if isinstance(attention, LatentAttention):
        return _latent_matrices(model, attention) + (attention.query_rank or 0) + attention.kv_rank
    query, key_value = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    weights = model.hidden * (2 * query + 2 * key_value)
    biases = (query + 2 * key_value if attention.qkv_bias else 0) + (model.hidden if model.linear_bias else 0)
    biases += attention.heads if attention.sinks else 0
    match attention.qk_norm:
        case QkNorm.HEADS:
            return weights + biases + 2 * attention.head_dim
        case QkNorm.WHOLE:
            return weights + biases + query + key_value
    return weights + biases


def mixture_parameters(model: Model, routed: RoutedMlp, experts: int) -> int:
    """Parameters of a mixture with so many of its experts: router, experts, shared experts and their gate."""
    if (alone := routed.alone) is not None:
        return _mlp_parameters(model, alone)
    up = 2 * routed.ffn if routed.form is Mlp.SWIGLU else routed.ffn
    biases = routed.experts + experts * (up + model.hidden) if routed.bias else 0
    return _mixture_matrices(model, routed, experts) + biases


def _mixture_matrices(model: Model, routed: RoutedMlp, experts: int) -> int:
    """Elements of the matrices of a mixture with so many of its experts."""
    if (alone := routed.alone) is not None:
        return model.hidden * _matrices(alone.form) * alone.ffn
    gate = model.hidden if routed.shared_gate else 0
    width = experts * routed.ffn + routed.shared
    return model.hidden * (routed.experts + _matrices(routed.form) * width) + gate


def _matrices(form: Mlp) -> int:
    """Matrices of an MLP."""
    return 3 if form is Mlp.SWIGLU else 2


def active_parameters(model: Model) -> int:
    """Parameters of the whole model that one token meets: of mixtures, the experts that it passes."""
    mixtures = [(run.count, run.spec.mlp) for run in model.every if isinstance(run.spec.mlp, RoutedMlp)]
    every = sum(count * mixture_parameters(model, routed_mlp, routed_mlp.experts) for count, routed_mlp in mixtures)
    met = sum(count * mixture_parameters(model, item, item.top_k) for count, item in mixtures)
    return parameters(model) - every + met


def _mlp_parameters(model: Model, mlp: DenseMlp) -> int:
    up = 2 * mlp.ffn if mlp.form is Mlp.SWIGLU else mlp.ffn
    biases = up + model.hidden if model.linear_bias else 0
    return model.hidden * (up + mlp.ffn) + biases
