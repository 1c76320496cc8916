"""Models whose layers differ: a stack of runs, cut into stages, in parameters, FLOP, operations and memory.

Heads and widths differ from layer to layer as in OpenELM (Mehta et al. 2024, arXiv:2404.14619), and layers lack a part
as in Puzzle's models (Bercovich et al. 2024, arXiv:2411.19146). What a whole stack takes is the sum over its layers of
what models of equal layers take for each of them.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.errors import InputError
from clustersim.lowering.units import Units
from clustersim.memory.activations import Activations
from clustersim.model.flops import token_flops
from clustersim.model.layer_stack import (
    BlockForm,
    DenseMlp,
    FullAttention,
    LayerRun,
    LayerSpec,
    Mlp,
    QkNorm,
    count,
    cut,
)
from clustersim.model.presets import preset
from clustersim.model.training import FullRecompute, NoRecompute, Recompute, SelectiveOperations, Training
from clustersim.model.transformer import Model, parameters, resized
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.program.action import ActionKind

WIDE = LayerSpec(FullAttention(32, 8, 128), DenseMlp(14336, Mlp.SWIGLU))
NARROW = LayerSpec(FullAttention(16, 4, 128), DenseMlp(4096, Mlp.SWIGLU))
ONLY_MLP = LayerSpec(None, DenseMlp(8192, Mlp.GELU))
ONLY_ATTENTION = LayerSpec(FullAttention(32, 8, 128), None)
LOCAL = LayerSpec(
    FullAttention(32, 8, 128, window=256, qk_norm=QkNorm.WHOLE), DenseMlp(14336, Mlp.SWIGLU), BlockForm.SANDWICH
)
BESIDE = LayerSpec(FullAttention(32, 4, 64, rotary=0.0), DenseMlp(8192, Mlp.GELU), BlockForm.PARALLEL_NORMS)
AFTER = LayerSpec(FullAttention(16, 16, 256, rotary=0.5), DenseMlp(8192, Mlp.GELU), BlockForm.POST_NORM)
SPECS = (WIDE, NARROW, ONLY_MLP, ONLY_ATTENTION, LOCAL, BESIDE, AFTER, replace(WIDE, block=BlockForm.PARALLEL))
STACKS = st.lists(st.builds(LayerRun, st.sampled_from(SPECS), st.integers(1, 3)), min_size=1, max_size=4).map(tuple)
RECOMPUTES = st.sampled_from([NoRecompute(), SelectiveOperations(), FullRecompute(), FullRecompute(2)])
LLAMA = preset("llama3-8b")


def stacked(stack: tuple[LayerRun, ...]) -> Model:
    return replace(LLAMA, stack=stack)


@given(STACKS, st.data())
def test_what_is_cut_off_and_what_is_left_are_the_stack(stack: tuple[LayerRun, ...], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, count(stack)))
    halves = (*cut(stack, 0, at), *cut(stack, at, count(stack) - at))
    one_by_one = [[run.spec for run in runs for _ in range(run.count)] for runs in (stack, halves)]
    assert one_by_one[0] == one_by_one[1]
    assert all(run.count for run in halves)


@given(STACKS)
def test_parameters_and_flops_are_sums_over_layers(stack: tuple[LayerRun, ...]) -> None:
    ends = parameters(stacked(()))
    of_layers = sum(run.count * (parameters(stacked((LayerRun(run.spec, 1),))) - ends) for run in stack)
    assert parameters(stacked(stack)) == ends + of_layers
    rest = token_flops(stacked(()), 1024)
    flops = sum(run.count * (token_flops(stacked((LayerRun(run.spec, 1),)), 1024) - rest) for run in stack)
    assert token_flops(stacked(stack), 1024) == pytest.approx(rest + flops)


@given(STACKS, RECOMPUTES, st.sampled_from([1, 2]))
def test_a_stage_runs_each_of_its_layers_as_a_model_of_such_layers_does(
    stack: tuple[LayerRun, ...], recompute: Recompute, tp: int
) -> None:
    plan = Plan(stacked(stack), Training(1024, 1, recompute=recompute), Layout(tp=tp))
    _, *layers, _ = Units(plan).of(plan.stages[0])
    specs = [run.spec for run in stack for _ in range(run.count)]
    for place, (unit, spec) in enumerate(zip(layers, specs, strict=True)):
        again = isinstance(recompute, FullRecompute) and (recompute.layers is None or place < recompute.layers)
        whole = (FullRecompute() if again else NoRecompute()) if isinstance(recompute, FullRecompute) else recompute
        alone = Plan(stacked((LayerRun(spec, 1),)), Training(1024, 1, recompute=whole), Layout(tp=tp))
        _, own, _ = Units(alone).of(alone.stages[0])
        for kind in ActionKind:
            assert unit.operations(kind) == own.operations(kind)
        assert unit.parameters == own.parameters


@given(STACKS, RECOMPUTES)
def test_a_stage_keeps_what_its_layers_keep(stack: tuple[LayerRun, ...], recompute: Recompute) -> None:
    """A layer that is run again as a whole keeps its input, 1024 x 4096 x 2 bytes; others what they keep alone."""
    plan = Plan(stacked(stack), Training(1024, 1, recompute=recompute), Layout())
    (stage,) = plan.stages
    partly = NoRecompute() if isinstance(recompute, FullRecompute) else recompute
    expected = plan.embedding.kept + plan.head.kept
    for run, again, _ in plan.layer_runs(stage):
        alone = Plan(stacked((LayerRun(run.spec, 1),)), Training(1024, 1, recompute=partly), Layout())
        own = Activations(alone).kept(replace(alone.stages[0], has_embedding=False, has_head=False))
        expected += run.count * (1024 * 4096 * 2 if again else own)
    assert Activations(plan).kept(stage) == expected


def test_stages_are_slices_of_the_stack() -> None:
    model = stacked((LayerRun(WIDE, 3), LayerRun(NARROW, 5)))
    plan = Plan(model, Training(1024, 4), Layout(pp=4))
    found = [[(run.spec, run.count) for run in stage.stack] for stage in plan.stages]
    assert found == [[(WIDE, 2)], [(WIDE, 1), (NARROW, 1)], [(NARROW, 2)], [(NARROW, 2)]]


def test_dimensions_of_the_whole_model_change_whatever_its_layers_are() -> None:
    model = stacked((LayerRun(WIDE, 3), LayerRun(NARROW, 5)))
    assert resized(model) == model
    assert resized(model, vocab=1024) == replace(model, vocab=1024)


def test_dimensions_of_layers_change_in_all_of_them_and_layers_are_the_first_ones() -> None:
    model = stacked((LayerRun(WIDE, 3), LayerRun(ONLY_MLP, 5)))
    found = resized(model, layers=4, head_dim=64, ffn=512)
    assert isinstance(WIDE.attention, FullAttention)
    wide = LayerSpec(replace(WIDE.attention, head_dim=64), DenseMlp(512, Mlp.SWIGLU))
    assert found.stack == (LayerRun(wide, 3), LayerRun(LayerSpec(None, DenseMlp(512, Mlp.GELU)), 1))
    with pytest.raises(InputError, match="has 8 layers that differ, so nothing says what 9 would be; at most 8 fits"):
        resized(model, layers=9)
