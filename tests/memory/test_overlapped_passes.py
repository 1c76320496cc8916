"""Memory of a forward and a backward that are interleaved layer by layer."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim import Scenario, check
from clustersim.build import build_plan
from clustersim.memory.activations import ActivationKind, Activations
from clustersim.memory.footprint import Footprint
from clustersim.memory.ledger import TimedPasses, ledger_from_order, ledger_from_passes, pass_order
from clustersim.memory.overlapped_passes import overlapped_peak
from clustersim.model.presets import load_preset
from clustersim.model.training import FullRecompute, NoRecompute, Recompute, Training
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.program.action import Action, ActionKind, OverlappedPair
from clustersim.program.placement import looped_placement
from clustersim.schedules.interleaved import Interleaved
from clustersim.schedules.one_f_one_b import OneFOneB
from clustersim.schedules.overlapped_1f1b import Overlapped1F1B
from tests.memory.rank_memory import BARE, rank_ledger

MODEL = load_preset("gpt3-175b")
OVERLAPPING = Layout(tp=8, pp=4, overlap_moe_expert_parallel_comm=True)

SAVE_ALL = NoRecompute()


def overlapped_plan(recompute: Recompute = SAVE_ALL, layout: Layout = OVERLAPPING) -> Plan:
    placement = partial(looped_placement, chunks_per_rank=2)
    return Plan(MODEL, Training(2048, 8, recompute=recompute), layout, placement)


@pytest.mark.parametrize("recompute", [SAVE_ALL, FullRecompute()])
def test_one_layer_is_held_beside_the_backward_that_frees_as_much(recompute: Recompute) -> None:
    """Between two equal stages of L layers the forward's layer i takes the place of the backward's layer L - i."""
    activations = Activations(overlapped_plan(recompute))
    first, second = activations.plan.stages[1], activations.plan.stages[5]
    layer = activations.saved_bytes(first) / first.layer_count
    expected = layer + activations.transient_bytes(first)
    assert overlapped_peak(activations, first, second) == pytest.approx(expected)


def test_overlapped_interleaving_holds_one_more_chunk_and_one_layer() -> None:
    """Rank r of p has 2 (p - r - 1) + (m - 1) p warm-up forwards, one more to overlap, and no whole chunk beside it."""
    plan = overlapped_plan()
    activations, stage = Activations(plan), plan.stages[1]
    warmup = 2 * (4 - 1 - 1) + (2 - 1) * 4
    peak = rank_ledger(plan, 1, Overlapped1F1B(Interleaved(2))).peak_activations
    held = (peak - activations.transient_bytes(stage)) / activations.saved_bytes(stage)
    assert held == pytest.approx(warmup + 1 + 1 / stage.layer_count)


@given(forward=st.integers(0, 7), backward=st.integers(0, 7), full=st.booleans())
def test_an_overlapped_pair_needs_no_more_than_the_two_in_sequence(forward: int, backward: int, full: bool) -> None:
    activations = Activations(overlapped_plan(FullRecompute() if full else SAVE_ALL))
    first, second = activations.plan.stages[forward], activations.plan.stages[backward]
    peak = overlapped_peak(activations, first, second)
    assert peak >= activations.saved_bytes(first) - activations.saved_bytes(second)
    assert peak >= activations.saved_bytes(first) / (2 + first.layer_count)
    restored = max(activations.transient_bytes(second), activations.transient_bytes(activations.plan.stages[1]))
    assert peak <= activations.saved_bytes(first) + restored + MODEL.vocab * MODEL.hidden * 2


def test_pairs_that_run_in_sequence_hold_both_microbatches() -> None:
    plan = overlapped_plan(layout=replace(OVERLAPPING, overlap_moe_expert_parallel_comm=False))
    activations, stage = Activations(plan), plan.stages[1]
    pair = OverlappedPair(Action(1, ActionKind.FORWARD, 1), Action(1, ActionKind.BACKWARD, 0))
    entries = [Action(1, ActionKind.FORWARD, 0), pair, Action(1, ActionKind.BACKWARD, 1)]
    peak = ledger_from_order(Footprint(plan, BARE, 0.0), activations, 1, pass_order(entries)).peak_activations
    assert peak == pytest.approx(2 * activations.saved_bytes(stage) + activations.transient_bytes(stage))


def test_a_simulated_overlap_has_the_peak_of_its_order() -> None:
    plan = overlapped_plan()
    footprint, activations = Footprint(plan, BARE, 0.0), Activations(plan)
    entries = Overlapped1F1B(Interleaved(2)).order(4, 8)[1]
    actions, bounds = [], []
    for start, entry in enumerate(entries):
        both = (entry,) if isinstance(entry, Action) else (entry.backward, entry.forward)
        actions += both
        bounds += [(start + delay, start + 0.8 + delay) for delay in (0.0, 0.1)[: len(both)]]
    timed = ledger_from_passes(footprint, activations, 1, TimedPasses(actions, np.array(bounds)))
    assert timed.peak == pytest.approx(ledger_from_order(footprint, activations, 1, pass_order(entries)).peak)
    assert timed.activations[-1] == pytest.approx(0.0, abs=1.0)


@pytest.mark.parametrize(("vocab", "layers"), [(1024, 16), (200_000, 4)])
def test_without_a_pipeline_the_head_or_one_layer_is_the_most(vocab: int, layers: int) -> None:
    """Of m microbatches one is held. The head's backward begins with all of it; later a layer takes its place.

    The forward's first layer is saved while the backward's last one computes, when the head is freed already; so at
    most L layers with the head and its temporaries are held, or L + 1 layers with those of one, and no second
    microbatch.
    """
    model = {"layers": layers, "hidden": 1024, "heads": 16, "vocab": vocab, "ffn": 4096}
    training = {"sequence": 2048, "global_batch": 8}
    mapping = {"model": model, "cluster": {"name": "dgx-h100", "gpus": 1}, "training": training, "framework": "ideal"}
    plan = build_plan(Scenario.from_mapping(mapping))
    plan = replace(plan, layout=replace(plan.layout, overlap_moe_expert_parallel_comm=True))
    activations, (stage,) = Activations(plan), plan.stages
    (spec,) = plan.layer_by_spec
    embedding, head = map(activations.bytes_of, (ActivationKind.EMBEDDING_SAVED, ActivationKind.HEAD_SAVED))
    layer = (activations.saved_bytes(stage) - embedding - head) / layers
    layer_transient = sum(
        activations.bytes_of(kind, spec)
        for kind in (ActivationKind.LAYER_GRADIENTS, ActivationKind.LAYER_WEIGHT_GRADIENT)
    )
    loss, cast, weight = map(
        activations.bytes_of,
        (ActivationKind.LOSS_GRADIENT, ActivationKind.CAST_GRADIENT, ActivationKind.HEAD_WEIGHT_GRADIENT),
    )
    peak = rank_ledger(plan, 0, Overlapped1F1B(OneFOneB())).peak_activations
    microbatch = activations.saved_bytes(stage)
    at_head, in_layers = max(loss, cast + weight), layer + layer_transient - head
    assert (at_head > in_layers) is (vocab > 100_000)
    pair = embedding + max(at_head, in_layers)
    assert peak == pytest.approx(microbatch + pair)
    assert peak < 2 * microbatch


def test_the_published_peak_of_interleaved_passes() -> None:
    """Qwen3-30B on 16 H100 with Hybrid-EP: 62.166 GiB allocated (case mbskill-qwen30b-hybridep-overlap)."""
    mapping = {
        "model": "qwen3-30b-a3b",
        "cluster": {"name": "dgx-h100", "gpus": 16},
        "layout": {
            "ep": 16, "dispatcher": "hybridep", "data": {"zero": {"stage": 1, "bucket": "megatron"}},
            "overlap_moe_expert_parallel_comm": True,
        },
        "training": {"sequence": 4096, "global_batch": 1024, "overheads": {"router_loss": True}},
        "framework": {"name": "megatron-bridge", "recipe": "performance"},
    }  # fmt: skip
    report = check(Scenario.from_mapping(mapping))
    assert report.peak_memory_bytes / 2**30 == pytest.approx(62.166, rel=0.06)
