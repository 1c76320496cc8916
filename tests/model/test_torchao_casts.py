"""torchao's casts: fused by a compiler or not, kernels of its own, and what recomputation by operations runs again."""

from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.dtypes import DType
from clustersim.model.framework_files import load_framework
from clustersim.model.kernels import Kernel, KernelKind, MatmulShape
from clustersim.model.operators import LayerOperators, LayerShard, Operator
from clustersim.model.overheads import Overheads
from clustersim.model.precision_recipe import OperandCast, PrecisionRecipe
from clustersim.model.presets import load_preset
from clustersim.model.quantization import LinearOperands, linear_casts, quantize_kernels
from clustersim.model.recipe_files import load_recipe
from clustersim.model.training import FullRecompute, Recompute, SelectiveOpRecompute, Training
from tests.uniform_models import uniform_layer

MODEL = load_preset("llama-tiny")  # hidden 512, ffn 1408, 8 heads of 64
T, H, F = 256, 512, 1408
KV = 64 * MODEL.distinct_attentions[0].kv_heads
FP8_NAMES = ("fp8-tensorwise", "fp8-rowwise")


def recipe_layer(recipe: PrecisionRecipe, recompute: Recompute | None = None) -> LayerOperators:
    training = Training(T, 1, recipe=recipe, recompute=recompute or SelectiveOpRecompute())
    return uniform_layer(MODEL, training, LayerShard(1, T, T))


def operator_of(recipe: PrecisionRecipe, name: str, recompute: Recompute | None = None) -> Operator:
    return next(operator for operator in recipe_layer(recipe, recompute).operators if operator.name == name)


def kinds(kernels: tuple[Kernel, ...]) -> list[KernelKind]:
    return [kernel.kind for kernel in kernels]


@pytest.mark.parametrize("name", FP8_NAMES)
def test_eager_fp8_reads_and_writes_each_step_of_the_formula(name: str) -> None:
    """Bytes of an element: abs 2 + 2, max 2, to FP32 2 + 4, scale 4 + 4, clamp 4 + 4, to FP8 4 + 1.

    An output gradient is cast for each product; an operand whose rows are not those of the product is copied.
    """
    cast_bytes, copy_bytes = (2 + 2) + 2 + (2 + 4) + (4 + 4) + (4 + 4) + (4 + 1), 1 + 1
    recipe = load_recipe(name).uncompiled()
    operands = LinearOperands("x", T, H, F, T, T)
    casts = linear_casts(recipe, recipe.matmul_formats, operands)
    bytes_by_kernel = {kernel.name: [] for kernel in (*casts.forward, *casts.backward, *casts.weight_gradient)}
    for kernel in (*casts.forward, *casts.backward, *casts.weight_gradient):
        bytes_by_kernel[kernel.name].append(kernel.bytes)
    assert bytes_by_kernel == {
        "x.cast_input": [cast_bytes * T * H],
        "x.cast_weight": [cast_bytes * F * H, (cast_bytes + copy_bytes) * F * H],
        "x.cast_output_gradient": [(2 * cast_bytes + copy_bytes) * T * F],
        "x.cast_input_backward": [(cast_bytes + copy_bytes) * T * H],
    }


@pytest.mark.parametrize("name", FP8_NAMES)
def test_layers_that_nothing_compiles_cast_the_input_of_each_projection(name: str) -> None:
    """Queries, keys and values have one input; so do gate and up. A compiler casts each once."""
    compiled = load_recipe(name)
    for recipe, counts in ((compiled, (1, 1, 1, 1)), (compiled.uncompiled(), (3, 1, 2, 1))):
        names = [kernel.name for operator in recipe_layer(recipe).operators for kernel in operator.forward]
        linear_layers = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
        assert tuple(names.count(f"{linear}.cast_input") for linear in linear_layers) == counts
    assert compiled.uncompiled().matmul_formats == compiled.matmul_formats


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8", "fp8-current", "fp8-blockwise", "mxfp8-torchao"])
def test_kernels_of_a_library_are_the_same_uncompiled(name: str) -> None:
    assert load_recipe(name).uncompiled() == load_recipe(name)


def test_mxfp8_of_torchao_reads_an_operand_for_each_copy() -> None:
    """Inputs and weights are saved in BF16 and cast again by columns: 2 reads and 2 copies each, as of gradients."""
    torchao, transformer_engine = (load_recipe(name) for name in ("mxfp8-torchao", "mxfp8"))
    layers = [recipe_layer(replace(recipe)) for recipe in (torchao, transformer_engine)]
    casts = [
        kernel
        for operator in layers[0].operators
        for kernel in chain(operator.forward, operator.input_gradient, operator.weight_gradient)
        if kernel.kind is KernelKind.CAST
    ]
    columns = (H + H + H + F) + (H + 2 * KV + H + 2 * F + H)
    weights = H * (H + 2 * KV) + H * H + H * 2 * F + F * H
    assert sum(cast.bytes for cast in casts) == pytest.approx((T * columns + weights) * 2 * (2 + 8.25 / 8))
    assert layers[0].saved_bytes > layers[1].saved_bytes


@given(st.integers(1, 64), st.integers(1, 64), st.floats(1.0, 8.0))
def test_a_kernel_limited_by_arithmetic_takes_as_long_as_more_bytes(rows: int, width: int, slowdown: float) -> None:
    casts = OperandCast(2, 2), OperandCast(2, 2, slowdown=slowdown)
    plain, slow = (
        quantize_kernels("x", cast, (rows, width), high_precision=DType.BF16, low_precision=DType.NVFP4)[0]
        for cast in casts
    )
    assert slow.bytes == pytest.approx(slowdown * plain.bytes)
    assert slow.launches == plain.launches


def test_nvfp4_gradients_round_stochastically_and_weights_have_blocks_of_two_dimensions() -> None:
    """Measured: both take longer than an input's transform and rounding to nearest."""
    casts = load_recipe("nvfp4-torchao").casts
    assert casts is not None
    assert casts.weight.slowdown > casts.output_gradient.slowdown > casts.input.slowdown > 1.0
    other = load_recipe("nvfp4").casts
    assert other is not None
    assert other.input.slowdown == 1.0


def test_recomputation_by_operations_does_not_know_nvfp4_products() -> None:
    """All are run again but the last one of the layer, whose input is cast only; nothing of them is saved.

    Of MXFP8, as of BF16, every second one is saved: queries, values, gate and down.
    """
    nvfp4, mxfp8 = (load_recipe(f"{name}-torchao") for name in ("nvfp4", "mxfp8"))
    matmul_columns = {}
    for recipe in (nvfp4, mxfp8):
        layer = recipe_layer(recipe)
        matmul_columns[recipe.name] = [
            kernel.shape.n
            for operator in layer.operators
            for kernel in operator.recompute_kernels
            if isinstance(kernel.shape, MatmulShape)
        ]
    assert matmul_columns == {"nvfp4-torchao": [H + 2 * KV, H, 2 * F], "mxfp8-torchao": [KV, H, F]}
    down = operator_of(nvfp4, "mlp.down")
    assert kinds(down.recompute_kernels) == [KernelKind.CAST, KernelKind.CAST]
    assert down.saves_outputs
    saved = {
        recipe.name: sum(operator.saved_output_bytes for operator in recipe_layer(recipe).operators)
        for recipe in (nvfp4, mxfp8)
    }
    assert saved["mxfp8-torchao"] - saved["nvfp4-torchao"] == 2 * T * (H + KV + F + H)
    assert not operator_of(nvfp4, "mlp.down", FullRecompute()).saves_outputs


def test_eager_recomputation_casts_again_what_a_saved_product_reads() -> None:
    recipe = load_recipe("fp8-tensorwise")
    assert operator_of(recipe, "mlp.down").recompute_kernels == ()
    down = operator_of(recipe.uncompiled(), "mlp.down")
    assert set(kinds(down.recompute_kernels)) == {KernelKind.CAST}
    assert down.saves_outputs


def test_saved_absolute_values_are_not_taken_again() -> None:
    """The largest one is saved, 2 bytes read less; the values too, where the list has them: 2 read, 2 written less.

    They are as large as the operands: of three projections of one input, three times.
    """
    recipe = load_recipe("fp8-tensorwise").uncompiled()
    elements = T * (3 * H + H + 2 * H + F) + H * (H + 2 * KV) + H * H + H * 2 * F + F * H
    recast_bytes, saved = {}, {}
    for is_saved in (False, True):
        overheads = Overheads(saves_absolute_values=is_saved)
        training = Training(T, 1, recipe=recipe, recompute=SelectiveOpRecompute(), overheads=overheads)
        operators = uniform_layer(MODEL, training, LayerShard(1, T, T)).operators
        kernels = chain.from_iterable(operator.recompute_kernels for operator in operators)
        recast_bytes[is_saved] = sum(kernel.bytes for kernel in kernels if kernel.kind is KernelKind.CAST)
        saved[is_saved] = sum(operator.saved_output_bytes for operator in operators)
    assert recast_bytes == {False: (33 - 2) * elements, True: (33 - 6) * elements}
    assert saved[True] - saved[False] == 2 * elements


def test_torchtitan_saved_absolute_values_for_ten_weeks() -> None:
    versions = {"2024-11-01": False, "2024-12-01": True, "2025-01-31": True, "2025-02-06": False, "": False}
    assert {
        version: load_framework("torchtitan", version).overheads.saves_absolute_values for version in versions
    } == versions


@pytest.mark.parametrize("name", FP8_NAMES)
def test_a_compiler_saves_inputs_quantized(name: str) -> None:
    """Compiled, an input of T x H is saved in one byte an element, though it is cast again; in two where it is not."""
    recipe = load_recipe(name)
    recompute = FullRecompute()
    compiled, eager = (operator_of(each, "mlp.up", recompute) for each in (recipe, recipe.uncompiled()))
    assert (compiled.wgrad_input_bytes, eager.wgrad_input_bytes) == (T * H, 2 * T * H)
    assert KernelKind.CAST in kinds(compiled.weight_gradient)
