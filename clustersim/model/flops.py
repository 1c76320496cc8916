"""How many model FLOP does a step need by the field's convention, whatever is executed?

Six per token and parameter that multiplies activations (two forward, four backward; logits included,
embedding lookup not), plus what the mixers do besides (`Mixer.mixing_flops`): for attention twelve per
layer, query width and key, full matrix, no causal halving, limited to the sliding window; nothing for
recomputation. This is PaLM's model FLOP (Chowdhery et
al. 2022, arXiv:2204.02311, appendix B) and, for GPT, 72 B s L h^2 (1 + s/(6h) + V/(12 L h)) of
Korthikanti et al. 2022 (arXiv:2205.05198) appendix A.

MTP layers count with their projection and their logits (Megatron-LM, megatron/training/training.py,
`num_floating_point_operations`).

Causal attention computes only what its mask leaves, about half; counted this way
(`AttentionFlopConvention.CAUSAL`), long contexts have fewer FLOP, as in FlashAttention-2
(arXiv:2307.08691, section 4.1) and the causal MFU of DeepSeek-V3 (arXiv:2505.09343, table 4).

Frozen parameters have no gradient, so they count four (forward and input gradient), LoRA adapters six;
attention counts as usual. Where indexers of sparse attention are trained alone, no gradient passes the others, which
count two.
"""

from clustersim.common.units import Flop
from clustersim.model.documents import PackedBatch
from clustersim.model.layer_stack import LayerSpec
from clustersim.model.lora import Lora
from clustersim.model.mixer import AttentionFlopConvention
from clustersim.model.sparse_attention_spec import DeepseekSparseAttention
from clustersim.model.training import Training
from clustersim.model.transformer import (
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
        group.count * group.spec.mixer.mixing_flops(sequence, convention)
        for group in model.full_stack
        if group.spec.mixer is not None
    )
    matrices = matrix_parameter_count(model)
    if model.trains_indexer_only:
        return 2.0 * matrices + 4.0 * _indexer_matrices(model) + mixing_flops
    matmul_flops = 6.0 * matrices if lora is None else 4.0 * matrices + 6.0 * adapter_parameter_count(model, lora)
    return matmul_flops + mixing_flops


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
    mixing = 0.0 if spec.mixer is None else spec.mixer.mixing_flops(sequence, AttentionFlopConvention.CAUSAL)
    return 6.0 * layer_matrix_parameter_count(model, spec) + mixing


def model_flops(
    model: TransformerModel, training: Training, convention: AttentionFlopConvention = AttentionFlopConvention.FULL
) -> Flop:
    """Model FLOP of one training step of the full job; packed documents count as sequences of their own."""
    if training.documents is None:
        tokens = training.global_batch * training.sequence
        return tokens * token_flops(model, training.sequence, training.lora, convention)
    batch = PackedBatch(training.documents, training.sequence, 1, training.global_batch, 1)
    lengths, counts = batch.piece_lengths()
    return sum(
        int(count) * int(length) * token_flops(model, int(length), training.lora, convention)
        for length, count in zip(lengths, counts, strict=True)
    )
