"""What does SOAP compute and keep: Adam in the eigenbases of Shampoo's factors?

Of a matrix [m, n] SOAP (Vyas et al. 2024, arXiv:2409.11321) keeps both moments of Adam, the factors L = mean of G G^T
and R = mean of G^T G, and their eigenbases Q_L and Q_R, all in FP32 (NVIDIA-NeMo/Emerging-Optimizers@fd77292, soap.py).
A step adds to the factors (2 m^2 n + 2 m n^2 FLOP), projects the gradient in and the update out, each as much, and,
where eigenbases are renewed, the first moment out of the old ones and into the new. Renewing one of side d
(`orthogonal_iteration`) is L Q, a QR factorization of it with its Q, and the diagonal of Q^T L Q: (2 + 8/3 + 2) d^3. It
does so every `precondition_frequency` steps (1 there, 10 in nikhilvyas/SOAP); a step is timed as the mean of these.

Products are in FP32 (`fp32_matmul_prec` highest), factorizations reach a share of that (`topologies/scans`).
Elementwise, in FP32: each factor is a weighted mean (3), its new basis sorted (2) and its eigenvalues summed (2);
moments and update of Adam take 18 passes, one kernel for each term: first moment (3), second (2 + 4), corrections,
root, epsilon (2 + 2 + 2), quotient (3). The gradient is converted before; weights are decayed (2) and updated (2, and
1 of the update) behind.
"""

from clustersim.common.dtypes import DType
from clustersim.common.units import Flop
from clustersim.model.kernels import Kernel, KernelKind, MatmulLayout, MatmulShape, MemoryBoundOp, MemoryBoundShape
from clustersim.model.linear import matmul_kernel
from clustersim.model.optimizer_kernels import elementwise_update_kernel
from clustersim.model.optimizers import Soap
from clustersim.model.precision_recipe import WeightFormats
from clustersim.model.weight_matrices import WeightMatrix

_FP32 = DType.FP32
_FACTOR_PASSES = 3
_BASIS_PASSES = 2 + 2
_ADAM_PASSES = 3 + (2 + 4) + (2 + 2 + 2) + 3


def factor_elements(matrix: WeightMatrix) -> int:
    """Elements of the factors of one matrix, and of their eigenbases."""
    return 2 * (matrix.outputs**2 + matrix.inputs**2)


def soap_flops(matrix: WeightMatrix, optimizer: Soap) -> Flop:
    """FLOP of the mean step of all of its `count` matrices."""
    return sum(kernel.flops for kernel in matrix_kernels(matrix, optimizer))


def matrix_kernels(matrix: WeightMatrix, optimizer: Soap) -> tuple[Kernel, ...]:
    """Kernels of the mean step; those that renew eigenbases count as often as they run."""
    m, n, share = matrix.outputs, matrix.inputs, 1.0 / optimizer.precondition_frequency
    count, sides = matrix.count, {"left": m, "right": n}
    factors = tuple(
        kernel
        for name, side in sides.items()
        for kernel in (
            _product(f"{name}_factor", MatmulShape(side, side, m * n // side, count)),
            _passes(f"{name}_factor.mean", count * side**2, _FACTOR_PASSES),
        )
    )
    renewed = (
        *_projections(matrix, "moment_out"),
        *(kernel for name, side in sides.items() for kernel in _renewal(name, side, count)),
        *_projections(matrix, "moment_in"),
    )
    adam = _passes("adam", count * m * n, _ADAM_PASSES, launches=8)
    return (
        *factors,
        *(_scaled(kernel, share) for kernel in renewed),
        *_projections(matrix, "gradient_in"),
        adam,
        *_projections(matrix, "update_out"),
    )


def _projections(matrix: WeightMatrix, name: str) -> tuple[Kernel, Kernel]:
    """A product from each side."""
    m, n, count = matrix.outputs, matrix.inputs, matrix.count
    left = _product(f"{name}.left", MatmulShape(m, n, m, count, MatmulLayout.TN))
    return left, _product(f"{name}.right", MatmulShape(m, n, n, count, MatmulLayout.NN))


def _renewal(name: str, side: int, count: int) -> tuple[Kernel, ...]:
    """An eigenbasis from the one before."""
    iterate = _product(f"{name}_iterate", MatmulShape(side, side, side, count, MatmulLayout.NN))
    shape = MemoryBoundShape(MemoryBoundOp.FACTORIZATION, count * side, side, fused=True)
    size = 2.0 * shape.elements * _FP32.bytes
    qr = Kernel(f"optimizer.soap.{name}_qr", KernelKind.OPTIMIZER, _FP32, count * 8 * side**3 / 3, size, shape)
    return iterate, qr, iterate, _passes(f"{name}_basis", count * side**2, _BASIS_PASSES)


def _scaled(kernel: Kernel, share: float) -> Kernel:
    """A kernel that runs in this share of the steps."""
    if share == 1.0:
        return kernel
    shape = kernel.shape
    if isinstance(shape, MatmulShape):
        return kernel.scale_rows(share)
    return Kernel(kernel.name, kernel.kind, kernel.dtype, kernel.flops * share, kernel.bytes * share, shape)


def gradient_kernel(formats: WeightFormats, parameter_count: float) -> Kernel:
    """Gradients to FP32."""
    size = parameter_count * (formats.gradients.bytes + _FP32.bytes)
    return elementwise_update_kernel("optimizer.soap.gradient", _FP32, round(parameter_count), size)


def weight_kernel(formats: WeightFormats, parameter_count: float) -> Kernel:
    """Weights decayed and updated, with a copy in the compute format if they have one."""
    copied = 0.0 if formats.master_copy is None else formats.stored.bytes + formats.master_copy.bytes
    size = parameter_count * (4 * formats.updated.bytes + _FP32.bytes + copied)
    return elementwise_update_kernel("optimizer.soap.weights", _FP32, round(parameter_count), size, 2 + (copied > 0))


def _product(name: str, shape: MatmulShape) -> Kernel:
    return matmul_kernel(f"optimizer.soap.{name}", _FP32, shape, result_bytes=_FP32.bytes)


def _passes(name: str, elements: int, passes: int, launches: int = 1) -> Kernel:
    return elementwise_update_kernel(
        f"optimizer.soap.{name}", _FP32, elements, elements * passes * _FP32.bytes, launches
    )
