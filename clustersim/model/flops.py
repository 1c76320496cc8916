"""How many model FLOP does a step need by the field's convention, whatever is executed?

Six per token and parameter that multiplies activations (two forward, four backward; logits included,
embedding lookup not), plus twelve per layer, query width and key for attention: full matrix, no causal
halving, limited to the sliding window; nothing for recomputation. This is PaLM's model FLOP (Chowdhery et
al. 2022, arXiv:2204.02311, appendix B) and, for GPT, 72 B s L h^2 (1 + s/(6h) + V/(12 L h)) of
Korthikanti et al. 2022 (arXiv:2205.05198) appendix A.

MTP layers count with their projection and their logits (Megatron-LM, megatron/training/training.py,
`num_floating_point_operations`).

Causal attention computes only what its mask leaves, about half; counted this way
(`AttentionFlopConvention.CAUSAL`), long contexts have fewer FLOP, as in FlashAttention-2
(arXiv:2307.08691, section 4.1) and the causal MFU of DeepSeek-V3 (arXiv:2505.09343, table 4).

Frozen parameters have no gradient, so they count four (forward and input gradient), LoRA adapters six;
attention counts as usual.
"""

from enum import Enum

from clustersim.common.units import Flop
from clustersim.model.attention import max_attended_keys, mean_attended_keys
from clustersim.model.layer_stack import LayerSpec
from clustersim.model.lora import Lora
from clustersim.model.training import Training
from clustersim.model.transformer import TransformerModel, adapter_parameter_count, matrix_parameter_count


class AttentionFlopConvention(Enum):
    """Which keys count for a query of attention."""

    FULL = "all"  # the model-FLOP convention: the full matrix, limited to the window
    CAUSAL = "seen"  # keys that the causal mask leaves, averaged over a sequence


def token_flops(
    model: TransformerModel,
    sequence: int,
    lora: Lora | None = None,
    convention: AttentionFlopConvention = AttentionFlopConvention.FULL,
) -> Flop:
    """Model FLOP of one token, forward and backward.

    sequence: tokens; lora: adapters of a frozen model, None: all weights are trained.
    """
    score_width = sum(group.count * _score_width(group.spec, sequence, convention) for group in model.full_stack)
    matrices = matrix_parameter_count(model)
    matmul_flops = 6.0 * matrices if lora is None else 4.0 * matrices + 6.0 * adapter_parameter_count(model, lora)
    return matmul_flops + 12.0 * score_width


def _score_width(spec: LayerSpec, sequence: int, convention: AttentionFlopConvention) -> float:
    """Query width (mean of query and value width) times the number of keys that count for each query."""
    attention = spec.attention
    if attention is None:
        return 0
    key_count = max_attended_keys if convention is AttentionFlopConvention.FULL else mean_attended_keys
    return attention.heads * (attention.head_dim + attention.v_head_dim) / 2 * key_count(sequence, attention.window)


def model_flops(
    model: TransformerModel, training: Training, convention: AttentionFlopConvention = AttentionFlopConvention.FULL
) -> Flop:
    """Model FLOP of one training step of the full job."""
    return training.global_batch * training.sequence * token_flops(model, training.sequence, training.lora, convention)
