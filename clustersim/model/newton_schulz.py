"""What does Muon compute and move: momentum, Newton-Schulz iteration, update?

A step of the iteration on X [m, n], m <= n: A = X X^T, B = b A + c A A, X = a X + B X (Jordan et al. 2024): 4 m^2 n +
2 m^3 FLOP in BF16 (NVIDIA-NeMo/Emerging-Optimizers, muon_utils.py, `newton_schulz_step`; torch.optim.Muon). Kernels
that compute one triangle of the symmetric A and B halve the first two products. A matrix that tensor-parallel ranks
share is gathered in FP32 by all of them, who do the same work; or each works on its shard X_i, with A the sum of all
X_i X_i^T, whose side is the dimension that is not shared (`newton_schulz_tp`).

Elementwise, in the formats of the states: the momentum is averaged with the gradient (3 passes) and extrapolated
(Nesterov, 3), converted to BF16, its norm read and divided by; afterwards the result is converted back and scaled, and
the weights decayed (2), updated (3) and copied to the compute format. These run as PyTorch operations; where a
compiler has the whole update (XLA; torch.compile in microsoft/dion), they are three kernels, since only the norm has to
be known before the rest: one to the iterate and the sum of its squares, its division, one to the weights.
"""

from dataclasses import dataclass

from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes, Flop
from clustersim.model.kernels import Kernel, MatmulLayout, MatmulShape
from clustersim.model.linear import matmul_kernel
from clustersim.model.optimizer_kernels import elementwise_update_kernel
from clustersim.model.optimizers import Muon, MuonTensorParallel
from clustersim.model.precision_recipe import WeightFormats
from clustersim.model.weight_matrices import WeightMatrix

_ITERATE = DType.BF16


@dataclass(frozen=True, slots=True)
class SharedIteration:
    """How the iteration of a matrix on one rank uses the tensor-parallel ranks that share it.

    matrix: what this rank iterates on; gathered_bytes: of the matrix that all gather first; summed_bytes: of the
    product that they sum in each step; m: side of that product.
    """

    matrix: WeightMatrix
    m: int
    gathered_bytes: Bytes = 0.0
    summed_bytes: Bytes = 0.0


def shared_iteration(matrix: WeightMatrix, muon: Muon, ranks: int) -> SharedIteration:
    """The iteration of a matrix that `ranks` ranks share (1: nobody)."""
    if ranks == 1 or muon.tensor_parallel is MuonTensorParallel.BLOCKWISE:
        return SharedIteration(matrix, min(matrix.outputs, matrix.inputs))
    if muon.tensor_parallel is MuonTensorParallel.DUPLICATED:
        full = matrix.gathered(ranks)
        size = float(full.elements * full.count * DType.FP32.bytes)
        return SharedIteration(full, min(full.outputs, full.inputs), gathered_bytes=size)
    side = matrix.outputs if matrix.shares_inputs else matrix.inputs
    return SharedIteration(matrix, side, summed_bytes=float(side**2 * matrix.count * _ITERATE.bytes))


def newton_schulz_flops(matrix: WeightMatrix, steps: int) -> Flop:
    """FLOP of the iteration on the whole matrix, all of its `count`."""
    m, n = sorted((matrix.outputs, matrix.inputs))
    return float(matrix.count * steps * (4 * m**2 * n + 2 * m**3))


def product_kernel(iteration: SharedIteration, muon: Muon) -> Kernel:
    """A = X X^T."""
    m, n, batch = _sizes(iteration)
    return _matmul("optimizer.newton_schulz.gram", MatmulShape(m, _computed_columns(m, muon), n, batch))


def update_kernels(iteration: SharedIteration, muon: Muon) -> tuple[Kernel, Kernel]:
    """B = b A + c A A, and X = a X + B X."""
    m, n, batch = _sizes(iteration)
    triangle = MatmulShape(m, _computed_columns(m, muon), m, batch)
    polynomial = _matmul("optimizer.newton_schulz.polynomial", triangle, reads_result=True)
    shape = MatmulShape(m, n, m, batch, MatmulLayout.NN)
    return polynomial, _matmul("optimizer.newton_schulz.update", shape, reads_result=True)


def _sizes(iteration: SharedIteration) -> tuple[int, int, int]:
    matrix = iteration.matrix
    return iteration.m, matrix.elements // iteration.m, matrix.count


def _matmul(name: str, shape: MatmulShape, *, reads_result: bool = False) -> Kernel:
    return matmul_kernel(name, _ITERATE, shape, result_bytes=(1 + reads_result) * _ITERATE.bytes)


def _computed_columns(m: int, muon: Muon) -> int:
    """Columns of a symmetric product, of which one triangle is computed, as many as half of all, if kernels can."""
    return -(-m // 2) if muon.symmetric else m


def momentum_kernel(formats: WeightFormats, parameter_count: float, *, compiled: bool = False) -> Kernel:
    """From gradients to the normalized momentum in BF16: average, extrapolation, conversion, norm, division."""
    momentum, gradient = formats.moments.bytes, formats.gradients.bytes
    if compiled:
        moved = 2 * momentum + gradient + 3 * _ITERATE.bytes
        return _elementwise("optimizer.momentum", formats, parameter_count, moved, launches=2)
    average, extrapolation = 2 * momentum + gradient, 2 * momentum + gradient
    iterate = (momentum + _ITERATE.bytes) + _ITERATE.bytes + 2 * _ITERATE.bytes
    return _elementwise("optimizer.momentum", formats, parameter_count, average + extrapolation + iterate, launches=5)


def weight_update_kernel(formats: WeightFormats, parameter_count: float, *, compiled: bool = False) -> Kernel:
    """From orthogonal matrices to weights: conversion, scale, decay, update, and a copy in the compute format."""
    update, weight = formats.moments.bytes, formats.updated.bytes
    if compiled:
        moved = _ITERATE.bytes + 2 * weight + (0.0 if formats.master_copy is None else formats.stored.bytes)
        return _elementwise("optimizer.update", formats, parameter_count, moved, launches=1)
    scaled = (_ITERATE.bytes + update) + 2 * update
    copied = 0.0 if formats.master_copy is None else formats.stored.bytes + formats.master_copy.bytes
    moved = scaled + 2 * weight + (2 * weight + update) + copied
    return _elementwise("optimizer.update", formats, parameter_count, moved, launches=4 + (copied > 0))


def _elementwise(name: str, formats: WeightFormats, count: float, moved: Bytes, *, launches: int) -> Kernel:
    return elementwise_update_kernel(name, formats.updated, round(count), count * moved, launches)
