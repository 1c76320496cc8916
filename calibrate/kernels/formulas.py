"""Which formulas does a model's code compute between its matrix products?

Plain PyTorch, as published model code has it, one formula for each routine that `clustersim.model.memory_bound` counts:
Hugging Face's Llama (RMSNorm by way of FP32, rotate-half rotary positions, silu(gate) x up), PyTorch's own layer norm,
GELU, dropout, attention and cross-entropy, and Megatron-LM's cross-entropy, one operation after the other
(megatron/core/tensor_parallel/cross_entropy.py). All can be differentiated.

With `fused`, norms are PyTorch's own single kernels, and whatever it has none for is compiled for the GPU
(`torch.compile`, which fuses element-wise work into one kernel each way); a CPU has no such kernel: Unsupported.
"""

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from clustersim.model.training import LossImplementation

EPSILON: Final = 1e-5  # of norms, as in Llama's and GPT-2's config.json
SCALE: Final = 2.0  # alpha / rank of an adapter; it changes no time
DROPPED: Final = 0.1  # the usual probability; it changes no time
CAP: Final = 50.0  # Gemma 2's, of scores; it changes no time


class Unsupported(Exception):  # noqa: N818 - no error: an outcome that a record keeps
    """The device or the library has no such kernel; the text says which."""


def layernorm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Layer norm over the last dimension."""
    return functional.layer_norm(x, (x.shape[-1],), weight, bias, EPSILON)


def rmsnorm(x: Tensor, weight: Tensor, *, fused: bool) -> Tensor:
    """RMS norm over the last dimension; unfused as Hugging Face's LlamaRMSNorm, by way of FP32."""
    if fused:
        return functional.rms_norm(x, (x.shape[-1],), weight, EPSILON)
    wide = x.float()
    variance = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(variance + EPSILON)).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """The exact form, by the error function."""
    return functional.gelu(x)


def swiglu(x: Tensor, *, fused: bool) -> Tensor:
    """silu(gate) x up of [..., 2 width], gate first."""
    return _formula(_swiglu, x, fused=fused)(x)


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def softcap(x: Tensor, *, fused: bool) -> Tensor:
    """Scores or logits, capped by a tanh (Gemma 2); the cap's value changes no time."""
    return _formula(_softcap, x, fused=fused)(x)


def _softcap(x: Tensor) -> Tensor:
    return CAP * torch.tanh(x / CAP)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, fused: bool) -> Tensor:
    """Rotary positions of [..., positions, head_dim], by rotate-half; cos, sin: [positions, head_dim]."""
    return _formula(_rotary, x, fused=fused)(x, cos, sin)


def _rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


def residual(x: Tensor, y: Tensor) -> Tensor:
    """The sum of the residual stream and a branch, or of two gradients."""
    return x + y


def scaled_sum(x: Tensor, branch: Tensor, *, fused: bool) -> Tensor:
    """A frozen layer's result and an adapter's, scaled, as torchtune's LoRALinear adds them."""
    return _formula(_scaled_sum, x, fused=fused)(x, branch)


def _scaled_sum(x: Tensor, branch: Tensor) -> Tensor:
    return x + SCALE * branch


def weighted(x: Tensor, weights: Tensor, *, fused: bool) -> Tensor:
    """Rows [rows, width], each times its number of [rows, 1]."""
    return _formula(_weighted, x, fused=fused)(x, weights)


def _weighted(x: Tensor, weights: Tensor) -> Tensor:
    return x * weights


def residual_dropout(x: Tensor, branch: Tensor, *, fused: bool) -> Tensor:
    """The residual stream and what dropout leaves of a branch."""
    return _formula(_residual_dropout, x, fused=fused)(x, branch)


def _residual_dropout(x: Tensor, branch: Tensor) -> Tensor:
    return x + dropout(branch)


def dropout(x: Tensor) -> Tensor:
    """What dropout leaves in training."""
    return functional.dropout(x, DROPPED, training=True)


def causal_mask(query: int, key: int, device: torch.device) -> Tensor:
    """[query, key], true where a query may not see a key; the last query sees all keys."""
    return torch.ones(query, key, dtype=torch.bool, device=device).triu(1 + key - query)


def softmax(scores: Tensor, mask: Tensor | None = None, *, fused: bool) -> Tensor:
    """Softmax of scores [..., query, key] with a causal mask (made here if none is given)."""
    if mask is None:
        mask = causal_mask(scores.shape[-2], scores.shape[-1], scores.device)
    return _formula(_softmax, scores, fused=fused)(scores, mask)


def _softmax(scores: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(scores.masked_fill(mask, float("-inf")), dim=-1)


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """softmax(Q K^T) V through PyTorch's SDPA, which picks its fastest kernel.

    q: [batch, heads, query, head_dim]; k, v: [batch, kv heads, key, head_dim], fewer heads than q for grouped queries;
    causal: the last query sees all keys.
    """
    grouped = q.shape[1] != k.shape[1]
    if causal and q.shape[2] != k.shape[2]:
        bias = causal_lower_right(q.shape[2], k.shape[2])
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=grouped)
    return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)


def cross_entropy(logits: Tensor, targets: Tensor, form: LossImplementation) -> Tensor:
    """Mean softmax cross-entropy of logits [tokens, vocabulary] and targets [tokens], in FP32."""
    match form:
        case LossImplementation.TORCH:
            return _cross_entropy(logits, targets)
        case LossImplementation.FUSED | LossImplementation.CHUNKED:  # of all tokens, or of a part of them at a time
            return _formula(_cross_entropy, logits, fused=True)(logits, targets)
        case LossImplementation.VOCAB_PARALLEL:
            losses: Tensor = _VocabParallel.apply(logits, targets)  # type: ignore[no-untyped-call]
            return losses.mean()


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float(), targets)


class _VocabParallel(torch.autograd.Function):
    """Megatron-LM's loss of each token, on a rank that has the whole vocabulary."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        # A copy also of FP32 logits: Megatron's own writes over what it was given.
        wide = logits.float() if logits.dtype is not torch.float32 else logits.clone()
        wide -= wide.max(dim=-1)[0].unsqueeze(-1)
        rows = torch.arange(len(targets), device=targets.device)
        predicted = wide[rows, targets]
        torch.exp(wide, out=wide)
        total = wide.sum(dim=-1)
        wide.div_(total.unsqueeze(-1))
        ctx.save_for_backward(wide, targets)
        return torch.log(total) - predicted

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        saved, targets = ctx.saved_tensors
        wide = saved.data  # written over, as Megatron does; .data, so that a graph that is kept can be run again
        wide[torch.arange(len(targets), device=targets.device), targets] -= 1.0
        wide.mul_(gradients[0].unsqueeze(-1))
        return wide, None


def _formula(formula: Callable[..., Tensor], x: Tensor, *, fused: bool) -> Callable[..., Tensor]:
    """The formula as it stands, or as one compiled kernel."""
    if not fused:
        return formula
    if not x.is_cuda:
        raise Unsupported(f"{formula.__name__.strip('_')}: PyTorch has no fused kernel for it on a CPU")
    return compiled(formula)


@cache
def compiled(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A formula as PyTorch compiles it in a training run: for operands of these sizes, and for no others."""
    variants: dict[Any, Callable[..., Tensor]] = {}

    def run(*operands: Tensor) -> Tensor:
        forms = tuple((operand.shape, operand.stride(), operand.dtype, operand.requires_grad) for operand in operands)
        form = torch.is_grad_enabled(), forms
        if form not in variants:
            variants[form] = torch.compile(_copied(formula), dynamic=False, fullgraph=True)
        return variants[form](*operands)

    return run


def _copied(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same with code of its own, to which PyTorch keeps what it has compiled.

    Of one function the second form would be compiled for sizes that are not known (automatic dynamic shapes), which
    is another kernel, and those past its recompile limit would not be compiled at all.
    """
    function = cast(FunctionType, formula)
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
