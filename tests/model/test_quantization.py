"""Casts: by hand for one layer; recipes without formats with scales; what is kept, gathered and cast again."""

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
from tests.uniform_models import layer

RECIPES = data_files.list_names("recipes")
MODEL = load_preset("llama-tiny")  # hidden 512, ffn 1408, 8 layers, 8 heads of 64
T, H, F = 256, 512, 1408
ON_HOPPER = {"by_rows": True, "sharded": False}


def made(recipe: PrecisionRecipe, shard: LayerShard | None = None, *, inside: bool = False) -> LayerOperators:
    overheads = Overheads(norm_in_linear=inside)
    return layer(MODEL, Training(T, 1, recipe=recipe, overheads=overheads), shard or LayerShard(1, T, T))


def kernels(operators: tuple[Operator, ...]) -> list[Kernel]:
    parts = ((operator.forward, operator.input_gradient, operator.weight_gradient) for operator in operators)
    return [*chain.from_iterable(chain.from_iterable(parts))]


def cast(operators: tuple[Operator, ...]) -> list[Kernel]:
    return [kernel for kernel in kernels(operators) if kernel.kind is KernelKind.CAST]


@pytest.mark.parametrize("name", RECIPES)
def test_every_shipped_recipe_has_narrow_products_in_a_format_that_some_accelerator_reads(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.matmul_formats.low_precision in LOW_PRECISION_DTYPES
    assert recipe.activations is DType.BF16
    assert recipe.casts is not None
    assert recipe.casts.output_gradient.copies == 2  # for two products


def test_operands_of_one_layer_by_hand() -> None:
    """MXFP8 without a fused norm: input and output gradient of each matrix are read once and written twice.

    Inputs of qkv, attention.out, mlp.up, mlp.down: H, H, H, F columns; output gradients: 3H (all heads have keys), H,
    2F (gate and up), H. Each element moves 2 bytes (BF16) + 2 x (8 + 8/32) / 8 bytes.
    """
    operators = made(load_recipe("mxfp8")).operators
    moved = sum(kernel.bytes for kernel in cast(operators))
    kv = 2 * H * MODEL.distinct_attentions[0].kv_heads // MODEL.distinct_attentions[0].heads
    columns = (H + H + H + F) + (H + kv + H + 2 * F + H)
    assert moved == pytest.approx(T * columns * (2 + 2 * 8.25 / 8))
    assert len(cast(operators)) == 8


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
    found = [
        operation.kernel
        for operations in tasks
        for operation in operations
        if operation.kernel and "weights" in operation.kernel.name
    ]
    assert [kernel.bytes for kernel in found] == [MODEL.layer_count * elements * (2 + 2)]
    assert found[0].launches == 4 * MODEL.layer_count
    held = Footprint(plan, Framework(1.0, 0.0), 0.0)
    plain = Footprint(replace(plan, training=Training(T, 4)), Framework(1.0, 0.0), 0.0)
    assert held.resident_bytes(0)[MemoryCategory.PARAMETERS] == plain.resident_bytes(0)[MemoryCategory.PARAMETERS]
    assert (
        held.resident_bytes(0)[MemoryCategory.COPIES] == 2 * MODEL.layer_count * elements
    )  # as many bytes as BF16 alone
    assert plain.resident_bytes(0)[MemoryCategory.COPIES] == 0


def test_matrices_kept_in_the_format_of_products_are_not_kept_twice() -> None:
    """FP8 and its transpose, 2 bytes an element, for 2 in BF16 and 2 in copies."""
    recipe = load_recipe("fp8").for_hardware(**ON_HOPPER)
    kept = replace(recipe, stored=DType.FP8, gathered=DType.FP8)
    sizes = {}
    for precision_recipe in (recipe, kept):
        plan = Plan(MODEL, Training(T, 4, recipe=precision_recipe), Layout())
        held = Footprint(plan, Framework(1.0, 0.0), 0.0).resident_bytes(0)
        sizes[precision_recipe] = held[MemoryCategory.PARAMETERS] + held[MemoryCategory.COPIES]
    elements = sum(operator.parameter_count for operator in made(kept).operators)  # norms are counted with them
    matrices = sum(item.cached_cast_elements for item in made(kept).operators)
    assert sizes[recipe] - sizes[kept] == MODEL.layer_count * ((elements - matrices) + 2 * matrices)


def test_a_norm_in_the_same_layer_does_a_part_of_the_cast() -> None:
    """Delayed scaling writes FP8 in the norm, and transposes; current scaling finds the largest element there."""
    for name, apart, inside in (("fp8", 2 + 2, 1), ("fp8-current", 2 + 2 + 2, 2 + 2), ("mxfp8", 4.0625, 4.0625)):
        recipe = load_recipe(name).for_hardware(**ON_HOPPER)
        first = [cast(made(recipe, inside=there).operators)[0].bytes for there in (False, True)]
        assert first == [T * H * apart, T * H * inside]


def test_accelerators_that_read_operands_either_way_need_one_copy() -> None:
    both, one = (load_recipe("fp8-current").for_hardware(tn_only=item, weights_sharded=False) for item in (True, False))
    per = [sum(kernel.bytes for kernel in cast(made(recipe).operators)) for recipe in (both, one)]
    elements = sum(
        element.shape.elements for element in cast(made(one).operators) if isinstance(element.shape, MemoryBoundShape)
    )
    assert per[0] - per[1] == elements
    blocks = load_recipe("mxfp8")
    assert blocks.for_hardware(tn_only=False, weights_sharded=False) == blocks.for_hardware(
        tn_only=True, weights_sharded=False
    )


def test_under_sequence_parallelism_parts_are_cast_and_travel_narrow() -> None:
    """On two ranks half of the input of qkv is cast; it comes in 8.25 bits where BF16 has 16."""
    layout = Layout(tp=2, sequence_parallel=True)
    moved = {}
    for name in ("mxfp8", None):
        recipe = mixed_precision() if name is None else load_recipe(name)
        plan = Plan(MODEL, Training(T, 2, recipe=recipe), layout)
        (program,) = lower_step(plan, OneFOneB().order(1, 2)).programs
        blocks = [task.segment for task in program.tasks if isinstance(task, ComputeTask)]
        sent = [
            comm_op for block in blocks for comm_op in block.comm_ops if comm_op.collective is CollectiveType.ALL_GATHER
        ]
        moved[name] = {item.payload for item in sent}
    whole = T * H * 2.0  # the head's gather stays in BF16
    assert moved[None] == {whole}
    assert moved["mxfp8"] == {whole, whole * 8.25 / 16}
    first, *_ = cast(made(load_recipe("mxfp8"), LayerShard(1, T, T, tp=2, sequence_parallel=True)).operators)
    assert isinstance(first.shape, MemoryBoundShape)
    assert (first.shape.rows, first.shape.width) == (T // 2, H)


def test_layers_at_the_ends_have_no_narrow_products() -> None:
    recipe = replace(load_recipe("mxfp8"), first_layers=1, last_layers=2)
    plan = Plan(MODEL, Training(T, 1, recipe=recipe), Layout())
    wide = [run.spec.high_precision for run in plan.stages[0].stack for _ in range(run.count)]
    assert wide == [True] + [False] * (MODEL.layer_count - 3) + [True] * 2
    ends = plan.layer_by_spec[plan.stages[0].stack[0].spec]
    assert ends == Plan(MODEL, Training(T, 1), Layout()).layer_by_spec[MODEL.distinct_specs[0]]
    assert high_precision_ends(MODEL.stack, 99, 99)[0].count == MODEL.layer_count


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_whose_products_are_wide_casts_nothing(name: str) -> None:
    """Such a step is that of BF16, kernel by kernel."""
    wide = replace(load_recipe(name), matmul_formats=MatmulFormats.uniform(DType.BF16))
    assert made(wide).operators == made(mixed_precision()).operators


def test_what_is_cast_again_was_saved_as_it_was() -> None:
    """By torchao BF16, by Transformer Engine the copy that the weights' gradient reads."""
    rowwise, plain, kept = made(load_recipe("fp8-rowwise")), made(mixed_precision()), made(load_recipe("fp8"))
    assert rowwise.saved_bytes == plain.saved_bytes
    assert plain.saved_bytes - kept.saved_bytes == T * (H + H + H + F)


WIDTHS = st.integers(1, 64).map(lambda each: 32 * each)


@given(st.sampled_from(RECIPES), WIDTHS, WIDTHS, WIDTHS, st.booleans())
@examples(50)
def test_casts_grow_with_their_operands_and_scales_with_fineness(
    name: str, tokens: int, inputs: int, outputs: int, by_rows: bool
) -> None:
    recipe = load_recipe(name).for_hardware(tn_only=by_rows, weights_sharded=False)
    own = LinearOperands("x", tokens, inputs, outputs, tokens, tokens)
    found = linear_casts(recipe, recipe.matmul_formats, own)
    every = (*found.forward, *found.backward, *found.weight_gradient)
    twice = linear_casts(
        recipe,
        recipe.matmul_formats,
        replace(own, tokens=2 * tokens, local_input_tokens=2 * tokens, local_gradient_tokens=2 * tokens),
    )
    more = (*twice.forward, *twice.backward, *twice.weight_gradient)
    of_tokens = [pair for pair in zip(every, more, strict=True) if "weight" not in pair[0].name]
    assert all(two.bytes == 2 * one.bytes for one, two in of_tokens)
    assert all(kernel.launches >= 1 and kernel.flops == 0.0 for kernel in every)


def test_a_finer_scale_never_means_fewer_bytes_of_scales() -> None:
    """Bits beside the number itself, by how many numbers have one in common."""
    scales = {DType.FP8: 0.0, DType.FP8_BLOCKWISE: 32 / 128, DType.MXFP8: 8 / 32}
    assert {scale: scale.bits - 8 for scale in scales} == scales
    assert DType.NVFP4.bits - 4 >= DType.MXFP8.bits - 8


def test_a_cast_without_reads_or_copies_is_no_kernel() -> None:
    assert OperandCast(0, 1).rowwise_only.launch_count == 0


def test_tokens_that_travel_narrow_are_cast_before_and_once_more_behind() -> None:
    """Two of eight experts on each of four ranks, top-2: T tokens become 2 T rows, spread over the ranks.

    Before the way T tokens are read and written once by rows; of the 2 T rows that come a copy by columns is made.
    """
    recipe = replace(load_recipe("fp8-blockwise"), dispatch_format=DType.FP8_BLOCKWISE)
    routed = MoeMlp(8, 2, 256, MlpType.SWIGLU)
    spec = LayerSpec(None, routed)
    found = layer_of(MODEL, spec, Training(T, 1, recipe=recipe), LayerShard(1, T, T, ep=4))
    casts = {kernel.name: kernel for kernel in kernels(found.operators) if kernel.kind is KernelKind.CAST}
    width = DType.FP8_BLOCKWISE.bytes
    assert casts["experts.up.cast_input"].bytes == T * H * (2 + width)
    assert casts["experts.up.transpose_input_again"].bytes == 2 * T * H * 2 * width
    assert casts["experts.down.cast_output_gradient"].bytes == T * H * (2 + width)
    assert casts["experts.down.transpose_output_gradient"].bytes == 2 * T * H * 2 * width
    assert casts["experts.down.cast_input"].bytes == 2 * T * 256 * (2 + 2 * width)
    layout = Layout(dp=4, ep=4)
    sent = TokenDispatch(layout, routed, T, 2.0 * H, DType.BF16, wire_format=DType.FP8_BLOCKWISE)
    plain = replace(sent, wire_format=None)
    rows = {dispatch_op.name: dispatch_op.payload for dispatch_op in sent.dispatch_ops()}["dispatch tokens"]
    assert rows == {comm_op.name: comm_op.payload for comm_op in plain.dispatch_ops()}["dispatch tokens"] * width / 2
    assert sent.combine_ops() == plain.combine_ops()
