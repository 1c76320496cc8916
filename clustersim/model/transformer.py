"""A transformer model: a layer stack between an embedding and a head, and its exact parameter count.

A layer is norm, attention, residual add, norm, MLP, residual add (pre-norm, GPT-2 and after), where it
has both, or as its `BlockForm` says; a final norm and the logits matrix follow. Vaswani et al. 2017
(arXiv:1706.03762), Radford et al. 2019 (GPT-2), Touvron et al. 2023 (arXiv:2302.13971).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, Final

from clustersim.common.errors import InputError
from clustersim.model.attention_spec import FULL_ATTENTION_FIELDS, FullAttention, LatentAttention, SoftmaxAttention
from clustersim.model.conditioning import Conditioning
from clustersim.model.gradient_flow import ALL_TRAINED, ModelGradients
from clustersim.model.image_counts import ImageCounts, drawn_images
from clustersim.model.layer_stack import (
    BlockForm,
    DenseMlp,
    LayerGroup,
    LayerSpec,
    LayerStack,
    MlpType,
    MoeMlp,
    layer_count,
    merge_groups,
    slice_layers,
)
from clustersim.model.lora import Lora, Projection
from clustersim.model.mixer import Mixer
from clustersim.model.model_ends import VOCABULARY_HEAD, ModelHead, PatchEmbedding, Projector
from clustersim.model.sparse_attention_spec import DeepseekSparseAttention


class Norm(Enum):
    """LayerNorm has weight and bias unless the model says otherwise, RMSNorm a weight only."""

    LAYERNORM = "layernorm"
    RMSNORM = "rmsnorm"


class PositionEncoding(Enum):
    """Position encoding. LEARNED: a table added to the embedding; ROTARY: applied to queries and keys.

    SINUSOIDAL: a fixed table is added (Vaswani et al. 2017, section 3.5); ALIBI adds a slope to the scores. Neither
    has parameters.
    """

    LEARNED = "learned"
    ROTARY = "rotary"
    ALIBI = "alibi"
    SINUSOIDAL = "sinusoidal"


@dataclass(frozen=True, slots=True)
class TransformerModel:
    """A transformer: a decoder of tokens, or an encoder of images. stack: its layers in order.

    linear_bias: the attention output and the MLP have biases; tied_embeddings: the logits matrix is the embedding;
    vocab is used as it is (frameworks pad it: give the padded size); embedding_norm: the embedding is normalized
    before the first layer (BLOOM); final_logit_softcapping: a tanh caps the logits (Gemma 2); spare_positions: rows
    of the table of learned positions beyond `max_positions` (OPT has 2); head_bias: the logits have one (Phi);
    mtp_layers: number of multi-token prediction layers after the stack; mtp_spec: of these, None: that of the
    stack's last layer; layernorm_vectors: what a LayerNorm learns: weight and bias (2), a weight (1, Cohere) or
    nothing (0, OLMo); patches: what takes the place of the table of tokens, None: the table, of `vocab` rows, which
    are none otherwise; head: what follows the final norm; gradients: which parts are trained; encoder: what maps
    images to some of its tokens; layer_scale: every branch of a layer is multiplied by a learned vector before the
    residual add (Touvron et al. 2021, arXiv:2103.17239); conditioning: what a diffusion transformer reads besides
    patches; label: what the names of its operators begin with, if it is not the only tower.
    """

    name: str
    stack: LayerStack
    hidden: int
    vocab: int
    max_positions: int
    norm: Norm
    positions: PositionEncoding
    tied_embeddings: bool
    linear_bias: bool
    dropout: bool = False
    embedding_norm: bool = False
    final_logit_softcapping: bool = False
    spare_positions: int = 0
    head_bias: bool = False
    mtp_layers: int = 0
    layernorm_vectors: int = 2
    patches: PatchEmbedding | None = None
    head: ModelHead = VOCABULARY_HEAD
    gradients: ModelGradients = ALL_TRAINED
    encoder: "Encoder | None" = None
    layer_scale: bool = False
    label: str = ""
    conditioning: Conditioning | None = None
    mtp_spec: LayerSpec | None = None

    @property
    def sample_tokens(self) -> int:
        """Tokens of a sample in patches, with those of a text that is part of the sequence; 0 for a model of tokens."""
        text = None if self.conditioning is None else self.conditioning.text
        joined = text.tokens if text is not None and text.joins else 0
        return 0 if self.patches is None else self.patches.tokens + joined

    @property
    def has_vocabulary_loss(self) -> bool:
        """Whether every token has logits over the vocabulary, and a loss."""
        return self.head == VOCABULARY_HEAD

    @property
    def layer_count(self) -> int:
        """Number of layers, without multi-token prediction layers."""
        return layer_count(self.stack)

    @property
    def mtp_stack(self) -> LayerStack:
        """The multi-token prediction layers."""
        if not self.mtp_layers:
            return ()
        return (LayerGroup(replace(self.mtp_spec or self.stack[-1].spec, is_mtp=True), self.mtp_layers),)

    @property
    def full_stack(self) -> LayerStack:
        """All layers, multi-token prediction layers last."""
        return (*self.stack, *self.mtp_stack)

    @property
    def distinct_specs(self) -> tuple[LayerSpec, ...]:
        """The distinct layer specs, in order of first occurrence."""
        return tuple(dict.fromkeys(group.spec for group in self.full_stack))

    @property
    def distinct_mixers(self) -> tuple[Mixer, ...]:
        """The distinct mixers, in order of first occurrence."""
        return tuple(dict.fromkeys(mixer for spec in self.distinct_specs for mixer in spec.mixers))

    @property
    def distinct_attentions(self) -> tuple[SoftmaxAttention, ...]:
        """The distinct mixers that are softmax attention, in order of first occurrence."""
        return tuple(dict.fromkeys(spec.attention for spec in self.distinct_specs if spec.attention is not None))

    @property
    def has_other_mixers(self) -> bool:
        """Whether some layer mixes tokens by anything but softmax attention, such as a scan."""
        return not all(isinstance(mixer, SoftmaxAttention) for mixer in self.distinct_mixers)

    @property
    def uses_latent_attention(self) -> bool:
        """Whether some layer has multi-head latent attention (MLA)."""
        return any(isinstance(attention, LatentAttention) for attention in self.distinct_attentions)

    @property
    def trains_indexer_only(self) -> bool:
        """Whether all weights but those of indexers are frozen: their warm-up before attention becomes sparse."""
        return any(isinstance(one, DeepseekSparseAttention) and one.warms_up for one in self.distinct_mixers)

    @property
    def position_table_rows(self) -> int:
        """Rows of the table of learned positions."""
        return self.max_positions + self.spare_positions

    @property
    def distinct_dense_mlps(self) -> tuple[DenseMlp, ...]:
        """The distinct dense MLPs, in order of first occurrence."""
        return tuple(dict.fromkeys(spec.mlp for spec in self.distinct_specs if isinstance(spec.mlp, DenseMlp)))

    @property
    def moe_layers(self) -> tuple[MoeMlp, ...]:
        """The MoE spec of each layer that has one, in model order."""
        mlp_counts = ((group.spec.mlp, group.count) for group in self.full_stack)
        return tuple(mlp for mlp, count in mlp_counts if isinstance(mlp, MoeMlp) for _ in range(count))

    @property
    def distinct_moes(self) -> tuple[MoeMlp, ...]:
        """The distinct MoE specs, in order of first occurrence."""
        return tuple(dict.fromkeys(spec.mlp for spec in self.distinct_specs if isinstance(spec.mlp, MoeMlp)))

    @property
    def distinct_routed_moes(self) -> tuple[MoeMlp, ...]:
        """The distinct MoE specs that route tokens: those with more than one expert."""
        return tuple(moe for moe in self.distinct_moes if moe.single_dense_mlp is None)


@dataclass(frozen=True, slots=True)
class Encoder:
    """A tower of its own in front of a language model: an encoder of images whose head is a projector.

    samples: images of a sequence of the language model, in the mean; counts: what those of each are drawn from, None:
    all have as many; recomputed: it is under the recomputation policy of the language model, too.
    """

    model: TransformerModel
    samples: float
    recomputed: bool = True
    counts: ImageCounts | None = None

    @property
    def projector(self) -> Projector:
        """What maps its tokens to those of the language model."""
        head = self.model.head
        if not isinstance(head, Projector):
            raise TypeError(f"{self.model.name} has no projector")
        return head

    @property
    def sample_tokens(self) -> int:
        """Tokens of an image in the encoder."""
        return self.model.sample_tokens

    @property
    def projected_tokens(self) -> float:
        """Tokens of a sequence of the language model that come from images, in the mean."""
        sizes = self.image_tokens
        return self.samples * sum(map(self.projector.projected_tokens, sizes)) / len(sizes)

    @property
    def image_tokens(self) -> tuple[int, ...]:
        """Tokens of images in the encoder, each as likely as the others."""
        return (self.sample_tokens,) if self.counts is None else self.counts.tokens or (self.sample_tokens,)

    def samples_held(self, sequence: int) -> int:
        """Images that a sequence of the language model has room for, however large."""
        return sequence // self.projector.projected_tokens(max(self.image_tokens))

    def images_by_tokens(self, sequences: int, sequence: int) -> Mapping[int, float]:
        """Images of a step with this many sequences, of `sequence` tokens each, by their tokens in the encoder."""
        if self.counts is None:
            return {self.sample_tokens: self.samples * sequences}
        return drawn_images(self.counts, sequences, self.samples_held(sequence), self.sample_tokens)


_MODEL_FIELDS: Final = tuple(field.name for field in fields(TransformerModel) if field.name != "stack")
_MLP_FIELDS: Final = {"ffn": "ffn", "mlp": "form"}


def uniform_model(
    *, layers: int, ffn: int, mlp: MlpType, block: BlockForm = BlockForm.PRE_NORM, **dimensions: Any
) -> TransformerModel:
    """A model of equal layers.

    dimensions: fields of `FullAttention`, and of `TransformerModel` except its stack.
    """
    attention = FullAttention(**{name: dimensions.pop(name) for name in FULL_ATTENTION_FIELDS if name in dimensions})
    return TransformerModel(stack=(LayerGroup(LayerSpec(attention, DenseMlp(ffn, mlp), block), layers),), **dimensions)


def uniform_dimensions(model: TransformerModel) -> dict[str, Any]:
    """The arguments of `uniform_model` that give this model; raise InputError where its layers differ."""
    match model.stack:
        case (LayerGroup(LayerSpec(FullAttention() as attention, DenseMlp() as mlp, block), layers),):
            layer_dimensions = {"layers": layers, "ffn": mlp.ffn, "mlp": mlp.form, "block": block}
            attention_dimensions = {name: getattr(attention, name) for name in FULL_ATTENTION_FIELDS}
            return layer_dimensions | attention_dimensions | {name: getattr(model, name) for name in _MODEL_FIELDS}
    raise InputError(f"{model.name} has layers that differ: there are no dimensions that all of them have")


def resize_model(model: TransformerModel, layers: int | None = None, **changes: Any) -> TransformerModel:
    """The model with some dimensions changed, those of layers in all its layers; layers: how many it keeps.

    Raise InputError for more layers than it has, where they differ.
    """
    model_changes = {name: changes.pop(name) for name in _MODEL_FIELDS if name in changes}
    stack = model.stack if layers is None else _resize_stack(model, layers)
    resized = replace(model, stack=stack, **model_changes)
    return map_layers(resized, lambda spec: change_layer(spec, **changes))


def map_layers(model: TransformerModel, change: Callable[[LayerSpec], LayerSpec]) -> TransformerModel:
    """The model with every layer changed, multi-token prediction layers of their own kind among them."""
    return replace(
        model,
        stack=merge_groups(LayerGroup(change(group.spec), group.count) for group in model.stack),
        mtp_spec=None if model.mtp_spec is None else change(model.mtp_spec),
    )


def change_layer(spec: LayerSpec, **changes: Any) -> LayerSpec:
    """A layer spec with other dimensions: fields of its attention or MLP (ffn, mlp), or its block form."""
    mlp_changes = {_MLP_FIELDS[name]: value for name, value in changes.items() if name in _MLP_FIELDS}
    attention_changes = {name: value for name, value in changes.items() if name not in (*_MLP_FIELDS, "block")}
    match spec.mlp:
        case MoeMlp():  # ffn does not apply to experts, which have their own width
            mlp_changes.pop("ffn", None)
    return LayerSpec(
        None if spec.mixer is None else spec.mixer.with_changes(attention_changes),
        None if spec.mlp is None else replace(spec.mlp, **mlp_changes),
        changes.get("block", spec.block),
        spec.is_mtp,
        cross=spec.cross,
        modulation=spec.modulation,
        stream_tokens=spec.stream_tokens,
        shared=None if spec.shared is None else spec.shared.with_changes(attention_changes),
    )


def _resize_stack(model: TransformerModel, layers: int) -> LayerStack:
    """The first layers of a model, or more where all are equal."""
    if layers <= model.layer_count:
        return slice_layers(model.stack, 0, layers)
    if len(model.stack) > 1:
        raise InputError(
            f"{model.name} has {model.layer_count} layers that differ, so nothing says what {layers} would be; "
            f"at most {model.layer_count} fits"
        )
    return tuple(LayerGroup(group.spec, layers) for group in model.stack)


def norm_parameter_count(model: TransformerModel) -> int:
    """Parameters of one norm over the hidden dimension."""
    return model.hidden * (model.layernorm_vectors if model.norm is Norm.LAYERNORM else 1)


def projection_sizes(model: TransformerModel, spec: LayerSpec) -> dict[Projection, tuple[int, int]]:
    """The matrices of one layer, with (inputs, outputs) of each."""
    sizes = {} if spec.mixer is None else dict(spec.mixer.projection_sizes(model.hidden))
    mlp = spec.mlp.single_dense_mlp if isinstance(spec.mlp, MoeMlp) else spec.mlp
    return sizes if mlp is None else sizes | _mlp_projection_sizes(model, mlp)


def _mlp_projection_sizes(model: TransformerModel, mlp: DenseMlp) -> dict[Projection, tuple[int, int]]:
    gate = {Projection.GATE: (model.hidden, mlp.ffn)} if mlp.form is MlpType.SWIGLU else {}
    return {**gate, Projection.UP: (model.hidden, mlp.ffn), Projection.DOWN: (mlp.ffn, model.hidden)}


def all_projections(model: TransformerModel) -> frozenset[Projection]:
    """The projections that some layer or expert of the model has."""
    layer_projections = {projection for spec in model.distinct_specs for projection in projection_sizes(model, spec)}
    expert_mlps = (DenseMlp(moe.ffn, moe.form) for moe in model.distinct_moes)
    return frozenset(layer_projections.union(*(_mlp_projection_sizes(model, mlp) for mlp in expert_mlps)))


def adapter_parameter_count(model: TransformerModel, lora: Lora) -> int:
    """Parameters of all adapters: per adapter, rank times its inputs and outputs."""
    return sum(
        group.count * _layer_adapter_parameters(projection_sizes(model, group.spec), lora) for group in model.stack
    )


def _layer_adapter_parameters(sizes_by_projection: Mapping[Projection, tuple[int, int]], lora: Lora) -> int:
    count = 0
    for target in lora.targets:
        sizes = [
            sizes_by_projection[projection] for projection in target.projections if projection in sizes_by_projection
        ]
        count += lora.rank * (sizes[0][0] + sum(outputs for _, outputs in sizes)) if sizes else 0
    return count


def layer_parameter_count(model: TransformerModel, spec: LayerSpec) -> int:
    """Parameters of one layer: mixer and MLP, and its norms."""
    mixer = 0 if spec.mixer is None else spec.mixer.parameter_count(model.hidden, linear_bias=model.linear_bias)
    match spec.mlp:
        case DenseMlp() as dense:
            mlp = _mlp_parameter_count(model, dense)
        case MoeMlp() as moe:
            mlp = moe_parameter_count(model, moe, moe.experts)
        case None:
            mlp = 0
    scales = _branch_count(spec) * model.hidden if model.layer_scale else 0
    shared = 0
    if spec.shared is not None:
        shared = spec.shared.parameter_count(model.hidden, linear_bias=model.linear_bias)
    cross = 0
    if spec.cross is not None:
        cross = spec.cross.parameter_count(model.hidden, linear_bias=model.linear_bias) + cross_norm_parameters(model)
    modulation = 0 if spec.modulation is None else spec.modulation.parameter_count(model.hidden)
    mtp_projection = _mtp_projection_elements(model) + 3 * norm_parameter_count(model) if spec.is_mtp else 0
    one_bias = model.hidden if spec.block is BlockForm.PARALLEL_FUSED and model.linear_bias else 0
    streams = 2 if spec.stream_tokens else 1
    branches = mixer + mlp + scales + modulation - one_bias + _norm_count(spec) * norm_parameter_count(model)
    return streams * branches + shared + cross + mtp_projection


def _mtp_projection_elements(model: TransformerModel) -> int:
    """Elements of the input projection of a multi-token prediction layer, [2 hidden -> hidden]."""
    return 2 * model.hidden**2


def cross_norm_parameters(model: TransformerModel) -> int:
    """Parameters of the norm before cross-attention, which has weights whatever the others have (Wan's `norm3`)."""
    return model.hidden * (2 if model.norm is Norm.LAYERNORM else 1)


def _branch_count(spec: LayerSpec) -> int:
    return sum(branch is not None for branch in (spec.mixer, spec.mlp))


def _norm_count(spec: LayerSpec) -> int:
    """Number of norms of a layer over the hidden dimension."""
    branches = _branch_count(spec)
    if spec.block in (BlockForm.PARALLEL, BlockForm.PARALLEL_FUSED):
        return 1
    return branches * (spec.block.has_pre_norm + spec.block.has_post_norm)


def embedding_parameter_count(model: TransformerModel) -> int:
    """Parameters of the token table or the patches' matrix, of learned positions and of a norm."""
    positions = model.position_table_rows if model.positions is PositionEncoding.LEARNED else 0
    norm = norm_parameter_count(model) if model.embedding_norm else 0
    patches = 0 if model.patches is None else model.patches.parameter_count(model.hidden)
    conditioning = 0 if model.conditioning is None else model.conditioning.parameter_count(model.hidden)
    return (model.vocab + positions) * model.hidden + norm + patches + conditioning


def head_parameter_count(model: TransformerModel) -> int:
    """Parameters of the final norm and of what follows it: an untied logits matrix and its bias, or another head."""
    matrix = 0 if model.tied_embeddings else model.vocab * model.hidden
    bias = model.vocab if model.head_bias else 0
    norms = model.head.norm_copies * norm_parameter_count(model)
    return norms + matrix + bias + model.head.parameter_count(model.hidden)


def parameter_count(model: TransformerModel) -> int:
    """Parameters of the model, tied ones once, including multi-token prediction layers and its encoder."""
    layers = sum(group.count * layer_parameter_count(model, group.spec) for group in model.full_stack)
    encoder = 0 if model.encoder is None else parameter_count(model.encoder.model)
    return layers + embedding_parameter_count(model) + head_parameter_count(model) + encoder


def mtp_parameter_count(model: TransformerModel) -> int:
    """Parameters of the multi-token prediction layers; embedding and logits matrix are the model's own."""
    return sum(group.count * layer_parameter_count(model, group.spec) for group in model.mtp_stack)


def layer_matrix_parameter_count(model: TransformerModel, spec: LayerSpec) -> int:
    """Parameters of one layer that multiply a token's activations: matrices, without biases and norms.

    Of a MoE layer only those of the experts that one token passes.
    """
    total = sum(mixer.matrix_elements(model.hidden) for mixer in spec.mixers)
    match spec.mlp:
        case DenseMlp(ffn, form):
            total += model.hidden * _mlp_matrix_count(form) * ffn
        case MoeMlp() as moe:
            total += _moe_matrix_elements(model, moe, moe.top_k)
    return total + (_mtp_projection_elements(model) if spec.is_mtp else 0)


def matrix_parameter_count(model: TransformerModel) -> int:
    """Parameters that multiply activations: the layers' matrices and the logits matrix, tied or not.

    The logits matrix counts once more for each multi-token prediction layer.
    """
    layers = sum(group.count * layer_matrix_parameter_count(model, group.spec) for group in model.full_stack)
    return layers + (1 + model.mtp_layers) * model.vocab * model.hidden


def moe_parameter_count(model: TransformerModel, moe: MoeMlp, expert_count: int) -> int:
    """Parameters of a MoE layer with `expert_count` of its experts, router and shared experts included."""
    if (dense := moe.single_dense_mlp) is not None:
        return _mlp_parameter_count(model, dense)
    up = 2 * moe.ffn if moe.form is MlpType.SWIGLU else moe.ffn
    biases = moe.experts + expert_count * (up + model.hidden) if moe.bias else 0
    return _moe_matrix_elements(model, moe, expert_count) + biases


def _moe_matrix_elements(model: TransformerModel, moe: MoeMlp, expert_count: int) -> int:
    """Matrix elements of a MoE layer with `expert_count` of its experts."""
    if (dense := moe.single_dense_mlp) is not None:
        return model.hidden * _mlp_matrix_count(dense.form) * dense.ffn
    gate = model.hidden if moe.shared_gate else 0
    width = expert_count * moe.ffn + moe.shared
    return model.hidden * (moe.experts + _mlp_matrix_count(moe.form) * width) + gate


def _mlp_matrix_count(form: MlpType) -> int:
    """Number of matrices of an MLP."""
    return 3 if form is MlpType.SWIGLU else 2


def active_parameter_count(model: TransformerModel) -> int:
    """Parameters of the model that one token uses: of MoE layers, only those of the experts it is routed to."""
    moe_counts = [(group.count, group.spec.mlp) for group in model.full_stack if isinstance(group.spec.mlp, MoeMlp)]
    total_count = sum(count * moe_parameter_count(model, moe, moe.experts) for count, moe in moe_counts)
    active_count = sum(count * moe_parameter_count(model, moe, moe.top_k) for count, moe in moe_counts)
    return parameter_count(model) - total_count + active_count


def _mlp_parameter_count(model: TransformerModel, mlp: DenseMlp) -> int:
    up = 2 * mlp.ffn if mlp.form is MlpType.SWIGLU else mlp.ffn
    biases = up + model.hidden if model.linear_bias else 0
    mixture = model.hidden if mlp.token_shift else 0
    return model.hidden * (up + mlp.ffn) + biases + mixture
