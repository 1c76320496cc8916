"""Quantization casts: one layer by hand; recipes without scaled formats; what is kept, gathered and cast again."""

from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common import data_files
from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.lowering.training_step import lower_step
from clustersim.memory.footprint import Footprint, MemoryCategory
from clustersim.model.framework import Framework
from clustersim.model.kernels import Kernel, KernelKind, MemoryBoundShape
from clustersim.model.layer_stack import LayerSpec, MlpType, MoeMlp, high_precision_ends
from clustersim.model.layers import transformer_layer as layer_of
from clustersim.model.operators import LayerOperators, LayerShard, Operator
from clustersim.model.overheads import Overheads
from clustersim.model.precision_recipe import MatmulFormats, OperandCast, PrecisionRecipe, mixed_precision
from clustersim.model.presets import load_preset
from clustersim.model.quantization import LinearOperands, linear_casts
from clustersim.model.recipe_files import load_recipe
from clustersim.model.training import Training
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.parallel.token_dispatch import TokenDispatch
from clustersim.program.task import CollectiveType, ComputeTask
from clustersim.schedules.one_f_one_b import OneFOneB
from tests.conftest import examples
from tests.uniform_models import uniform_layer

RECIPES = data_files.list_names("recipes")
MODEL = load_preset("llama-tiny")  # hidden 512, ffn 1408, 8 layers, 8 heads of 64
T, H, F = 256, 512, 1408
ON_HOPPER = {"tn_only": True, "weights_sharded": False}


def recipe_layer(
    recipe: PrecisionRecipe, shard: LayerShard | None = None, *, norm_in_linear: bool = False
) -> LayerOperators:
    overheads = Overheads(norm_in_linear=norm_in_linear)
    return uniform_layer(MODEL, Training(T, 1, recipe=recipe, overheads=overheads), shard or LayerShard(1, T, T))


def all_kernels(operators: tuple[Operator, ...]) -> list[Kernel]:
    kernel_tuples = ((operator.forward, operator.input_gradient, operator.weight_gradient) for operator in operators)
    return [*chain.from_iterable(chain.from_iterable(kernel_tuples))]


def cast_kernels(operators: tuple[Operator, ...]) -> list[Kernel]:
    return [all_kernel for all_kernel in all_kernels(operators) if all_kernel.kind is KernelKind.CAST]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_file_has_supported_low_precision_matmuls(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.matmul_formats.low_precision in LOW_PRECISION_DTYPES
    assert recipe.activations is DType.BF16
    assert recipe.casts is not None
    assert recipe.casts.output_gradient.copies == 2  # for two matmuls


def test_operands_of_one_layer_by_hand() -> None:
    """MXFP8 without a fused norm: input and output gradient of each matrix are read once and written twice.

    Inputs of qkv, attention.out, mlp.up, mlp.down: H, H, H, F columns; output gradients: 3H (all heads have
    keys), H, 2F (gate and up), H. Each element moves 2 bytes (BF16) + 2 x (8 + 8/32) / 8 bytes.
    """
    operators = recipe_layer(load_recipe("mxfp8")).operators
    moved_bytes = sum(cast_kernel.bytes for cast_kernel in cast_kernels(operators))
    kv = 2 * H * MODEL.distinct_attentions[0].kv_heads // MODEL.distinct_attentions[0].heads
    columns = (H + H + H + F) + (H + kv + H + 2 * F + H)
    assert moved_bytes == pytest.approx(T * columns * (2 + 2 * 8.25 / 8))
    assert len(cast_kernels(operators)) == 8


def test_weights_are_cast_once_a_step_and_both_copies_are_kept() -> None:
    """With one rank: L layers of P elements in matrices are read (2 bytes) and written twice in FP8 (1 byte each)."""
    plan = Plan(MODEL, Training(T, 4, recipe=load_recipe("fp8").for_hardware(**ON_HOPPER)), Layout())
    elements = sum(operator.cached_cast_elements for operator in plan.layer_by_spec[MODEL.distinct_specs[0]].operators)
    assert elements == sum(
        item.parameter_count
        for item in plan.layer_by_spec[MODEL.distinct_specs[0]].operators
        if item.linear is not None
    )
    (program,) = lower_step(plan, OneFOneB().order(1, 4)).programs
    tasks = [task.segment.operations for task in program.tasks if isinstance(task, ComputeTask)]
    weight_casts = [
        operation.kernel
        for operations in tasks
        for operation in operations
        if operation.kernel and "weights" in operation.kernel.name
    ]
    assert [weight_cast.bytes for weight_cast in weight_casts] == [MODEL.layer_count * elements * (2 + 2)]
    assert weight_casts[0].launches == 4 * MODEL.layer_count
    fp8_footprint = Footprint(plan, Framework(1.0, 0.0), 0.0)
    bf16_footprint = Footprint(replace(plan, training=Training(T, 4)), Framework(1.0, 0.0), 0.0)
    assert (
        fp8_footprint.resident_bytes(0)[MemoryCategory.PARAMETERS]
        == bf16_footprint.resident_bytes(0)[MemoryCategory.PARAMETERS]
    )
    assert (
        fp8_footprint.resident_bytes(0)[MemoryCategory.COPIES] == 2 * MODEL.layer_count * elements
    )  # as many bytes as BF16 alone
    assert bf16_footprint.resident_bytes(0)[MemoryCategory.COPIES] == 0


def test_weights_stored_in_the_matmul_format_need_no_copies() -> None:
    """FP8 and its transpose, 2 bytes an element, for 2 in BF16 and 2 in copies."""
    recipe = load_recipe("fp8").for_hardware(**ON_HOPPER)
    fp8_stored = replace(recipe, stored=DType.FP8, gathered=DType.FP8)
    sizes = {}
    for variant in (recipe, fp8_stored):
        plan = Plan(MODEL, Training(T, 4, recipe=variant), Layout())
        resident = Footprint(plan, Framework(1.0, 0.0), 0.0).resident_bytes(0)
        sizes[variant] = resident[MemoryCategory.PARAMETERS] + resident[MemoryCategory.COPIES]
    elements = sum(
        variant.parameter_count for variant in recipe_layer(fp8_stored).operators
    )  # norms are counted with them
    matrices = sum(variant.cached_cast_elements for variant in recipe_layer(fp8_stored).operators)
    assert sizes[recipe] - sizes[fp8_stored] == MODEL.layer_count * ((elements - matrices) + 2 * matrices)


def test_a_fused_norm_shares_the_work_of_the_cast() -> None:
    """Delayed scaling writes FP8 in the norm, and transposes; current scaling finds the largest element there."""
    for name, unfused_bytes, fused_bytes in (
        ("fp8", 2 + 2, 1),
        ("fp8-current", 2 + 2 + 2, 2 + 2),
        ("mxfp8", 4.0625, 4.0625),
    ):
        recipe = load_recipe(name).for_hardware(**ON_HOPPER)
        cast_bytes = [
            cast_kernels(recipe_layer(recipe, norm_in_linear=norm_in_linear).operators)[0].bytes
            for norm_in_linear in (False, True)
        ]
        assert cast_bytes == [T * H * unfused_bytes, T * H * fused_bytes]


def test_accelerators_that_read_operands_either_way_need_one_copy() -> None:
    row_only, either_way = (
        load_recipe("fp8-current").for_hardware(tn_only=item, weights_sharded=False) for item in (True, False)
    )
    cast_bytes = [
        sum(cast_kernel.bytes for cast_kernel in cast_kernels(recipe_layer(recipe).operators))
        for recipe in (row_only, either_way)
    ]
    elements = sum(
        kernel.shape.elements
        for kernel in cast_kernels(recipe_layer(either_way).operators)
        if isinstance(kernel.shape, MemoryBoundShape)
    )
    assert cast_bytes[0] - cast_bytes[1] == elements
    mxfp8 = load_recipe("mxfp8")
    assert mxfp8.for_hardware(tn_only=False, weights_sharded=False) == mxfp8.for_hardware(
        tn_only=True, weights_sharded=False
    )


def test_sequence_parallel_shards_are_cast_before_the_all_gather() -> None:
    """On two ranks half of the input of qkv is cast; it is gathered in 8.25 bits where BF16 has 16."""
    layout = Layout(tp=2, sequence_parallel=True)
    payloads = {}
    for name in ("mxfp8", None):
        recipe = mixed_precision() if name is None else load_recipe(name)
        plan = Plan(MODEL, Training(T, 2, recipe=recipe), layout)
        (program,) = lower_step(plan, OneFOneB().order(1, 2)).programs
        segments = [task.segment for task in program.tasks if isinstance(task, ComputeTask)]
        all_gathers = [
            comm_op
            for block in segments
            for comm_op in block.comm_ops
            if comm_op.collective is CollectiveType.ALL_GATHER
        ]
        payloads[name] = {all_gather.payload for all_gather in all_gathers}
    bf16_payload = T * H * 2.0  # the head's gather stays in BF16
    assert payloads[None] == {bf16_payload}
    assert payloads["mxfp8"] == {bf16_payload, bf16_payload * 8.25 / 16}
    first, *_ = cast_kernels(
        recipe_layer(load_recipe("mxfp8"), LayerShard(1, T, T, tp=2, sequence_parallel=True)).operators
    )
    assert isinstance(first.shape, MemoryBoundShape)
    assert (first.shape.rows, first.shape.width) == (T // 2, H)


def test_first_and_last_layers_have_no_low_precision_matmuls() -> None:
    recipe = replace(load_recipe("mxfp8"), num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=2)
    plan = Plan(MODEL, Training(T, 1, recipe=recipe), Layout())
    is_high_precision = [run.spec.high_precision for run in plan.stages[0].stack for _ in range(run.count)]
    assert is_high_precision == [True] + [False] * (MODEL.layer_count - 3) + [True] * 2
    end_layer = plan.layer_by_spec[plan.stages[0].stack[0].spec]
    assert end_layer == Plan(MODEL, Training(T, 1), Layout()).layer_by_spec[MODEL.distinct_specs[0]]
    assert high_precision_ends(MODEL.stack, 99, 99)[0].count == MODEL.layer_count


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_with_bf16_matmuls_casts_nothing(name: str) -> None:
    """Such a step is that of BF16, kernel by kernel."""
    bf16_recipe = replace(load_recipe(name), matmul_formats=MatmulFormats.uniform(DType.BF16))
    assert recipe_layer(bf16_recipe).operators == recipe_layer(mixed_precision()).operators


def test_saved_inputs_depend_on_the_recipes_cast() -> None:
    """Torchao saves BF16 if it is not compiled, Transformer Engine the copy that the weight gradient reads."""
    rowwise, eager, plain, fp8 = (
        recipe_layer(load_recipe("fp8-rowwise")),
        recipe_layer(load_recipe("fp8-rowwise").uncompiled()),
        recipe_layer(mixed_precision()),
        recipe_layer(load_recipe("fp8")),
    )
    assert (rowwise.saved_bytes, eager.saved_bytes) == (fp8.saved_bytes, plain.saved_bytes)
    assert plain.saved_bytes - fp8.saved_bytes == T * (H + H + H + F)


@given(st.integers(1, 512), st.integers(1, 512), st.integers(1, 512))
def test_torchaos_gradients_with_scales_of_rows_are_plain_products_scaled_behind(
    tokens: int, inputs: int, outputs: int
) -> None:
    """Both results, [tokens, inputs] and [outputs, inputs] in BF16, are read and written once more.

    Casts down the columns read once for the largest elements, and once in columns, which takes as long as 5.5
    reads: 2 + 11 bytes, and one written, in backward for inputs and weights; the output gradient's other copy
    is by rows, 2 + 1 bytes.
    """
    recipe = load_recipe("fp8-rowwise")
    formats = recipe.matmul_formats
    assert (formats.forward, formats.input_gradient, formats.weight_gradient) == (
        DType.FP8_ROWWISE,
        DType.FP8,
        DType.FP8,
    )
    casts = linear_casts(recipe, formats, LinearOperands("x", tokens, inputs, outputs, tokens, tokens))
    (input_scaling,), (weight_scaling,) = casts.input_gradient_scaling, casts.weight_gradient_scaling
    assert input_scaling.bytes == 2 * 2 * tokens * inputs
    assert weight_scaling.bytes == 2 * 2 * outputs * inputs
    column_bytes = 2 + 11 + 1
    bytes_by_kernel = {kernel.name: kernel.bytes for kernel in (*casts.backward, *casts.weight_gradient)}
    assert bytes_by_kernel == {
        "x.cast_output_gradient": (2 + 1 + column_bytes) * tokens * outputs,
        "x.cast_weight": column_bytes * outputs * inputs,
        "x.cast_input_backward": column_bytes * tokens * inputs,
    }


def test_gradients_without_scales_are_not_scaled() -> None:
    recipe = load_recipe("fp8-rowwise")
    formats = replace(recipe.matmul_formats, weight_gradient=DType.BF16)
    casts = linear_casts(recipe, formats, LinearOperands("x", T, H, F, T, T))
    assert casts.input_gradient_scaling
    assert not casts.weight_gradient_scaling


WIDTHS = st.integers(1, 64).map(lambda blocks: 32 * blocks)


@given(st.sampled_from(RECIPES), WIDTHS, WIDTHS, WIDTHS, st.booleans())
@examples(50)
def test_cast_bytes_are_proportional_to_tokens(
    name: str, tokens: int, inputs: int, outputs: int, by_rows: bool
) -> None:
    recipe = load_recipe(name).for_hardware(tn_only=by_rows, weights_sharded=False)
    operands = LinearOperands("x", tokens, inputs, outputs, tokens, tokens)
    casts = linear_casts(recipe, recipe.matmul_formats, operands)
    single_kernels = (*casts.forward, *casts.backward, *casts.weight_gradient)
    doubled_casts = linear_casts(
        recipe,
        recipe.matmul_formats,
        replace(operands, tokens=2 * tokens, local_input_tokens=2 * tokens, local_gradient_tokens=2 * tokens),
    )
    doubled_kernels = (*doubled_casts.forward, *doubled_casts.backward, *doubled_casts.weight_gradient)
    activation_pairs = [
        pair for pair in zip(single_kernels, doubled_kernels, strict=True) if "weight" not in pair[0].name
    ]
    assert all(doubled.bytes == 2 * single.bytes for single, doubled in activation_pairs)
    assert all(single_kernel.launches >= 1 and single_kernel.flops == 0.0 for single_kernel in single_kernels)


def test_a_finer_scale_never_means_fewer_bytes_of_scales() -> None:
    """Scale bits per element, by the number of elements that share a scale."""
    scales = {DType.FP8: 0.0, DType.FP8_BLOCKWISE: 32 / 128, DType.MXFP8: 8 / 32}
    assert {scale: scale.bits - 8 for scale in scales} == scales
    assert DType.NVFP4.bits - 4 >= DType.MXFP8.bits - 8


def test_a_cast_without_reads_or_copies_is_no_kernel() -> None:
    assert OperandCast(0, 1).rowwise_only.launch_count == 0


def test_low_precision_dispatch_casts_before_and_transposes_after() -> None:
    """Two of eight experts on each of four ranks, top-2: T tokens become 2 T routed tokens, spread over the ranks.

    Before the dispatch T tokens are read and written once by rows; of the 2 T received a copy by columns is made.
    """
    recipe = replace(load_recipe("fp8-blockwise"), dispatch_format=DType.FP8_BLOCKWISE)
    moe = MoeMlp(8, 2, 256, MlpType.SWIGLU)
    spec = LayerSpec(None, moe)
    moe_layer = layer_of(MODEL, spec, Training(T, 1, recipe=recipe), LayerShard(1, T, T, ep=4))
    casts = {
        all_kernel.name: all_kernel
        for all_kernel in all_kernels(moe_layer.operators)
        if all_kernel.kind is KernelKind.CAST
    }
    element_bytes = DType.FP8_BLOCKWISE.bytes
    assert casts["experts.up.cast_input"].bytes == T * H * (2 + element_bytes)
    assert casts["experts.up.transpose_input_backward"].bytes == 2 * T * H * 2 * element_bytes
    assert casts["experts.down.cast_output_gradient"].bytes == T * H * (2 + element_bytes)
    assert casts["experts.down.transpose_output_gradient"].bytes == 2 * T * H * 2 * element_bytes
    assert casts["experts.down.cast_input"].bytes == 2 * T * 256 * (2 + 2 * element_bytes)
    layout = Layout(dp=4, ep=4)
    fp8_dispatch = TokenDispatch(layout, moe, T, 2.0 * H, DType.BF16, wire_format=DType.FP8_BLOCKWISE)
    bf16_dispatch = replace(fp8_dispatch, wire_format=None)
    dispatched_bytes = {dispatch_op.name: dispatch_op.payload for dispatch_op in fp8_dispatch.dispatch_ops()}[
        "dispatch tokens"
    ]
    assert (
        dispatched_bytes
        == {comm_op.name: comm_op.payload for comm_op in bf16_dispatch.dispatch_ops()}["dispatch tokens"]
        * element_bytes
        / 2
    )
    assert fp8_dispatch.combine_ops() == bf16_dispatch.combine_ops()
