"""Gradients of experts' rows where PyTorch's product weights what they return."""

import pytest

from clustersim.memory.activations import ActivationKind, Activations
from clustersim.model.overheads import ExpertWeighting, Overheads
from clustersim.model.presets import load_preset
from clustersim.model.training import ALL_FUSED, FusedKernel, Training
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan

MODEL = load_preset("qwen3-30b-a3b")
TOKENS, HIDDEN, TOP_K = 4096, 2048, 8


def layer_gradients(weighting: ExpertWeighting, *fused: FusedKernel) -> float:
    """Bytes of gradients in a layer's backward."""
    training = Training(TOKENS, 1, overheads=Overheads(weighting=weighting), fused=frozenset(fused))
    (spec,) = MODEL.distinct_specs
    return Activations(Plan(MODEL, training, Layout())).bytes_of(ActivationKind.LAYER_GRADIENTS, spec)


@pytest.mark.parametrize(
    ("weighting", "element_bytes"), [(ExpertWeighting.UNCONVERTED_OUTPUT, 2), (ExpertWeighting.EAGER_OUTPUT, 4)]
)
def test_a_product_holds_its_gradient_and_two_products_with_it(weighting: ExpertWeighting, element_bytes: int) -> None:
    """Of rows of 8 experts for each token, when nothing of the layer is freed; and the residual stream's gradient."""
    assert layer_gradients(weighting) == (3 * TOP_K * element_bytes + 2) * TOKENS * HIDDEN


def test_one_kernel_makes_no_products() -> None:
    """Nor do experts that weight their activation."""
    compiled = layer_gradients(ExpertWeighting.UNCONVERTED_OUTPUT, *ALL_FUSED)
    assert compiled == layer_gradients(ExpertWeighting.ACTIVATION, *ALL_FUSED)
    assert compiled < TOP_K * 2 * TOKENS * HIDDEN
