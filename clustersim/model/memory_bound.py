"""What do memory-bound operators move and save: norm, activation, rotary, residual, softmax, loss?

A memory-bound kernel is described by its passes: how often it reads or writes each of its elements in the
activation format, in FP32 and as a byte of dropout mask. Its vector arithmetic is not counted as FLOP
(model FLOP conventions count matmuls only), nor are vectors and statistics that are `hidden` times
smaller than the activation. Fused is one kernel that reads every operand once and writes every result
once (Apex, Transformer Engine and Megatron's fused kernels). Unfused is what eager PyTorch runs for the
formulas, e.g. in Hugging Face's Llama: RMSNorm via FP32, rotary by rotate-half; the counts are those of
its operator trace (the tests trace them again). LayerNorm, GELU and dropout are single kernels in PyTorch
too, except for LayerNorm's backward, whose weight gradient is a second kernel that reads both operands
again.
"""

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes
from clustersim.model.kernels import Kernel, KernelKind, MemoryBoundOp, MemoryBoundShape
from clustersim.model.layer_stack import MlpType
from clustersim.model.overheads import Accumulation
from clustersim.model.training import LossImplementation
from clustersim.model.transformer import Norm


@dataclass(frozen=True, slots=True)
class MemoryPasses:
    """Reads and writes per element: in the activation format, in FP32, as one mask byte; and kernels launched."""

    activation: int
    fp32: int = 0
    mask: int = 0
    launches: int = 1

    def bytes(self, dtype: DType, elements: float) -> Bytes:
        """Bytes moved, or saved, for `elements` elements whose activation format is `dtype`."""
        return float(elements) * (self.activation * dtype.bytes + self.fp32 * DType.FP32.bytes + self.mask)

    def with_more(self, more: "MemoryPasses") -> "MemoryPasses":
        """These passes and others."""
        return MemoryPasses(
            self.activation + more.activation,
            self.fp32 + more.fp32,
            self.mask + more.mask,
            self.launches + more.launches,
        )


_OUTPUT_SAVING_KINDS: Final = (KernelKind.NORM, KernelKind.SOFTMAX, KernelKind.LOSS)


@dataclass(frozen=True, slots=True)
class MemoryBoundSpec:
    """A memory-bound operator: passes forward and backward (None: no kernel), and what it saves."""

    kind: KernelKind
    op: MemoryBoundOp
    forward: MemoryPasses
    backward: MemoryPasses | None
    saved: MemoryPasses = MemoryPasses(0)
    fused: bool = False

    @property
    def saves_outputs(self) -> bool:
        """Whether backward reads something that forward produces: a mask, statistics, a softmax."""
        return self.saved.mask > 0 or self.kind in _OUTPUT_SAVING_KINDS

    def shape_for(self, rows: int, width: int, table: int = 0) -> MemoryBoundShape:
        """The forward shape over [rows, width] elements; table: rows of a lookup table."""
        return MemoryBoundShape(self.op, rows, width, fused=self.fused, table=table)

    def forward_kernel(self, name: str, dtype: DType, shape: MemoryBoundShape) -> Kernel:
        """The forward kernel over a shape."""
        return _memory_bound_kernel(name, self.kind, dtype, shape, self.forward)

    def backward_kernels(self, name: str, dtype: DType, shape: MemoryBoundShape) -> tuple[Kernel, ...]:
        """The kernels of the input gradient over a (forward) shape; none if the gradient passes unchanged."""
        if self.backward is None:
            return ()
        return (
            _memory_bound_kernel(
                f"{name}.input_gradient", self.kind, dtype, replace(shape, backward=True), self.backward
            ),
        )


def _memory_bound_kernel(
    name: str, kind: KernelKind, dtype: DType, shape: MemoryBoundShape, passes: MemoryPasses
) -> Kernel:
    moved_bytes = passes.bytes(dtype, shape.elements)
    return Kernel(name, kind, dtype, flops=0.0, bytes=moved_bytes, shape=shape, launches=passes.launches)


# RMSNorm in eager PyTorch: forward, backward, saved.
_EAGER_RMSNORM = MemoryPasses(4, fp32=7, launches=8), MemoryPasses(8, fp32=19, launches=16), MemoryPasses(1, fp32=1)
# Elements are those of the normalized activation.
_NORM_SPECS = MappingProxyType(
    {
        (Norm.LAYERNORM, True): MemoryBoundSpec(
            KernelKind.NORM,
            MemoryBoundOp.LAYERNORM,
            MemoryPasses(2),
            MemoryPasses(3),
            saved=MemoryPasses(1),
            fused=True,
        ),
        (Norm.RMSNORM, True): MemoryBoundSpec(
            KernelKind.NORM, MemoryBoundOp.RMSNORM, MemoryPasses(2), MemoryPasses(3), saved=MemoryPasses(1), fused=True
        ),
        (Norm.LAYERNORM, False): MemoryBoundSpec(
            KernelKind.NORM,
            MemoryBoundOp.LAYERNORM,
            MemoryPasses(2),
            MemoryPasses(5, launches=2),
            saved=MemoryPasses(1),
        ),
        (Norm.RMSNORM, False): MemoryBoundSpec(KernelKind.NORM, MemoryBoundOp.RMSNORM, *_EAGER_RMSNORM),
    }
)
# Elements are those of the activation's result. SwiGLU reads gate and up.
_GELU = MemoryBoundSpec(
    KernelKind.ACTIVATION, MemoryBoundOp.GELU, MemoryPasses(2), MemoryPasses(3), saved=MemoryPasses(1), fused=True
)
_SWIGLU_FUSED = MemoryBoundSpec(
    KernelKind.ACTIVATION, MemoryBoundOp.SWIGLU, MemoryPasses(3), MemoryPasses(5), saved=MemoryPasses(2), fused=True
)
_SWIGLU_UNFUSED = MemoryBoundSpec(
    KernelKind.ACTIVATION,
    MemoryBoundOp.SWIGLU,
    MemoryPasses(5, launches=2),
    MemoryPasses(9, launches=3),
    saved=MemoryPasses(3),
)
# Elements are those of queries and keys combined, or, unfused, of either.
_ROTARY_FUSED = MemoryBoundSpec(KernelKind.ROTARY, MemoryBoundOp.ROTARY, MemoryPasses(2), MemoryPasses(2), fused=True)
_ROTARY_UNFUSED = MemoryBoundSpec(
    KernelKind.ROTARY, MemoryBoundOp.ROTARY, MemoryPasses(10, launches=5), MemoryPasses(14, launches=7)
)
# As complex numbers (`view_as_complex`), which Inductor leaves to PyTorch: to FP32 (1 + 1), product (2), back (1 + 1);
# backward conjugates the angles first, which are small.
_ROTARY_COMPLEX = MemoryBoundSpec(
    *(KernelKind.ROTARY, MemoryBoundOp.ROTARY_COMPLEX),
    *(MemoryPasses(2, fp32=4, launches=3), MemoryPasses(2, fp32=4, launches=4)),
)
# Residual: the gradient passes unchanged, dropout masks it.
_RESIDUAL = MemoryBoundSpec(KernelKind.RESIDUAL, MemoryBoundOp.RESIDUAL, MemoryPasses(3), None, fused=True)
_RESIDUAL_DROPOUT_FUSED = MemoryBoundSpec(
    KernelKind.RESIDUAL,
    MemoryBoundOp.RESIDUAL_DROPOUT,
    MemoryPasses(3, mask=1),
    MemoryPasses(2, mask=1),
    saved=MemoryPasses(0, mask=1),
    fused=True,
)
_RESIDUAL_DROPOUT_UNFUSED = MemoryBoundSpec(
    KernelKind.RESIDUAL,
    MemoryBoundOp.RESIDUAL_DROPOUT,
    MemoryPasses(5, mask=1, launches=2),
    MemoryPasses(2, mask=1),
    saved=MemoryPasses(0, mask=1),
)
# Elements are scores. Score dropout also saves its output, which the matmul with the values reads.
_SOFTMAX_FUSED = MemoryBoundSpec(
    KernelKind.SOFTMAX, MemoryBoundOp.SOFTMAX, MemoryPasses(2), MemoryPasses(3), saved=MemoryPasses(1), fused=True
)
_SOFTMAX_UNFUSED = MemoryBoundSpec(
    KernelKind.SOFTMAX,
    MemoryBoundOp.SOFTMAX,
    MemoryPasses(4, launches=2),
    MemoryPasses(5, launches=2),
    saved=MemoryPasses(1),
)
# Megatron-LM's `FusedScaleMaskSoftmax` in its unfused path. Forward: to FP32 (1 + 1), scale (2), mask (2 and
# the mask), softmax (2), back (1 + 1). Backward: to FP32 (1 + 1), softmax (3), mask (2 and the mask), scale (2), back.
MEGATRON_SOFTMAX = MemoryBoundSpec(
    KernelKind.SOFTMAX,
    MemoryBoundOp.SOFTMAX,
    MemoryPasses(2, fp32=8, mask=1, launches=5),
    MemoryPasses(2, fp32=9, mask=1, launches=5),
    saved=MemoryPasses(0, fp32=1),
)
# Elements are scores or logits: cap x tanh(x / cap). Backward reads the result's gradient and the tanh.
_SOFTCAP_FUSED = MemoryBoundSpec(
    KernelKind.ACTIVATION, MemoryBoundOp.SOFTCAP, MemoryPasses(2), MemoryPasses(3), saved=MemoryPasses(1), fused=True
)
_SOFTCAP_UNFUSED = MemoryBoundSpec(
    KernelKind.ACTIVATION,
    MemoryBoundOp.SOFTCAP,
    MemoryPasses(6, launches=3),
    MemoryPasses(7, launches=3),
    saved=MemoryPasses(1),
)
SCORE_DROPOUT = MemoryBoundSpec(
    KernelKind.DROPOUT,
    MemoryBoundOp.DROPOUT,
    MemoryPasses(2, mask=1),
    MemoryPasses(2, mask=1),
    saved=MemoryPasses(1, mask=1),
    fused=True,
)
DROPOUT = MemoryBoundSpec(
    KernelKind.DROPOUT,
    MemoryBoundOp.DROPOUT,
    MemoryPasses(2, mask=1),
    MemoryPasses(2, mask=1),
    saved=MemoryPasses(0, mask=1),
    fused=True,
)
# Elements are logits; saved is their softmax in FP32 (Korthikanti et al. 2022, section 4.3: 4sbv), or the logits
# (torch.compile recomputes the softmax from them and a row's statistics), or nothing, where no logits stay.
_LOSS_TORCH = MemoryBoundSpec(
    KernelKind.LOSS,
    MemoryBoundOp.LOSS_TORCH,
    MemoryPasses(1, fp32=3, launches=3),
    MemoryPasses(1, fp32=5, launches=3),
    saved=MemoryPasses(0, fp32=1),
)
# Of a sharded vocabulary by DTensor (torch/distributed/tensor/parallel/loss.py). Forward: to FP32 (1 + 1), maximum (1),
# difference, exponential (2 each), sum (1), difference (2). Backward: zeros (1), exponential (2), sum (3), product (2),
# back to the activation's format (1 + 1).
_LOSS_TORCH_SHARDED = MemoryBoundSpec(
    KernelKind.LOSS,
    MemoryBoundOp.LOSS_VOCAB_PARALLEL,
    MemoryPasses(1, fp32=9, launches=6),
    MemoryPasses(1, fp32=9, launches=5),
    saved=MemoryPasses(0, fp32=1),
)
METRIC: Final = replace(_LOSS_TORCH, backward=None, saved=MemoryPasses(0))
"""PyTorch's cross-entropy of logits without gradients."""
_LOSS_COMPILED = MemoryBoundSpec(
    KernelKind.LOSS,
    MemoryBoundOp.LOSS_CHUNKED,
    MemoryPasses(1),
    MemoryPasses(2),
    saved=MemoryPasses(1),
    fused=True,
)
_LOSS_SPECS = MappingProxyType(
    {
        LossImplementation.FUSED: MemoryBoundSpec(
            KernelKind.LOSS,
            MemoryBoundOp.LOSS_FUSED,
            MemoryPasses(1, fp32=1),
            MemoryPasses(1, fp32=1),
            saved=MemoryPasses(0, fp32=1),
            fused=True,
        ),
        LossImplementation.COMPILED: _LOSS_COMPILED,
        LossImplementation.CHUNKED: _LOSS_COMPILED,
        LossImplementation.FUSED_LINEAR: replace(_LOSS_COMPILED, saved=MemoryPasses(0)),
        LossImplementation.LIGER: replace(_LOSS_COMPILED, saved=MemoryPasses(0)),
        LossImplementation.LIGER_FP32_SUM: replace(_LOSS_COMPILED, saved=MemoryPasses(0)),
        LossImplementation.CHUNKED_NLL: replace(_LOSS_TORCH, saved=MemoryPasses(0)),
        LossImplementation.CUT_CROSS_ENTROPY: replace(
            _LOSS_COMPILED, forward=MemoryPasses(0, launches=0), backward=None, saved=MemoryPasses(0)
        ),
        LossImplementation.TORCH: _LOSS_TORCH,
        LossImplementation.TORCH_FP32: replace(_LOSS_TORCH, saved=MemoryPasses(0, fp32=2)),
        # Megatron-LM, megatron/core/tensor_parallel/cross_entropy.py. Forward: to FP32 (1 + 1), maximum (1), subtract,
        # exponential (2 each), sum (1), divide (2). Backward: multiply (2), back to the activation's format (1 + 1).
        LossImplementation.VOCAB_PARALLEL: MemoryBoundSpec(
            KernelKind.LOSS,
            MemoryBoundOp.LOSS_VOCAB_PARALLEL,
            MemoryPasses(1, fp32=9, launches=6),
            MemoryPasses(1, fp32=3, launches=2),
            saved=MemoryPasses(0, fp32=1),
        ),
    }
)
_SHARDED_LOSS_SPECS = MappingProxyType(
    {
        LossImplementation.TORCH: _LOSS_TORCH_SHARDED,
        LossImplementation.TORCH_FP32: replace(_LOSS_TORCH_SHARDED, saved=MemoryPasses(0, fp32=2)),
    }
)
# z-loss (PaLM, arXiv:2204.02311, section 5) next to PyTorch's cross-entropy: `logits.logsumexp(-1).pow(2)` of FP32
# logits (allenai/OLMo, olmo/train.py, cross_entropy_loss). Forward: maximum (1), difference (2), exponential (2), sum
# (1). Backward: difference, exponential and product (2 each), added to the other gradient (3). It saves the logits.
# One-kernel losses have the logarithm anyway, and their gradient is the softmax's times a factor of the row.
_Z_LOSS = MemoryBoundSpec(
    KernelKind.LOSS,
    MemoryBoundOp.Z_LOSS,
    MemoryPasses(0, fp32=6, launches=4),
    MemoryPasses(0, fp32=9, launches=4),
    saved=MemoryPasses(0, fp32=1),
)
_Z_LOSS_SPECS = MappingProxyType(
    {
        LossImplementation.TORCH: _Z_LOSS,
        LossImplementation.TORCH_FP32: replace(_Z_LOSS, saved=MemoryPasses(0)),  # which keeps FP32 logits itself
        LossImplementation.CHUNKED_NLL: replace(_Z_LOSS, saved=MemoryPasses(0)),
    }
)
# A LoRA adapter's scaled output is added to that of the frozen layer; backward scales the gradient.
SCALED_SUM = MappingProxyType(
    {
        True: MemoryBoundSpec(KernelKind.RESIDUAL, MemoryBoundOp.SCALED_SUM, MemoryPasses(3), None, fused=True),
        False: MemoryBoundSpec(KernelKind.RESIDUAL, MemoryBoundOp.SCALED_SUM, MemoryPasses(5, launches=2), None),
    }
)
SCALE = MemoryBoundSpec(KernelKind.RESIDUAL, MemoryBoundOp.SCALE, MemoryPasses(2), None, fused=True)
# A branch times a vector [width]: backward writes the branch's gradient, and sums the product for the vector's.
LAYER_SCALE = MemoryBoundSpec(
    KernelKind.RESIDUAL, MemoryBoundOp.SCALE, MemoryPasses(2), MemoryPasses(4, launches=2), saved=MemoryPasses(1)
)
# A residual stream forks before each norm: backward adds the two gradients.
GRADIENT_SUM = _RESIDUAL
BIAS_ADD = MemoryBoundSpec(KernelKind.RESIDUAL, MemoryBoundOp.BIAS_ADD, MemoryPasses(2), None, fused=True)
# The bias gradient sums the output's gradient over the tokens.
BIAS_GRADIENT = MemoryBoundSpec(KernelKind.COPY, MemoryBoundOp.BIAS_GRADIENT, MemoryPasses(1), None, fused=True)


# A causal convolution with SiLU reads its input twice in backward, once to compute SiLU's argument again.
CAUSAL_CONV1D = MemoryBoundSpec(
    KernelKind.ACTIVATION,
    MemoryBoundOp.CAUSAL_CONV1D,
    MemoryPasses(2),
    MemoryPasses(3),
    saved=MemoryPasses(1),
    fused=True,
)
# Written in CUDA, of Dao-AILab/causal-conv1d, which Mamba layers call.
CAUSAL_CONV1D_CUDA = replace(CAUSAL_CONV1D, op=MemoryBoundOp.CAUSAL_CONV1D_CUDA)
# Elements are those of the result. Backward reads the result's gradient, input and gate, and writes two gradients.
GATED_RMSNORM = MemoryBoundSpec(
    KernelKind.NORM, MemoryBoundOp.GATED_RMSNORM, MemoryPasses(3), MemoryPasses(5), saved=MemoryPasses(2), fused=True
)
# Zamba2RMSNormGated of Transformers (models/zamba2/modeling_zamba2.py): besides its norm, an RMSNorm, the gate to FP32
# (1 + 1), SiLU (2) and the product (3). Backward: both gradients of the product (6), SiLU's (3), and back (1 + 1).
_EAGER_GATE = (MemoryPasses(1, fp32=6, launches=3), MemoryPasses(1, fp32=10, launches=4), MemoryPasses(0, fp32=3))
_GATED_RMSNORM_UNFUSED = MemoryBoundSpec(
    KernelKind.NORM,
    MemoryBoundOp.GATED_RMSNORM,
    _EAGER_RMSNORM[0].with_more(_EAGER_GATE[0]),
    _EAGER_RMSNORM[1].with_more(_EAGER_GATE[1]),
    _EAGER_RMSNORM[2].with_more(_EAGER_GATE[2]),
)
L2NORM = MemoryBoundSpec(KernelKind.NORM, MemoryBoundOp.L2NORM, MemoryPasses(2), MemoryPasses(3), fused=True)
SILU = MemoryBoundSpec(
    KernelKind.ACTIVATION, MemoryBoundOp.SILU, MemoryPasses(2), MemoryPasses(3), saved=MemoryPasses(1), fused=True
)
GATE = MemoryBoundSpec(
    KernelKind.ACTIVATION, MemoryBoundOp.GATE, MemoryPasses(3), MemoryPasses(5), saved=MemoryPasses(2), fused=True
)
# The gate's activation and the product are kernels, their gradients three.
_GATE_UNFUSED = MemoryBoundSpec(
    KernelKind.ACTIVATION,
    MemoryBoundOp.GATE,
    MemoryPasses(2 + 3, launches=2),
    MemoryPasses(3 + 3 + 3, launches=3),
    saved=MemoryPasses(3),
)


def gated_rmsnorm_spec(*, fused: bool) -> MemoryBoundSpec:
    """Passes of an RMSNorm of rows times an activation of a gate."""
    return GATED_RMSNORM if fused else _GATED_RMSNORM_UNFUSED


def gate_spec(*, fused: bool) -> MemoryBoundSpec:
    """Passes of a product with the activation of a gate."""
    return GATE if fused else _GATE_UNFUSED


def norm_spec(norm_type: Norm, *, fused: bool) -> MemoryBoundSpec:
    """Passes of a norm."""
    return _NORM_SPECS[norm_type, fused]


def norm_of_fp32_copy(spec: MemoryBoundSpec) -> MemoryBoundSpec:
    """A norm in one kernel that reads an FP32 copy of its input and writes the activation format (Apex' mixed norms).

    Forward makes the copy, which is saved; backward converts the FP32 gradient of it.
    """
    backward = MemoryPasses(2, fp32=3, launches=2)
    return replace(spec, forward=MemoryPasses(2, fp32=2, launches=2), backward=backward, saved=MemoryPasses(0, fp32=1))


def activation_spec(mlp_type: MlpType, *, fused: bool) -> MemoryBoundSpec:
    """Passes of the MLP's activation, per element of its output."""
    if mlp_type is MlpType.GELU:
        return _GELU
    return _SWIGLU_FUSED if fused else _SWIGLU_UNFUSED


def rotary_spec(*, fused: bool, is_complex: bool = False) -> MemoryBoundSpec:
    """Passes of rotary positions over queries and keys combined; unfused or complex over each separately."""
    if is_complex:
        return replace(_ROTARY_COMPLEX, fused=fused)
    return _ROTARY_FUSED if fused else _ROTARY_UNFUSED


def residual_spec(*, dropout: bool, fused: bool) -> MemoryBoundSpec:
    """Passes of the residual add, with dropout of the branch if the model has it."""
    if not dropout:
        return _RESIDUAL
    return _RESIDUAL_DROPOUT_FUSED if fused else _RESIDUAL_DROPOUT_UNFUSED


def softmax_spec(*, fused: bool) -> MemoryBoundSpec:
    """Passes of mask and softmax over a score matrix."""
    return _SOFTMAX_FUSED if fused else _SOFTMAX_UNFUSED


def softcap_spec(*, fused: bool) -> MemoryBoundSpec:
    """Passes of a tanh that caps scores or logits."""
    return _SOFTCAP_FUSED if fused else _SOFTCAP_UNFUSED


def loss_spec(loss_type: LossImplementation, *, is_sharded: bool = False) -> MemoryBoundSpec:
    """Passes of softmax cross-entropy over the logits; is_sharded: each rank has some of the vocabulary."""
    spec = _LOSS_SPECS[loss_type]
    return _SHARDED_LOSS_SPECS.get(loss_type, spec) if is_sharded else spec


def z_loss_spec(loss_type: LossImplementation) -> MemoryBoundSpec | None:
    """Passes of z-loss in addition to softmax cross-entropy; None where that has what it needs."""
    return _Z_LOSS_SPECS.get(loss_type)


def copy_kernel(name: str, dtype: DType, elements: int) -> Kernel:
    """A device-to-device copy of `elements` elements."""
    shape = MemoryBoundShape(MemoryBoundOp.COPY, elements, 1, fused=True)
    return Kernel(name, KernelKind.COPY, dtype, flops=0.0, bytes=MemoryPasses(2).bytes(dtype, elements), shape=shape)


def accumulate_kernels(
    name: str, size: tuple[int, int], *, gradient_dtype: DType, accumulator_dtype: DType, accumulation: Accumulation
) -> tuple[Kernel, ...]:
    """Kernels that add a gradient [rows, width] to the accumulator; none where the matmul epilogue has added it.

    gradient_dtype, accumulator_dtype: formats of the two.
    """
    match accumulation:
        case Accumulation.FUSED:
            return ()
        case Accumulation.ASSIGNED if gradient_dtype is accumulator_dtype:
            return ()
        case Accumulation.ASSIGNED | Accumulation.COPIED:
            return (convert_kernel(name, gradient_dtype, accumulator_dtype, size),)
        case Accumulation.CONVERTED if gradient_dtype is not accumulator_dtype:
            convert = convert_kernel(f"{name}.convert", gradient_dtype, accumulator_dtype, size)
            return (
                convert,
                add_kernel(name, size, gradient=accumulator_dtype, accumulator=accumulator_dtype),
            )
    return (add_kernel(name, size, gradient=gradient_dtype, accumulator=accumulator_dtype),)


def add_kernel(name: str, size: tuple[int, int], *, gradient: DType, accumulator: DType) -> Kernel:
    """The gradient of a weight [rows, width] added to the accumulator, each in its format."""
    shape = MemoryBoundShape(MemoryBoundOp.ACCUMULATE, *size, fused=True, formats=(accumulator,))
    moved_bytes = float(shape.elements * (gradient.bytes + 2 * accumulator.bytes))
    return Kernel(name, KernelKind.COPY, gradient, 0.0, moved_bytes, shape, is_over_weights=True)


def convert_kernel(name: str, source: DType, target: DType, size: tuple[int, int]) -> Kernel:
    """The gradient of a weight [rows, width] rewritten in another format."""
    shape = MemoryBoundShape(MemoryBoundOp.COPY, *size, fused=True, formats=(target,))
    moved_bytes = float(shape.elements * (source.bytes + target.bytes))
    return Kernel(name, KernelKind.COPY, source, 0.0, moved_bytes, shape, is_over_weights=True)


def dequantize_kernel(name: str, stored: DType, compute_dtype: DType, *, rows: int, width: int) -> Kernel:
    """Dequantize weights [rows, width] from their stored format into the compute format, in one kernel."""
    shape = MemoryBoundShape(MemoryBoundOp.DEQUANTIZE, rows, width, fused=True, formats=(stored,))
    moved_bytes = float(shape.elements * (stored.bytes + compute_dtype.bytes))
    return Kernel(name, KernelKind.COPY, compute_dtype, 0.0, moved_bytes, shape, is_over_weights=True)
