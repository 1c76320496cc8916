"""How many FLOP does a step need by the field's convention, whatever is executed?

Six per parameter that multiplies activations and token (two forward, four backward; logits included, embedding lookup
not), plus twelve per layer, query width and key for attention, full matrix, no causal halving, of as many keys as a
sliding window has; nothing for recomputation. This is PaLM's model FLOP (Chowdhery et al. 2022, arXiv:2204.02311,
appendix B) and, for GPT, 72 B s L h^2 (1 + s/(6h) + V/(12 L h)) of Korthikanti et al. 2022 (arXiv:2205.05198)
appendix A.

Layers that predict further tokens count with their projection and their logits (Megatron-LM,
megatron/training/training.py, `num_floating_point_operations`).

Causal attention computes only what its mask leaves, about half; counted so (`CAUSAL`), long contexts have fewer
FLOP, as FlashAttention-2 (arXiv:2307.08691, section 4.1) and the causal MFU of DeepSeek-V3 (arXiv:2505.09343, table 4)
count them.

Frozen parameters have no gradient, so they count four (forward and the input's gradient), the adapters beside them six;
attention counts as ever.
"""

from enum import Enum

from clustersim.common.units import Flop
from clustersim.model.attention import max_attended_keys, mean_attended_keys
from clustersim.model.layer_stack import LatentAttention, LayerSpec
from clustersim.model.lora import Lora
from clustersim.model.training import Training
from clustersim.model.transformer import TransformerModel, adapter_parameter_count, matrix_parameter_count


class AttentionFlopConvention(Enum):
    """Which keys count for a query of attention."""

    FULL = "all"  # the convention: a full matrix, of as many keys as a window has
    CAUSAL = "seen"  # those that the causal mask leaves, the mean over a sequence


def token_flops(
    model: TransformerModel,
    sequence: int,
    lora: Lora | None = None,
    convention: AttentionFlopConvention = AttentionFlopConvention.FULL,
) -> Flop:
    """Model FLOP of one token in a sequence of so many, forward and backward; lora: beside frozen weights."""
    score_width = sum(group.count * _score_width(group.spec, sequence, convention) for group in model.full_stack)
    matrices = matrix_parameter_count(model)
    matmul_flops = 6.0 * matrices if lora is None else 4.0 * matrices + 6.0 * adapter_parameter_count(model, lora)
    return matmul_flops + 12.0 * score_width


def _score_width(spec: LayerSpec, sequence: int, convention: AttentionFlopConvention) -> float:
    """Width of the queries (of queries and values, the mean) times the keys that count for each."""
    attention = spec.attention
    if attention is None:
        return 0
    key_count = max_attended_keys if convention is AttentionFlopConvention.FULL else mean_attended_keys
    value_dim = attention.value_dim if isinstance(attention, LatentAttention) else attention.head_dim
    return attention.heads * (attention.head_dim + value_dim) / 2 * key_count(sequence, attention.window)


def model_flops(
    model: TransformerModel, training: Training, convention: AttentionFlopConvention = AttentionFlopConvention.FULL
) -> Flop:
    """Model FLOP of one step of the whole job."""
    return training.global_batch * training.sequence * token_flops(model, training.sequence, training.lora, convention)
