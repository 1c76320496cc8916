"""How many FLOP does a step need by the field's convention, whatever is executed?

Six per parameter that multiplies activations and token (two forward, four backward; logits included, embedding lookup
not), plus twelve per layer, query width and key for attention, full matrix, no causal halving, of as many keys as a
sliding window has; nothing for recomputation. This is PaLM's model FLOP (Chowdhery et al. 2022, arXiv:2204.02311,
appendix B) and, for GPT, 72 B s L h^2 (1 + s/(6h) + V/(12 L h)) of Korthikanti et al. 2022 (arXiv:2205.05198)
appendix A.

Frozen parameters have no gradient, so they count four (forward and the input's gradient), the adapters beside them six;
attention counts as ever.
"""

from clustersim.units import Flop
from clustersim.workload.lora import Lora
from clustersim.workload.stack import LayerSpec
from clustersim.workload.training import Training
from clustersim.workload.transformer import Model, adapter_parameters, matrix_parameters


def token_flops(model: Model, sequence: int, lora: Lora | None = None) -> Flop:
    """Model FLOP of one token in a sequence of so many, forward and backward; lora: beside frozen weights."""
    scores = sum(run.count * _score_width(run.spec, sequence) for run in model.stack)
    matrices = matrix_parameters(model)
    products = 6.0 * matrices if lora is None else 4.0 * matrices + 6.0 * adapter_parameters(model, lora)
    return products + 12.0 * scores


def _score_width(spec: LayerSpec, sequence: int) -> int:
    """Width of the queries times the keys that each attends to."""
    attention = spec.attention
    if attention is None:
        return 0
    return attention.heads * attention.head_dim * min(attention.window or sequence, sequence)


def model_flops(model: Model, training: Training) -> Flop:
    """Model FLOP of one step of the whole job."""
    return training.global_batch * training.sequence * token_flops(model, training.sequence, training.lora)
