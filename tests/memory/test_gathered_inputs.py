"""Memory of tensor parallelism whose autograd keeps gathered inputs (DTensor, nanotron)."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.memory.activations import ActivationKind, Activations
from clustersim.model.overheads import Overheads
from clustersim.model.presets import load_preset
from clustersim.model.training import FullRecompute, NoRecompute, Recompute, Training
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan

MODEL = load_preset("llama3-8b")
SEQUENCE = 4096


def activations(
    tp: int, *, gathered: bool, recompute: Recompute | None = None, sequence_parallel: bool = True
) -> Activations:
    training = Training(
        SEQUENCE, 1, recompute=recompute or NoRecompute(), overheads=Overheads(keeps_gathered_inputs=gathered)
    )
    return Activations(Plan(MODEL, training, Layout(tp=tp, sequence_parallel=sequence_parallel)))


@given(tp=st.sampled_from([2, 4, 8]))
def test_a_layer_keeps_two_gathered_inputs_and_the_head_one(tp: int) -> None:
    """Queries, keys and values read one tensor of s b h elements, gate and up another; 1 / tp of each otherwise."""
    kept, regathered = (activations(tp, gathered=gathered) for gathered in (True, False))
    (spec,), full = MODEL.distinct_specs, 2 * SEQUENCE * MODEL.hidden
    more = {
        kind: kept.bytes_of(kind, layer_spec) - regathered.bytes_of(kind, layer_spec)
        for kind, layer_spec in ((ActivationKind.LAYER_SAVED, spec), (ActivationKind.HEAD_SAVED, None))
    }
    assert more[ActivationKind.LAYER_SAVED] == pytest.approx(2 * full * (tp - 1) / tp)
    assert more[ActivationKind.HEAD_SAVED] == pytest.approx(full * (tp - 1) / tp)


@given(tp=st.sampled_from([2, 4, 8]))
def test_gradients_of_a_gathered_input_are_full_tensors(tp: int) -> None:
    """Those of gate and of up and their sum, when 3 f / t saved elements and 2 f / t gradients of 2 f / t are freed.

    Or less: in the MLP's activation 3 f / t, of which f / t is freed; in its last matmul h + f / t. Beside the h / t
    of the residual stream.
    """
    (spec,), hidden, ffn = MODEL.distinct_specs, MODEL.hidden, 14336 / tp
    kept = activations(tp, gathered=True, recompute=FullRecompute())
    elements = max(3 * hidden + 2 * ffn - 3 * ffn, 2 * ffn, hidden + ffn) + hidden / tp
    assert kept.bytes_of(ActivationKind.LAYER_GRADIENTS, spec) == 2 * SEQUENCE * elements
    stage = replace(kept.plan.stages[0], has_embedding=False, has_head=False)
    regathered = activations(tp, gathered=False, recompute=FullRecompute())
    assert kept.transient_bytes(stage) >= regathered.transient_bytes(stage) + 4 * SEQUENCE * hidden * (tp - 1) / tp
    assert kept.saved_bytes(stage) == regathered.saved_bytes(stage)


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (4, False)])
def test_nothing_is_gathered_without_sequence_parallelism(tp: int, sequence_parallel: bool) -> None:
    kept, regathered = (
        activations(tp, gathered=gathered, sequence_parallel=sequence_parallel) for gathered in (True, False)
    )
    stage = kept.plan.stages[0]
    assert kept.saved_bytes(stage) == regathered.saved_bytes(stage)
    assert kept.transient_bytes(stage) == regathered.transient_bytes(stage)
