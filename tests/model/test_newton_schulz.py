"""Newton-Schulz iterations: FLOP, bytes and what tensor-parallel ranks exchange, against the matrix products."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.dtypes import DType
from clustersim.model.kernels import KernelKind, MatmulShape
from clustersim.model.layers import transformer_layer
from clustersim.model.newton_schulz import (
    momentum_kernel,
    newton_schulz_flops,
    product_kernel,
    shared_iteration,
    update_kernels,
    weight_update_kernel,
)
from clustersim.model.operators import LayerShard
from clustersim.model.optimizers import Muon, MuonTensorParallel, Optimizer
from clustersim.model.overheads import Overheads
from clustersim.model.precision_recipe import mixed_precision
from clustersim.model.presets import load_preset
from clustersim.model.training import Training
from clustersim.model.weight_matrices import WeightMatrix

SIDES = st.integers(1, 64).map(lambda side: 16 * side)
MATRICES = st.builds(WeightMatrix, outputs=SIDES, inputs=SIDES, count=st.integers(1, 4), shares_inputs=st.booleans())


def step_flops(matrix: WeightMatrix, muon: Muon, ranks: int = 1) -> float:
    """FLOP of the kernels of one step on one rank."""
    iteration = shared_iteration(matrix, muon, ranks)
    return sum(kernel.flops for kernel in (product_kernel(iteration, muon), *update_kernels(iteration, muon)))


@given(MATRICES)
def test_a_step_is_four_m_squared_n_and_two_m_cubed(matrix: WeightMatrix) -> None:
    m, n = min(matrix.outputs, matrix.inputs), max(matrix.outputs, matrix.inputs)
    assert step_flops(matrix, Muon()) == matrix.count * (4 * m * m * n + 2 * m**3)
    assert newton_schulz_flops(matrix, 5) == 5 * step_flops(matrix, Muon())


def test_the_kernels_are_those_that_make_a_matrix_orthogonal() -> None:
    """X X^T, its square, and both applied to X, by the shapes of the kernels; singular values go to about one."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((32, 96))
    iteration = shared_iteration(WeightMatrix(32, 96), Muon(), 1)
    kernels = product_kernel(iteration, Muon()), *update_kernels(iteration, Muon())
    iterate = x / np.linalg.norm(x)
    for _ in range(8):
        gram = iterate @ iterate.T
        polynomial = -4.7750 * gram + 2.0315 * gram @ gram
        product = polynomial @ iterate
        results, inner = [gram, polynomial, product], [iterate.shape[1], gram.shape[1], polynomial.shape[1]]
        for kernel, result, depth in zip(kernels, results, inner, strict=True):
            assert isinstance(kernel.shape, MatmulShape)
            assert (kernel.shape.m, kernel.shape.n, kernel.shape.k) == (*result.shape, depth)
        iterate = 3.4445 * iterate + product
    assert np.all(np.abs(np.linalg.svd(iterate, compute_uv=False) - 1) < 0.35)


@given(MATRICES, st.sampled_from([2, 4, 8]))
def test_what_tensor_parallel_ranks_do_with_a_shared_matrix(matrix: WeightMatrix, ranks: int) -> None:
    """Alone: nothing is sent. Duplicated: the whole matrix in FP32, its whole work. Distributed: the side's square."""
    modes = {mode: Muon(tensor_parallel=mode) for mode in MuonTensorParallel}
    full = WeightMatrix(
        matrix.outputs * (1 if matrix.shares_inputs else ranks),
        matrix.inputs * (ranks if matrix.shares_inputs else 1),
        matrix.count,
    )
    blockwise = shared_iteration(matrix, modes[MuonTensorParallel.BLOCKWISE], ranks)
    assert (blockwise.gathered_bytes, blockwise.summed_bytes) == (0, 0)
    duplicated = shared_iteration(matrix, modes[MuonTensorParallel.DUPLICATED], ranks)
    assert duplicated.gathered_bytes == 4 * full.elements * full.count
    assert step_flops(matrix, modes[MuonTensorParallel.DUPLICATED], ranks) == step_flops(full, Muon())
    distributed = shared_iteration(matrix, modes[MuonTensorParallel.DISTRIBUTED], ranks)
    side = matrix.outputs if matrix.shares_inputs else matrix.inputs
    assert distributed.summed_bytes == 2 * side * side * matrix.count
    other = matrix.elements // side
    expected = matrix.count * (4 * side**2 * other + 2 * side**3)
    assert step_flops(matrix, modes[MuonTensorParallel.DISTRIBUTED], ranks) == expected


@given(MATRICES)
def test_symmetric_kernels_halve_two_of_three_products(matrix: WeightMatrix) -> None:
    m, n = sorted((matrix.outputs, matrix.inputs))
    assert step_flops(matrix, Muon(symmetric=True)) == matrix.count * (3 * m * m * n + m**3)


def test_states_and_passes_of_one_parameter() -> None:
    """FP32: average and extrapolation 12 each, to bf16 6, norm 2, division 4; back, scaled 14, weights 8 + 12 + 6.

    Compiled, gradient, momentum, iterate and weights pass once, and the iterate once more behind its norm.
    """
    formats = mixed_precision().weight_formats
    assert momentum_kernel(formats, 1e6).bytes == 36e6
    assert weight_update_kernel(formats, 1e6).bytes == 40e6
    assert momentum_kernel(formats, 1e6, compiled=True).bytes == (4 + 8 + 2 + 2 + 2) * 1e6  # sum of squares, division
    assert weight_update_kernel(formats, 1e6, compiled=True).bytes == (2 + 8 + 2) * 1e6
    assert Muon().moment_bytes(DType.FP32) == 4
    assert [Optimizer(name).moment_bytes(DType.FP32) for name in ("adam", "sgd", "lion", "adafactor")] == [8, 4, 4, 0]
    assert Optimizer.ADAM_8BIT.moment_bytes(DType.FP32) == pytest.approx(2 + 8 / 256)


@pytest.mark.parametrize("name", ["llama3-8b", "qwen3-30b-a3b", "deepseek-v3", "gpt3-175b"])
def test_matrices_are_all_weights_of_layers_but_norms_and_biases(name: str) -> None:
    model, training = load_preset(name), Training(4096, 1, optimizer=Muon())
    for spec in model.distinct_specs:
        for operator in transformer_layer(model, spec, training, LayerShard(1, 4096, 4096)).operators:
            elements = sum(matrix.elements * matrix.count for matrix in operator.matrices)
            has_matmul = any(kernel.kind is KernelKind.MATMUL for kernel in operator.weight_gradient)
            assert elements <= operator.parameter_count
            if has_matmul:
                assert elements > 0.99 * operator.parameter_count


@pytest.mark.parametrize("preset", ["llama3-8b", "mixtral-8x7b"])
def test_joined_gate_and_up_are_one_matrix_twice_as_wide(preset: str) -> None:
    split, joined = (layer_matrices(preset, Overheads(joins_gate=joins_gate)) for joins_gate in (False, True))
    ((matrix, count),) = (split - joined).items()
    assert count == 2
    assert joined - split == Counter([replace(matrix, outputs=2 * matrix.outputs)])


def layer_matrices(preset: str, overheads: Overheads) -> Counter[WeightMatrix]:
    """The matrices of the first layer of a preset."""
    model, training = load_preset(preset), Training(4096, 1, optimizer=Muon(), overheads=overheads)
    layer = transformer_layer(model, model.distinct_specs[0], training, LayerShard(1, 4096, 4096))
    return Counter(matrix for operator in layer.operators for matrix in operator.matrices)
