"""Gradients that Transformer Engine keeps for autograd, and the compiled loss' copy of the softmax."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.memory.activations import ActivationKind, Activations
from clustersim.memory.footprint import Footprint
from clustersim.model.framework_files import load_framework
from clustersim.model.overheads import Accumulation, Overheads
from clustersim.model.presets import load_preset
from clustersim.model.training import LossImplementation, Training
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan

LLAMA = load_preset("llama3-70b")
HIDDEN, QKV, FFN = 8192, 10240, 28672
SEQUENCE = 4096


def plan(overheads: Overheads, layout: Layout, model: str = "llama3-70b", loss: str = "vocab_parallel") -> Plan:
    training = Training(SEQUENCE, 8, overheads=overheads, loss=LossImplementation(loss))
    return Plan(load_preset(model), training, layout)


def kept_bytes(overheads: Overheads, layout: Layout, model: str = "llama3-70b") -> float:
    footprint = Footprint(plan(overheads, layout, model), load_framework("megatron"), 0.0)
    return footprint.workspace_bytes(footprint.plan.stages) - replace(
        footprint, plan=plan(Overheads(), layout, model)
    ).workspace_bytes(footprint.plan.stages)


@given(tp=st.sampled_from([1, 2, 4, 8]))
def test_one_gradient_of_each_shape_stays_whatever_the_layers(tp: int) -> None:
    keeps = Overheads(keeps_weight_gradients=True, accumulation=Accumulation.FUSED)
    expected = 2 * HIDDEN * (QKV + HIDDEN + 3 * FFN) / tp
    assert kept_bytes(keeps, Layout(tp=tp)) == expected


def test_of_experts_one_gradient_stays() -> None:
    """128 experts of 768 from 2,048; queries, keys and values of 4,096 and 2 x 512; a router."""
    keeps = Overheads(keeps_weight_gradients=True, accumulation=Accumulation.FUSED)
    expected = 2 * 2048 * (4096 + 2 * 512 + 4096 + 128 + 3 * 768)
    assert kept_bytes(keeps, Layout(dp=8, ep=8), "qwen3-30b-a3b") == expected


def test_nothing_stays_where_gradients_are_added() -> None:
    added = Overheads(keeps_weight_gradients=True, accumulation=Accumulation.ADDED)
    assert kept_bytes(added, Layout()) == 0


def test_a_gradient_that_stays_is_not_temporary() -> None:
    fused = Overheads(accumulation=Accumulation.FUSED)
    (spec,) = LLAMA.distinct_specs
    temporary, kept = (
        Activations(plan(overheads, Layout())).bytes_of(ActivationKind.LAYER_WEIGHT_GRADIENT, spec)
        for overheads in (fused, replace(fused, keeps_weight_gradients=True))
    )
    assert (temporary, kept) == (2 * HIDDEN * 2 * FFN, 0)


@given(tp=st.sampled_from([1, 2, 4, 8]))
def test_a_compiled_loss_copies_the_softmax(tp: int) -> None:
    """The gradient in FP32 beside the softmax in FP32; without, it takes the softmax's place."""
    eager, compiled = (
        Activations(plan(Overheads(softmax_copy=copied), Layout(tp=tp))).bytes_of(ActivationKind.LOSS_GRADIENT)
        for copied in (False, True)
    )
    assert compiled - eager == 4 * SEQUENCE * LLAMA.vocab / tp


def test_a_loss_of_one_kernel_copies_nothing() -> None:
    fused, copied = (
        Activations(plan(Overheads(softmax_copy=copied), Layout(), loss="fused")).bytes_of(ActivationKind.LOSS_GRADIENT)
        for copied in (False, True)
    )
    assert fused == copied


@pytest.mark.parametrize(("version", "keeps"), [("23.11", False), ("25.02", False), ("25.04", False), ("25.07", True)])
def test_nemos_releases_have_the_transformer_engine_of_their_day(version: str, keeps: bool) -> None:
    assert load_framework("nemo", version).overheads.keeps_weight_gradients is keeps
