"""Precision recipes: each matmul, saved tensor, gather, store and reduction follows its own entry."""

from dataclasses import replace

import pytest

from clustersim.common.dtypes import DType
from clustersim.lowering.training_step import lower_step
from clustersim.memory.footprint import Footprint, MemoryCategory
from clustersim.model.framework import Framework
from clustersim.model.kernels import KernelKind, MatmulShape
from clustersim.model.operators import LayerOperators, LayerShard
from clustersim.model.precision_recipe import MatmulFormats, PrecisionRecipe, WeightFormats, mixed_precision
from clustersim.model.presets import load_preset
from clustersim.model.training import Training
from clustersim.model.transformer import parameter_count
from clustersim.parallel.data_parallel_strategy import FullyShard
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.program.task import CollectiveTask, CollectiveType, ComputeTask
from clustersim.schedules.one_f_one_b import OneFOneB
from tests.uniform_models import uniform_layer

BF16, FP8, FP32 = DType.BF16, DType.FP8, DType.FP32
MODEL = load_preset("llama-tiny")
BF16_WEIGHT_GRADIENT = replace(
    mixed_precision(), matmul_formats=MatmulFormats(FP8, FP8, BF16)
)  # weight gradients stay in BF16
BF16_INPUT_GRADIENT = replace(mixed_precision(), matmul_formats=MatmulFormats(FP8, BF16, FP8))


def recipe_layer(recipe: PrecisionRecipe) -> LayerOperators:
    return uniform_layer(MODEL, Training(256, 1, recipe=recipe), LayerShard(1, 256, 256))


@pytest.mark.parametrize("dtype", DType)
def test_bytes_are_an_eighth_of_bits(dtype: DType) -> None:
    assert 8 * dtype.bytes == dtype.bits


def test_an_explicit_single_format_recipe_equals_the_short_form() -> None:
    weights = WeightFormats(BF16, BF16, FP32, FP32, FP32)
    assert PrecisionRecipe(MatmulFormats(BF16, BF16, BF16), BF16, weights) == mixed_precision(BF16)


def test_matmuls_read_operands_in_their_recipe_format() -> None:
    """C[m, n] = A[m, k] B[k, n] moves (mk + kn) operands; what is not a matmul of a linear layer stays BF16."""
    plain = recipe_layer(mixed_precision()).operators
    for operator, bf16_operator in zip(recipe_layer(BF16_WEIGHT_GRADIENT).operators, plain, strict=True):
        linear = any(kernel.kind is KernelKind.MATMUL for kernel in operator.forward)
        kernels = zip(
            (*operator.forward, *operator.input_gradient),
            (*bf16_operator.forward, *bf16_operator.input_gradient),
            strict=True,
        )
        for kernel, bf16_kernel in kernels:
            assert kernel.dtype is (FP8 if linear else BF16)
            assert kernel.flops == bf16_kernel.flops
            if linear and isinstance(shape := kernel.shape, MatmulShape):
                assert bf16_kernel.bytes - kernel.bytes == shape.m * shape.k + shape.k * shape.n
        assert operator.weight_gradient == bf16_operator.weight_gradient
        assert operator.saved_bytes == bf16_operator.saved_bytes


def test_the_three_matmuls_of_a_layer_have_separate_formats() -> None:
    for operator in recipe_layer(BF16_INPUT_GRADIENT).operators:
        linear = operator.forward[0].kind is KernelKind.MATMUL
        if linear:
            matmuls = operator.forward[0], operator.input_gradient[0], operator.weight_gradient[0]
            assert [kernel.dtype for kernel in matmuls] == [FP8, BF16, FP8]


def test_a_linear_layer_saves_its_input_as_its_weight_gradient_reads_it() -> None:
    """FP8 halves the inputs of the four linear layers of 256 tokens: 512, 512, 512 and 1408 wide."""
    saved = (
        recipe_layer(mixed_precision()).saved_bytes
        - recipe_layer(replace(BF16_WEIGHT_GRADIENT, matmul_formats=MatmulFormats.uniform(FP8))).saved_bytes
    )
    assert saved == 256 * (512 + 512 + 512 + 1408)


def test_weights_are_stored_gathered_and_reduced_in_separate_formats() -> None:
    """FP32 weights that are gathered in BF16 and reduced in BF16, as in FSDP2's mixed precision."""
    formats = WeightFormats(stored=FP32, gathered=BF16, gradients=BF16, master=FP32, moments=FP32)
    training = Training(256, 4, recipe=replace(mixed_precision(), weight_formats=formats), gradient_clipping=False)
    plan = Plan(MODEL, training, Layout(dp=4, data=FullyShard(copies=True)))
    (program,) = lower_step(plan, OneFOneB().order(1, 1)).programs
    payloads = dict.fromkeys((CollectiveType.ALL_GATHER, CollectiveType.REDUCE_SCATTER), 0.0)
    for task in program.tasks:
        if isinstance(task, CollectiveTask):
            payloads[task.comm_op.collective] += task.comm_op.payload
    count, head = parameter_count(MODEL), 512 + 32000 * 512
    assert payloads == {CollectiveType.ALL_GATHER: 2 * (2 * count - head), CollectiveType.REDUCE_SCATTER: 2 * count}
    all_operations = [
        operation for task in program.tasks if isinstance(task, ComputeTask) for operation in task.segment.operations
    ]
    copied_elements = sum(
        all_operation.kernel.shape.elements
        for all_operation in all_operations
        if all_operation.kernel and all_operation.kernel.name.startswith("copy ")
    )
    assert copied_elements == 2 * count - head
    resident = Footprint(plan, Framework(1.0, 0.0), 0.0).resident_bytes(0)
    assert resident[MemoryCategory.PARAMETERS] == 4 * count / 4
    assert resident[MemoryCategory.GRADIENTS] == 2 * count / 4
    assert resident[MemoryCategory.OPTIMIZER] == 8 * count / 4  # the stored weights are their own master
