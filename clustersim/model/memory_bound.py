"""What do the memory-bound operators of a layer move and keep: norm, activation, rotary, residual, softmax, loss?

A streaming kernel is described by its passes: how often it reads or writes each of its elements in the activation's
format, in FP32 and as a byte of dropout mask. Its vector arithmetic is not counted as FLOP (model FLOP conventions
count matrix products only), nor are vectors and statistics that are `hidden` times smaller than the activation.
Fused is one kernel that reads every operand once and writes every result once (Apex, Transformer Engine and
Megatron's fused kernels). Unfused is what PyTorch runs for the formulas as written, e.g. in Hugging Face's Llama:
RMSNorm by way of FP32, rotary by rotate-half; the counts are those of its operator trace (the tests trace
them again). LayerNorm, GELU and dropout are single kernels in PyTorch too, but for LayerNorm's backward, whose weight
gradient is a second kernel that reads both operands again.
"""

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes
from clustersim.model.kernels import Kernel, KernelKind, Routine, StreamShape
from clustersim.model.layer_stack import Mlp
from clustersim.model.overheads import Accumulation
from clustersim.model.training import Loss
from clustersim.model.transformer import Norm


@dataclass(frozen=True, slots=True)
class Passes:
    """Reads and writes per element: in the activation's format, in FP32, of one mask byte; kernels launched."""

    activation: int
    fp32: int = 0
    mask: int = 0
    launches: int = 1

    def bytes(self, dtype: DType, elements: float) -> Bytes:
        """Bytes moved, or kept, for so many elements whose activation format is `dtype`."""
        return float(elements) * (self.activation * dtype.bytes + self.fp32 * DType.FP32.bytes + self.mask)


_SAVE_RESULTS: Final = (KernelKind.NORM, KernelKind.SOFTMAX, KernelKind.LOSS)


@dataclass(frozen=True, slots=True)
class Streaming:
    """A streaming operator: passes forward and backward, and what it keeps in between. None: there is no kernel."""

    kind: KernelKind
    routine: Routine
    forward: Passes
    backward: Passes | None
    kept: Passes = Passes(0)
    fused: bool = False

    @property
    def saves_late(self) -> bool:
        """Whether backward reads what forward makes: a mask, statistics, a softmax."""
        return self.kept.mask > 0 or self.kind in _SAVE_RESULTS

    def over(self, rows: int, width: int, table: int = 0) -> StreamShape:
        """The forward routine over so many elements; table: rows of what it looks up."""
        return StreamShape(self.routine, rows, width, fused=self.fused, table=table)

    def forward_kernel(self, name: str, dtype: DType, shape: StreamShape) -> Kernel:
        """The forward kernel over a shape."""
        return _kernel(name, self.kind, dtype, shape, self.forward)

    def backward_kernels(self, name: str, dtype: DType, shape: StreamShape) -> tuple[Kernel, ...]:
        """The kernels of the input gradient over a (forward) shape; none if the gradient passes unchanged."""
        if self.backward is None:
            return ()
        return (_kernel(f"{name}.input_gradient", self.kind, dtype, replace(shape, backward=True), self.backward),)


def _kernel(name: str, kind: KernelKind, dtype: DType, shape: StreamShape, passes: Passes) -> Kernel:
    moved = passes.bytes(dtype, shape.elements)
    return Kernel(name, kind, dtype, flops=0.0, bytes=moved, shape=shape, launches=passes.launches)


# Elements are those of the activation that is normalised.
_NORMS = MappingProxyType(
    {
        (Norm.LAYERNORM, True): Streaming(
            KernelKind.NORM, Routine.LAYERNORM, Passes(2), Passes(3), kept=Passes(1), fused=True
        ),
        (Norm.RMSNORM, True): Streaming(
            KernelKind.NORM, Routine.RMSNORM, Passes(2), Passes(3), kept=Passes(1), fused=True
        ),
        (Norm.LAYERNORM, False): Streaming(
            KernelKind.NORM, Routine.LAYERNORM, Passes(2), Passes(5, launches=2), kept=Passes(1)
        ),
        (Norm.RMSNORM, False): Streaming(
            KernelKind.NORM,
            Routine.RMSNORM,
            Passes(4, fp32=7, launches=8),
            Passes(8, fp32=19, launches=16),
            kept=Passes(1, fp32=1),
        ),
    }
)
# Elements are those of the activation's result. SwiGLU reads gate and up.
_GELU = Streaming(KernelKind.ACTIVATION, Routine.GELU, Passes(2), Passes(3), kept=Passes(1), fused=True)
_SWIGLU_FUSED = Streaming(KernelKind.ACTIVATION, Routine.SWIGLU, Passes(3), Passes(5), kept=Passes(2), fused=True)
_SWIGLU_UNFUSED = Streaming(
    KernelKind.ACTIVATION, Routine.SWIGLU, Passes(5, launches=2), Passes(9, launches=3), kept=Passes(3)
)
# Elements are those of queries and keys together, or, unfused, of each.
_ROTARY_FUSED = Streaming(KernelKind.ROTARY, Routine.ROTARY, Passes(2), Passes(2), fused=True)
_ROTARY_UNFUSED = Streaming(KernelKind.ROTARY, Routine.ROTARY, Passes(10, launches=5), Passes(14, launches=7))
# Residual: the gradient passes unchanged, dropout masks it.
_RESIDUAL = Streaming(KernelKind.RESIDUAL, Routine.RESIDUAL, Passes(3), None, fused=True)
_RESIDUAL_DROPOUT_FUSED = Streaming(
    KernelKind.RESIDUAL,
    Routine.RESIDUAL_DROPOUT,
    Passes(3, mask=1),
    Passes(2, mask=1),
    kept=Passes(0, mask=1),
    fused=True,
)
_RESIDUAL_DROPOUT_UNFUSED = Streaming(
    KernelKind.RESIDUAL,
    Routine.RESIDUAL_DROPOUT,
    Passes(5, mask=1, launches=2),
    Passes(2, mask=1),
    kept=Passes(0, mask=1),
)
# Elements are scores. The dropout of scores also keeps its result, which the product with the values reads.
_SOFTMAX_FUSED = Streaming(KernelKind.SOFTMAX, Routine.SOFTMAX, Passes(2), Passes(3), kept=Passes(1), fused=True)
_SOFTMAX_UNFUSED = Streaming(
    KernelKind.SOFTMAX, Routine.SOFTMAX, Passes(4, launches=2), Passes(5, launches=2), kept=Passes(1)
)
# Megatron-LM's `FusedScaleMaskSoftmax` where its kernel does not do. Forward: to FP32 (1 + 1), scale (2), mask (2 and
# the mask), softmax (2), back (1 + 1). Backward: to FP32 (1 + 1), softmax (3), mask (2 and the mask), scale (2), back.
MEGATRON_SOFTMAX = Streaming(
    KernelKind.SOFTMAX,
    Routine.SOFTMAX,
    Passes(2, fp32=8, mask=1, launches=5),
    Passes(2, fp32=9, mask=1, launches=5),
    kept=Passes(0, fp32=1),
)
# Elements are scores or logits: cap x tanh(x / cap). Backward reads the result's gradient and the tanh.
_SOFTCAP_FUSED = Streaming(KernelKind.ACTIVATION, Routine.SOFTCAP, Passes(2), Passes(3), kept=Passes(1), fused=True)
_SOFTCAP_UNFUSED = Streaming(
    KernelKind.ACTIVATION, Routine.SOFTCAP, Passes(6, launches=3), Passes(7, launches=3), kept=Passes(1)
)
SCORE_DROPOUT = Streaming(
    KernelKind.DROPOUT, Routine.DROPOUT, Passes(2, mask=1), Passes(2, mask=1), kept=Passes(1, mask=1), fused=True
)
DROPOUT = Streaming(
    KernelKind.DROPOUT, Routine.DROPOUT, Passes(2, mask=1), Passes(2, mask=1), kept=Passes(0, mask=1), fused=True
)
# Elements are logits; their softmax is kept in FP32 (Korthikanti et al. 2022, section 4.3: 4sbv), or they themselves.
_LOSSES = MappingProxyType(
    {
        Loss.FUSED: Streaming(
            KernelKind.LOSS,
            Routine.LOSS_FUSED,
            Passes(1, fp32=1),
            Passes(1, fp32=1),
            kept=Passes(0, fp32=1),
            fused=True,
        ),
        Loss.CHUNKED: Streaming(
            KernelKind.LOSS, Routine.LOSS_CHUNKED, Passes(1), Passes(2), kept=Passes(1), fused=True
        ),
        Loss.TORCH: Streaming(
            KernelKind.LOSS,
            Routine.LOSS_TORCH,
            Passes(1, fp32=3, launches=3),
            Passes(1, fp32=5, launches=3),
            kept=Passes(0, fp32=1),
        ),
        # Megatron-LM, megatron/core/tensor_parallel/cross_entropy.py. Forward: to FP32 (1 + 1), maximum (1), subtract,
        # exponential (2 each), sum (1), divide (2). Backward: multiply (2), back to the activation's format (1 + 1).
        Loss.VOCAB_PARALLEL: Streaming(
            KernelKind.LOSS,
            Routine.LOSS_VOCAB_PARALLEL,
            Passes(1, fp32=9, launches=6),
            Passes(1, fp32=3, launches=2),
            kept=Passes(0, fp32=1),
        ),
    }
)
# An adapter's result, scaled, is added to what it stands beside; backward scales the gradient.
SCALED_SUM = MappingProxyType(
    {
        True: Streaming(KernelKind.RESIDUAL, Routine.SCALED_SUM, Passes(3), None, fused=True),
        False: Streaming(KernelKind.RESIDUAL, Routine.SCALED_SUM, Passes(5, launches=2), None),
    }
)
SCALE = Streaming(KernelKind.RESIDUAL, Routine.SCALE, Passes(2), None, fused=True)
# A residual stream forks before each norm: backward adds the two gradients.
GRADIENT_SUM = _RESIDUAL
BIAS_ADD = Streaming(KernelKind.RESIDUAL, Routine.BIAS_ADD, Passes(2), None, fused=True)
# The bias gradient sums the output's gradient over the tokens.
BIAS_GRADIENT = Streaming(KernelKind.COPY, Routine.BIAS_GRADIENT, Passes(1), None, fused=True)


def norm(form: Norm, *, fused: bool) -> Streaming:
    """Passes of a norm."""
    return _NORMS[form, fused]


def activation(mlp: Mlp, *, fused: bool) -> Streaming:
    """Passes of the MLP's activation, per element of its result."""
    if mlp is Mlp.GELU:
        return _GELU
    return _SWIGLU_FUSED if fused else _SWIGLU_UNFUSED


def rotary(*, fused: bool) -> Streaming:
    """Passes of rotary positions over queries and keys; unfused over each of them by itself."""
    return _ROTARY_FUSED if fused else _ROTARY_UNFUSED


def residual(*, dropout: bool, fused: bool) -> Streaming:
    """Passes of the sum with the residual, with dropout of the branch if the model has it."""
    if not dropout:
        return _RESIDUAL
    return _RESIDUAL_DROPOUT_FUSED if fused else _RESIDUAL_DROPOUT_UNFUSED


def softmax(*, fused: bool) -> Streaming:
    """Passes of mask and softmax over a score matrix."""
    return _SOFTMAX_FUSED if fused else _SOFTMAX_UNFUSED


def softcap(*, fused: bool) -> Streaming:
    """Passes of a tanh that caps scores or logits."""
    return _SOFTCAP_FUSED if fused else _SOFTCAP_UNFUSED


def loss(form: Loss) -> Streaming:
    """Passes of softmax cross-entropy over the logits."""
    return _LOSSES[form]


def copy(name: str, dtype: DType, elements: int) -> Kernel:
    """Copy so many elements from one place in memory to another."""
    shape = StreamShape(Routine.COPY, elements, 1, fused=True)
    return Kernel(name, KernelKind.COPY, dtype, flops=0.0, bytes=Passes(2).bytes(dtype, elements), shape=shape)


def accumulate(
    name: str, sizes: tuple[int, int], *, made: DType, accumulated: DType, how: Accumulation
) -> tuple[Kernel, ...]:
    """Add a gradient of sizes [rows, width] to what is accumulated; made, accumulated: the formats of the two.

    None where the product that makes it has added it.
    """
    match how:
        case Accumulation.FUSED:
            return ()
        case Accumulation.COPIED:
            return (converted(name, made, accumulated, sizes),)
        case Accumulation.CONVERTED if made is not accumulated:
            copied = converted(f"{name}.convert", made, accumulated, sizes)
            return (copied, _added(name, sizes, made=accumulated, accumulated=accumulated))
    return (_added(name, sizes, made=made, accumulated=accumulated),)


def _added(name: str, sizes: tuple[int, int], *, made: DType, accumulated: DType) -> Kernel:
    shape = StreamShape(Routine.ACCUMULATE, *sizes, fused=True, formats=(accumulated,))
    moved = float(shape.elements * (made.bytes + 2 * accumulated.bytes))
    return Kernel(name, KernelKind.COPY, made, flops=0.0, bytes=moved, shape=shape)


def converted(name: str, made: DType, target: DType, sizes: tuple[int, int]) -> Kernel:
    """A tensor of sizes [rows, width], written in another format."""
    shape = StreamShape(Routine.COPY, *sizes, fused=True, formats=(target,))
    moved = float(shape.elements * (made.bytes + target.bytes))
    return Kernel(name, KernelKind.COPY, made, flops=0.0, bytes=moved, shape=shape)


def dequantize(name: str, stored: DType, made: DType, *, rows: int, width: int) -> Kernel:
    """Weights [rows, width] in the format of products, from those that are stored, in one kernel."""
    shape = StreamShape(Routine.DEQUANTIZE, rows, width, fused=True, formats=(stored,))
    moved = float(shape.elements * (stored.bytes + made.bytes))
    return Kernel(name, KernelKind.COPY, made, flops=0.0, bytes=moved, shape=shape)
