"""Models with different layers: parameters, FLOP, operations and memory of stages of a stack of layer groups.

Heads and widths differ from layer to layer as in OpenELM (Mehta et al. 2024, arXiv:2404.14619), and layers
lack attention or MLP as in Puzzle's models (Bercovich et al. 2024, arXiv:2411.19146). Quantities of a stack
are the sums over its layers of those of models with equal layers.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.errors import InputError
from clustersim.lowering.units import UnitBuilder
from clustersim.memory.activations import Activations
from clustersim.model.attention_spec import FullAttention, QkNorm
from clustersim.model.flops import token_flops
from clustersim.model.layer_stack import BlockForm, DenseMlp, LayerGroup, LayerSpec, MlpType, layer_count, slice_layers
from clustersim.model.presets import load_preset
from clustersim.model.training import FullRecompute, NoRecompute, Recompute, SelectiveOpRecompute, Training
from clustersim.model.transformer import TransformerModel, parameter_count, resize_model
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.program.action import ActionKind
from tests.parallel.operation_listing import comparable_operations

WIDE = LayerSpec(FullAttention(32, 8, 128), DenseMlp(14336, MlpType.SWIGLU))
NARROW = LayerSpec(FullAttention(16, 4, 128), DenseMlp(4096, MlpType.SWIGLU))
ONLY_MLP = LayerSpec(None, DenseMlp(8192, MlpType.GELU))
ONLY_ATTENTION = LayerSpec(FullAttention(32, 8, 128), None)
LOCAL = LayerSpec(
    FullAttention(32, 8, 128, window=256, qk_norm=QkNorm.ALL_HEADS), DenseMlp(14336, MlpType.SWIGLU), BlockForm.SANDWICH
)
PARALLEL_NORMS = LayerSpec(
    FullAttention(32, 4, 64, rotary_percent=0.0), DenseMlp(8192, MlpType.GELU), BlockForm.PARALLEL_NORMS
)
POST_NORM = LayerSpec(FullAttention(16, 16, 256, rotary_percent=0.5), DenseMlp(8192, MlpType.GELU), BlockForm.POST_NORM)
SPECS = (
    WIDE,
    NARROW,
    ONLY_MLP,
    ONLY_ATTENTION,
    LOCAL,
    PARALLEL_NORMS,
    POST_NORM,
    replace(WIDE, block=BlockForm.PARALLEL),
)
STACKS = st.lists(st.builds(LayerGroup, st.sampled_from(SPECS), st.integers(1, 3)), min_size=1, max_size=4).map(tuple)
RECOMPUTES = st.sampled_from([NoRecompute(), SelectiveOpRecompute(), FullRecompute(), FullRecompute(2)])
LLAMA = load_preset("llama3-8b")


def stacked_model(stack: tuple[LayerGroup, ...]) -> TransformerModel:
    return replace(LLAMA, stack=stack)


@given(STACKS, st.data())
def test_slices_of_a_stack_concatenate_to_the_stack(stack: tuple[LayerGroup, ...], data: st.DataObject) -> None:
    split_index = data.draw(st.integers(0, layer_count(stack)))
    halves = (*slice_layers(stack, 0, split_index), *slice_layers(stack, split_index, layer_count(stack) - split_index))
    one_by_one = [[run.spec for run in runs for _ in range(run.count)] for runs in (stack, halves)]
    assert one_by_one[0] == one_by_one[1]
    assert all(run.count for run in halves)


@given(STACKS)
def test_parameters_and_flops_are_sums_over_layers(stack: tuple[LayerGroup, ...]) -> None:
    non_layer_parameters = parameter_count(stacked_model(()))
    stack_parameters = sum(
        run.count * (parameter_count(stacked_model((LayerGroup(run.spec, 1),))) - non_layer_parameters) for run in stack
    )
    assert parameter_count(stacked_model(stack)) == non_layer_parameters + stack_parameters
    non_layer_flops = token_flops(stacked_model(()), 1024)
    stack_flops = sum(
        run.count * (token_flops(stacked_model((LayerGroup(run.spec, 1),)), 1024) - non_layer_flops) for run in stack
    )
    assert token_flops(stacked_model(stack), 1024) == pytest.approx(non_layer_flops + stack_flops)


@given(STACKS, RECOMPUTES, st.sampled_from([1, 2]))
def test_layers_of_a_stage_run_like_those_of_a_uniform_model(
    stack: tuple[LayerGroup, ...], recompute: Recompute, tp: int
) -> None:
    plan = Plan(stacked_model(stack), Training(1024, 1, recompute=recompute), Layout(tp=tp))
    _, *layers, _ = UnitBuilder(plan).stage_units(plan.stages[0])
    specs = [run.spec for run in stack for _ in range(run.count)]
    for index, (unit, spec) in enumerate(zip(layers, specs, strict=True)):
        is_recomputed = isinstance(recompute, FullRecompute) and (recompute.layers is None or index < recompute.layers)
        layer_recompute = (
            (FullRecompute() if is_recomputed else NoRecompute()) if isinstance(recompute, FullRecompute) else recompute
        )
        single_layer_plan = Plan(
            stacked_model((LayerGroup(spec, 1),)), Training(1024, 1, recompute=layer_recompute), Layout(tp=tp)
        )
        _, single_unit, _ = UnitBuilder(single_layer_plan).stage_units(single_layer_plan.stages[0])
        for kind in ActionKind:
            operations = single_unit.operations(kind)
            assert comparable_operations(unit.operations(kind)) == comparable_operations(operations)
        assert unit.parameter_count == single_unit.parameter_count


@given(STACKS, RECOMPUTES)
def test_kept_activations_of_a_stage_sum_over_its_layers(stack: tuple[LayerGroup, ...], recompute: Recompute) -> None:
    """A fully recomputed layer keeps its input, 1024 x 4096 x 2 bytes; others as in a model of equal layers."""
    plan = Plan(stacked_model(stack), Training(1024, 1, recompute=recompute), Layout())
    (stage,) = plan.stages
    layer_recompute = NoRecompute() if isinstance(recompute, FullRecompute) else recompute
    expected = plan.embedding.saved_bytes + plan.head.saved_bytes
    for run, is_recomputed, _ in plan.layer_runs(stage):
        single_layer_plan = Plan(
            stacked_model((LayerGroup(run.spec, 1),)), Training(1024, 1, recompute=layer_recompute), Layout()
        )
        layer_bytes = Activations(single_layer_plan).saved_bytes(
            replace(single_layer_plan.stages[0], has_embedding=False, has_head=False)
        )
        expected += run.count * (1024 * 4096 * 2 if is_recomputed else layer_bytes)
    assert Activations(plan).saved_bytes(stage) == expected


def test_stages_are_slices_of_the_stack() -> None:
    model = stacked_model((LayerGroup(WIDE, 3), LayerGroup(NARROW, 5)))
    plan = Plan(model, Training(1024, 4), Layout(pp=4))
    stage_stacks = [[(run.spec, run.count) for run in stage.stack] for stage in plan.stages]
    assert stage_stacks == [[(WIDE, 2)], [(WIDE, 1), (NARROW, 1)], [(NARROW, 2)], [(NARROW, 2)]]


def test_model_dimensions_can_be_resized_for_mixed_layers() -> None:
    model = stacked_model((LayerGroup(WIDE, 3), LayerGroup(NARROW, 5)))
    assert resize_model(model) == model
    assert resize_model(model, vocab=1024) == replace(model, vocab=1024)


def test_layer_dimensions_change_in_all_layers_and_layers_are_truncated() -> None:
    model = stacked_model((LayerGroup(WIDE, 3), LayerGroup(ONLY_MLP, 5)))
    resized = resize_model(model, layers=4, head_dim=64, ffn=512)
    assert isinstance(WIDE.attention, FullAttention)
    resized_wide = LayerSpec(replace(WIDE.attention, head_dim=64), DenseMlp(512, MlpType.SWIGLU))
    assert resized.stack == (LayerGroup(resized_wide, 3), LayerGroup(LayerSpec(None, DenseMlp(512, MlpType.GELU)), 1))
    with pytest.raises(InputError, match=r"8 layers.*9.*at most 8"):
        resize_model(model, layers=9)
