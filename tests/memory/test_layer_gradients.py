"""Gradients of activations in a layer's backward."""

from dataclasses import replace

import pytest

from clustersim.memory.layer_gradients import activation_gradient_bytes
from clustersim.model.presets import load_preset
from clustersim.model.training import AttentionBackend, Training
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan

MODEL = load_preset("llama3-8b")
TOKENS, HIDDEN, KEYS = 4096, 4096, 1024


@pytest.mark.parametrize(("backend", "kept"), [(AttentionBackend.FLASH, 1), (AttentionBackend.STANDARD, 0)])
def test_flash_attentions_output_stays_until_its_own_backward(backend: AttentionBackend, kept: int) -> None:
    """Of an attention layer alone: gradients of the output, of queries, keys and values, and of the residual stream.

    The linear layer behind it has freed the output by then, unless attention's backward reads that; before, it has two
    gradients itself.
    """
    plan = Plan(MODEL, Training(TOKENS, 1, attention=backend), Layout())
    layer = plan.layer_by_spec[MODEL.distinct_specs[0]]
    attention = tuple(operator for operator in layer.operators if operator.name.startswith("attention."))
    elements = max(HIDDEN + (HIDDEN + 2 * KEYS) - HIDDEN + kept * HIDDEN, 2 * HIDDEN) + HIDDEN
    measured = activation_gradient_bytes(replace(layer, operators=attention), 2)
    assert measured == pytest.approx(2 * TOKENS * elements)
