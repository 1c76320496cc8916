"""What do the matrix products of a layer compute and move?

A product of [m, k] and [k, n] is 2mnk FLOP and moves each operand once. A linear layer of `inputs` x `outputs` on T
tokens is three products: forward (T, outputs, inputs), input gradient (T, inputs, outputs), weight gradient (outputs,
inputs, T), which is added to the accumulated gradient in memory (read and written in the gradients' format): fused in
the product's epilogue (Megatron-LM's gradient accumulation fusion), else by a kernel of its own (PyTorch's autograd).
Its bias is added by the product's epilogue or the next kernel, for nothing; the bias gradient is one more read of the
output's gradient. With FP8 compute the operands of linear layers are one byte wide, results and all other
activations are BF16 (Micikevicius et al. 2022, arXiv:2209.05433); the casts are not counted.
"""

from dataclasses import dataclass, replace

from clustersim.dtypes import DType
from clustersim.units import Bytes
from clustersim.workload.kernels import Kernel, KernelKind, MatmulShape, Operands
from clustersim.workload.streaming import BIAS_GRADIENT, accumulate
from clustersim.workload.training import Precision


def activation_dtype(precision: Precision) -> DType:
    """The format of activations outside the operands of linear layers."""
    return DType.BF16 if precision.compute is DType.FP8 else precision.compute


def product(name: str, dtype: DType, shape: MatmulShape, *, result: Bytes) -> Kernel:
    """A matrix product whose operands are `dtype`; result: bytes that it moves per element of its result."""
    m, n, k = shape.m, shape.n, shape.k
    moved = shape.batch * ((m * k + k * n) * dtype.bytes + m * n * result)
    return Kernel(name, KernelKind.MATMUL, dtype, 2.0 * shape.batch * m * n * k, float(moved), shape)


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer on one rank: [tokens, inputs] to [tokens, outputs].

    dtype: of the operands; bias_tokens: tokens whose gradient this rank sums for the bias (0: there is no bias).
    """

    name: str
    tokens: int
    inputs: int
    outputs: int
    dtype: DType
    bias_tokens: int = 0

    @property
    def parameters(self) -> int:
        """Weight and bias elements."""
        return self.outputs * (self.inputs + (1 if self.bias_tokens else 0))

    def forward(self, precision: Precision) -> tuple[Kernel, ...]:
        """The output of the layer."""
        shape = MatmulShape(self.tokens, self.outputs, self.inputs)
        return (product(self.name, self.dtype, shape, result=activation_dtype(precision).bytes),)

    def input_gradient(self, precision: Precision) -> tuple[Kernel, ...]:
        """The gradient of the input."""
        shape = MatmulShape(self.tokens, self.inputs, self.outputs, operands=Operands.NN)
        name = f"{self.name}.input_gradient"
        return (product(name, self.dtype, shape, result=activation_dtype(precision).bytes),)

    def weight_gradient(self, precision: Precision, *, fused: bool) -> tuple[Kernel, ...]:
        """The gradients of weight and bias, added to what is accumulated."""
        if not self.bias_tokens:
            return self._weight_gradient(precision, fused=fused)
        bias = BIAS_GRADIENT.over(self.bias_tokens, self.outputs)
        summed = BIAS_GRADIENT.forward_kernel(f"{self.name}.bias_gradient", activation_dtype(precision), bias)
        return (*self._weight_gradient(precision, fused=fused), summed)

    def _weight_gradient(self, precision: Precision, *, fused: bool) -> tuple[Kernel, ...]:
        name, gradients, dtype = f"{self.name}.weight_gradient", precision.gradients, activation_dtype(precision)
        shape = MatmulShape(self.outputs, self.inputs, self.tokens, operands=Operands.TN)
        if fused:
            added = replace(shape, accumulated=gradients)
            return (product(name, self.dtype, added, result=2 * gradients.bytes),)
        made = product(name, self.dtype, shape, result=dtype.bytes)
        return (made, accumulate(f"{self.name}.accumulate", (dtype, gradients), self.outputs, self.inputs))
