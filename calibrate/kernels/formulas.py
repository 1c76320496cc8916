"""PyTorch formulas that a model computes between its matmuls.

Plain PyTorch, as published model code has it, one formula for each operator of
`clustersim.model.memory_bound`: Hugging Face's Llama (RMSNorm in FP32, rotate-half rotary positions,
silu(gate) x up), PyTorch's own layer norm, GELU, dropout, attention and cross-entropy, and Megatron-LM's
cross-entropy, one operation after the other (megatron/core/tensor_parallel/cross_entropy.py). All are
differentiable.

With `fused`, norms are PyTorch's own fused kernels, and whatever it has none for is compiled for the GPU
(`torch.compile`, which fuses element-wise operations into one kernel per direction); a CPU has no such
kernel and raises UnsupportedKernel.
"""

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.nn import functional

from clustersim.model.training import LossImplementation

NORM_EPSILON: Final = 1e-5  # of norms, as in Llama's and GPT-2's config.json
LORA_SCALE: Final = 2.0  # alpha / rank of an adapter; does not affect the time
DROPOUT_PROBABILITY: Final = 0.1  # the usual probability; does not affect the time
SOFTCAP: Final = 50.0  # Gemma 2's, of scores; does not affect the time


class UnsupportedKernel(Exception):  # noqa: N818 - no error: an outcome that a record keeps
    """The device or the library has no such kernel; the text says which."""


def layernorm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Layer norm over the last dimension."""
    return functional.layer_norm(x, (x.shape[-1],), weight, bias, NORM_EPSILON)


def rmsnorm(x: Tensor, weight: Tensor, *, fused: bool) -> Tensor:
    """RMS norm over the last dimension; unfused as Hugging Face's LlamaRMSNorm, computed in FP32."""
    if fused:
        return functional.rms_norm(x, (x.shape[-1],), weight, NORM_EPSILON)
    x_fp32 = x.float()
    variance = x_fp32.pow(2).mean(-1, keepdim=True)
    return weight * (x_fp32 * torch.rsqrt(variance + NORM_EPSILON)).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """Exact GELU (error function)."""
    return functional.gelu(x)


def swiglu(x: Tensor, *, fused: bool) -> Tensor:
    """silu(gate) x up of [..., 2 width], gate first."""
    return _maybe_compiled(_swiglu, x, fused=fused)(x)


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def softcap(x: Tensor, *, fused: bool) -> Tensor:
    """Soft-capped scores or logits by tanh (Gemma 2); the cap's value does not affect the time."""
    return _maybe_compiled(_softcap, x, fused=fused)(x)


def _softcap(x: Tensor) -> Tensor:
    return SOFTCAP * torch.tanh(x / SOFTCAP)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, fused: bool) -> Tensor:
    """Rotary positions of [..., positions, head_dim], by rotate-half; cos, sin: [positions, head_dim]."""
    return _maybe_compiled(_rotary, x, fused=fused)(x, cos, sin)


def _rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + rotated * sin


def residual_add(x: Tensor, y: Tensor) -> Tensor:
    """Sum of the residual stream and a branch, or of two gradients."""
    return x + y


def lora_sum(x: Tensor, branch: Tensor, *, fused: bool) -> Tensor:
    """Sum of a frozen layer's output and a scaled LoRA adapter's, as torchtune's LoRALinear adds them."""
    return _maybe_compiled(_lora_sum, x, fused=fused)(x, branch)


def _lora_sum(x: Tensor, branch: Tensor) -> Tensor:
    return x + LORA_SCALE * branch


def scale_by_probability(x: Tensor, weights: Tensor, *, fused: bool) -> Tensor:
    """Tokens [tokens, width] scaled by their routing probabilities [tokens, 1]."""
    return _maybe_compiled(_scale_by_probability, x, fused=fused)(x, weights)


def _scale_by_probability(x: Tensor, weights: Tensor) -> Tensor:
    return x * weights


def residual_dropout(x: Tensor, branch: Tensor, *, fused: bool) -> Tensor:
    """Sum of the residual stream and a branch with dropout."""
    return _maybe_compiled(_residual_dropout, x, fused=fused)(x, branch)


def _residual_dropout(x: Tensor, branch: Tensor) -> Tensor:
    return x + dropout(branch)


def dropout(x: Tensor) -> Tensor:
    """Dropout in training mode."""
    return functional.dropout(x, DROPOUT_PROBABILITY, training=True)


def causal_mask(query: int, key: int, device: torch.device) -> Tensor:
    """[query, key], true where a query must not attend to a key; the last query attends to all keys."""
    return torch.ones(query, key, dtype=torch.bool, device=device).triu(1 + key - query)


def softmax(scores: Tensor, mask: Tensor | None = None, *, fused: bool) -> Tensor:
    """Softmax of scores [..., query, key] with a causal mask (built here if none is given)."""
    if mask is None:
        mask = causal_mask(scores.shape[-2], scores.shape[-1], scores.device)
    return _maybe_compiled(_softmax, scores, fused=fused)(scores, mask)


def _softmax(scores: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(scores.masked_fill(mask, float("-inf")), dim=-1)


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """softmax(Q K^T) V through PyTorch's SDPA, which selects its fastest kernel.

    q: [batch, heads, query, head_dim]; k, v: [batch, kv heads, key, head_dim], fewer heads than q for
    grouped-query attention; causal: the last query attends to all keys.
    """
    grouped = q.shape[1] != k.shape[1]
    if causal and q.shape[2] != k.shape[2]:
        from torch.nn.attention.bias import causal_lower_right  # imports PyTorch's compiler, which takes seconds

        bias = causal_lower_right(q.shape[2], k.shape[2])
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=grouped)
    return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)


def cross_entropy(logits: Tensor, targets: Tensor, implementation: LossImplementation) -> Tensor:
    """Mean softmax cross-entropy of logits [tokens, vocabulary] and targets [tokens], in FP32."""
    match implementation:
        case LossImplementation.TORCH | LossImplementation.TORCH_FP32:
            return _cross_entropy(logits, targets)
        case LossImplementation.VOCAB_PARALLEL:
            losses: Tensor = _VocabParallelCrossEntropy.apply(logits, targets)  # type: ignore[no-untyped-call]
            return losses.mean()
    return _maybe_compiled(_cross_entropy, logits, fused=True)(logits, targets)  # of all tokens, or of a chunk of them


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float(), targets)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Megatron-LM's per-token loss, on a rank that holds the full vocabulary."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        # A copy also of FP32 logits: Megatron's own overwrites its input.
        logits_fp32 = logits.float() if logits.dtype is not torch.float32 else logits.clone()
        logits_fp32 -= logits_fp32.max(dim=-1)[0].unsqueeze(-1)
        token_indices = torch.arange(len(targets), device=targets.device)
        predicted = logits_fp32[token_indices, targets]
        torch.exp(logits_fp32, out=logits_fp32)
        total = logits_fp32.sum(dim=-1)
        logits_fp32.div_(total.unsqueeze(-1))
        ctx.save_for_backward(logits_fp32, targets)
        return torch.log(total) - predicted

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        saved, targets = ctx.saved_tensors
        gradient = saved.data  # overwritten, as Megatron does; .data, so that a retained graph can be run again
        gradient[torch.arange(len(targets), device=targets.device), targets] -= 1.0
        gradient.mul_(gradients[0].unsqueeze(-1))
        return gradient, None


def _maybe_compiled(formula: Callable[..., Tensor], x: Tensor, *, fused: bool) -> Callable[..., Tensor]:
    """The formula itself, or compiled into one kernel."""
    if not fused:
        return formula
    if not x.is_cuda:
        raise UnsupportedKernel(f"{formula.__name__.strip('_')}: PyTorch has no fused kernel for it on a CPU")
    return compiled(formula)


@cache
def compiled(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A formula as PyTorch compiles it in a training run: specialized to the operands' sizes (no dynamic shapes)."""
    variants: dict[Any, Callable[..., Tensor]] = {}

    def call(*operands: Tensor) -> Tensor:
        operand_forms = tuple(
            (operand.shape, operand.stride(), operand.dtype, operand.requires_grad) for operand in operands
        )
        signature = torch.is_grad_enabled(), operand_forms
        if signature not in variants:
            variants[signature] = torch.compile(_copy_function(formula), dynamic=False, fullgraph=True)
        return variants[signature](*operands)

    return call


def _copy_function(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A copy of the function with its own code object, to which PyTorch attaches its compiled variants.

    With one shared function the second set of sizes would be compiled with dynamic shapes (automatic dynamic),
    which is another kernel, and those beyond the recompile limit would not be compiled at all.
    """
    function = cast(FunctionType, formula)
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
