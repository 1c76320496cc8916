"""How many model FLOP does a step need by the field's convention, whatever is executed?

Six per token and parameter that multiplies activations (two forward, four backward; logits included,
embedding lookup not), plus what the mixers do besides (`Mixer.mixing_flops`): for attention twelve per
layer, query width and key, full matrix, no causal halving, limited to the sliding window; nothing for
recomputation. This is PaLM's model FLOP (Chowdhery et al. 2022, arXiv:2204.02311, appendix B) and, for GPT,
72 B s L h^2 (1 + s/(6h) + V/(12 L h)) of Korthikanti et al. 2022 (arXiv:2205.05198) appendix A.

MTP layers count with their projection and their logits (Megatron-LM, megatron/training/training.py,
`num_floating_point_operations`).

Causal attention computes only what its mask leaves, about half; counted this way
(`AttentionFlopConvention.CAUSAL`), long contexts have fewer FLOP, as in FlashAttention-2
(arXiv:2307.08691, section 4.1) and the causal MFU of DeepSeek-V3 (arXiv:2505.09343, table 4).

Frozen parameters have no gradient, so they count four (forward and input gradient), LoRA adapters six;
attention counts as usual.

An encoder's patches count four, because pixels have no gradient; its head as it is run, once per sample. What runs
forward only, such as a frozen encoder, counts two. Where indexers of sparse attention are trained alone, no gradient
passes the others, which count two.
"""

from clustersim.common.units import Flop
from clustersim.model.documents import PackedBatch
from clustersim.model.gradient_flow import GradientFlow
from clustersim.model.image_counts import ImageWork
from clustersim.model.layer_stack import LayerSpec
from clustersim.model.lora import Lora
from clustersim.model.mixer import AttentionFlopConvention
from clustersim.model.sparse_attention_spec import DeepseekSparseAttention
from clustersim.model.training import Training
from clustersim.model.transformer import (
    Encoder,
    TransformerModel,
    adapter_parameter_count,
    layer_matrix_parameter_count,
    matrix_parameter_count,
)


def token_flops(
    model: TransformerModel,
    sequence: int,
    lora: Lora | None = None,
    convention: AttentionFlopConvention = AttentionFlopConvention.FULL,
) -> Flop:
    """Model FLOP of one token, forward and backward.

    sequence: tokens; lora: adapters of a frozen model, None: all weights are trained.
    """
    mixing_flops = sum(
        group.count * mixer.mixing_flops(sequence, convention)
        for group in model.full_stack
        for mixer in group.spec.mixers
    )
    matrices, layers = matrix_parameter_count(model), model.gradients.layers
    if model.trains_indexer_only:
        return 2.0 * matrices + 4.0 * _indexer_matrices(model) + mixing_flops
    if lora is None:
        matmul_flops = layers.flops_per_weight * matrices
    else:
        matmul_flops = 4.0 * matrices + 6.0 * adapter_parameter_count(model, lora)
    return matmul_flops + layers.mixing_share * mixing_flops + _end_flops(model, sequence) / sequence


def _end_flops(model: TransformerModel, sequence: int) -> Flop:
    """Model FLOP of one sample in patches, which have no gradient, and in a head of no vocabulary."""
    gradients, patches, head = model.gradients, 0.0, model.head.multiplications(model.hidden, sequence)
    if model.patches is not None:
        is_trained = gradients.embedding is GradientFlow.TRAINED
        count = sequence - (model.sample_tokens - model.patches.patches)
        patches = (4.0 if is_trained else 2.0) * count * model.patches.patch_elements * model.hidden
    per_weight = gradients.head.flops_per_weight
    needs_gradient = gradients.layers is not GradientFlow.NONE or gradients.head is GradientFlow.NONE
    per_input_weight = per_weight if needs_gradient else per_weight - 2.0
    modulations = gradients.layers.flops_per_weight * sum(
        group.count * group.spec.modulation.multiplications(model.hidden) * (2 if group.spec.stream_tokens else 1)
        for group in model.stack
        if group.spec.modulation is not None
    )
    heads = per_input_weight * head.of_input + per_weight * head.others
    return _conditioning_flops(model) + patches + modulations + heads


def _conditioning_flops(model: TransformerModel) -> Flop:
    """Model FLOP of a sample's vectors and text, whose first matrices read what has no gradient."""
    if model.conditioning is None:
        return 0.0
    first, others = model.conditioning.multiplications(model.hidden)
    return 4.0 * first + 6.0 * others


def _indexer_matrices(model: TransformerModel) -> int:
    """Weights of the matrices of all indexers."""
    mixers = ((group.spec.mixer, group.count) for group in model.full_stack)
    return sum(
        count * mixer.index_matrices(model.hidden)
        for mixer, count in mixers
        if isinstance(mixer, DeepseekSparseAttention)
    )


def layer_token_flops(model: TransformerModel, spec: LayerSpec, sequence: int) -> Flop:
    """Model FLOP of one token in one layer, forward and backward, of attention those that its mask leaves."""
    mixing = sum(mixer.mixing_flops(sequence, AttentionFlopConvention.CAUSAL) for mixer in spec.mixers)
    return 6.0 * layer_matrix_parameter_count(model, spec) + mixing


def model_flops(
    model: TransformerModel, training: Training, convention: AttentionFlopConvention = AttentionFlopConvention.FULL
) -> Flop:
    """Model FLOP of one training step of the full job; packed documents count as sequences of their own."""
    encoder_flops = _encoder_flops(model, training, convention)
    if training.documents is None:
        tokens = training.global_batch * training.sequence
        return tokens * token_flops(model, training.sequence, training.lora, convention) + encoder_flops
    batch = PackedBatch(training.documents, training.sequence, 1, training.global_batch, 1)
    lengths, counts = batch.piece_lengths()
    return encoder_flops + sum(
        int(count) * int(length) * token_flops(model, int(length), training.lora, convention)
        for length, count in zip(lengths, counts, strict=True)
    )


def _encoder_flops(model: TransformerModel, training: Training, convention: AttentionFlopConvention) -> Flop:
    """Model FLOP of a model's encoder and projector in one step."""
    encoder = model.encoder
    if encoder is None:
        return 0.0
    images = encoder.images_by_tokens(training.global_batch, training.sequence)
    return sum(count * _image_flops(encoder.model, tokens, convention) for tokens, count in images.items())


def encoder_image_flops(encoder: Encoder) -> Flop:
    """Model FLOP of an image in an encoder and its projector, forward and backward, in the mean over its sizes."""
    sizes = encoder.image_tokens
    return sum(_image_flops(encoder.model, tokens, AttentionFlopConvention.FULL) for tokens in sizes) / len(sizes)


def image_work(encoder: Encoder) -> ImageWork:
    """Model FLOP of an image by its tokens and their pairs; its ends, next to nothing, are proportional to tokens."""
    tokens = encoder.sample_tokens
    one, two = (_image_flops(encoder.model, count, AttentionFlopConvention.FULL) for count in (tokens, 2 * tokens))
    per_pair = (two - 2.0 * one) / (2.0 * tokens**2)
    return ImageWork(one / tokens - per_pair * tokens, per_pair, tokens)


def _image_flops(model: TransformerModel, tokens: int, convention: AttentionFlopConvention) -> Flop:
    """Model FLOP of an image of so many tokens."""
    return tokens * token_flops(model, tokens, None, convention)
