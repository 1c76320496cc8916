"""Memory of a rank over time."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.memory.activations import Activations
from clustersim.memory.footprint import Footprint, MemoryCategory
from clustersim.memory.ledger import TimedPasses, ledger_from_order, ledger_from_passes, pass_order
from clustersim.model.framework import Framework
from clustersim.model.presets import load_preset
from clustersim.model.training import FullRecompute, NoRecompute, Recompute, SelectiveRecompute, Training
from clustersim.parallel.data_parallel_strategy import (
    DataParallelStrategy,
    DdpStrategy,
    FullyShard,
    NaiveDataParallel,
    Zero1,
    Zero2,
)
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.program.action import Action, ActionKind
from clustersim.program.placement import looped_placement
from clustersim.schedules.breadth_first import BreadthFirst
from clustersim.schedules.gpipe import GPipe
from clustersim.schedules.interleaved import Interleaved
from clustersim.schedules.one_f_one_b import OneFOneB
from clustersim.schedules.schedule import PassCosts, Schedule
from clustersim.schedules.zero_bubble import ZeroBubble
from tests.memory.rank_memory import BARE, rank_ledger, resident_bytes

MODEL = load_preset("gpt3-175b")
F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT  # noqa: E741 - their letters


def pipeline_plan(pp: int, microbatches: int, chunks: int = 1, layout: Layout | None = None) -> Plan:
    chosen_layout = layout or Layout(tp=8, pp=pp)
    return Plan(MODEL, Training(2048, microbatches), chosen_layout, partial(looped_placement, chunks_per_rank=chunks))


@given(pp=st.integers(2, 8), extra=st.integers(0, 8), data=st.data())
def test_1f1b_has_p_minus_r_microbatches_in_flight(pp: int, extra: int, data: st.DataObject) -> None:
    """Narayanan et al. 2021 section 2.2.1: rank r of p keeps p - r microbatches, however many there are."""
    rank = data.draw(st.integers(0, pp - 1))
    plan = pipeline_plan(pp, pp + extra)
    stage, activations = plan.stages[rank], Activations(plan)
    expected = (pp - rank) * activations.saved_bytes(stage) + activations.transient_bytes(stage)
    assert rank_ledger(plan, rank, OneFOneB()).peak_activations == pytest.approx(expected)


@given(microbatches=st.integers(1, 12))
def test_gpipe_has_all_microbatches_in_flight(microbatches: int) -> None:
    plan = pipeline_plan(4, microbatches)
    activations = Activations(plan)
    expected = microbatches * activations.saved_bytes(plan.stages[1]) + activations.transient_bytes(plan.stages[1])
    assert rank_ledger(plan, 1, GPipe()).peak_activations == pytest.approx(expected)


@pytest.mark.parametrize(("pp", "chunks"), [(4, 2), (8, 3), (4, 6), (8, 2)])
def test_interleaving_costs_a_factor_on_the_first_stage(pp: int, chunks: int) -> None:
    """Korthikanti et al. 2022 section 4.2.3: L (1 + (p - 1)/(p m)) layers' activations for m chunks.

    The first rank runs m p + p - 1 chunk-forwards before its first backward ends: 2 (p - 1) + (m - 1) p of warm-
    up and one more; each is L/(p m) layers. Counted here on ranks without embedding, whose passes are equal:
    rank r has 2 r fewer in flight, so r = 1 with p m + p - 3 is used instead.
    """
    plan = pipeline_plan(pp, 2 * pp, chunks)
    activations = Activations(plan)
    (kept_bytes,) = {activations.saved_bytes(stage) for stage in plan.stages_on_rank(1)}
    (transient_bytes,) = {activations.transient_bytes(stage) for stage in plan.stages_on_rank(1)}
    in_flight = (rank_ledger(plan, 1, Interleaved(chunks)).peak_activations - transient_bytes) / kept_bytes
    assert in_flight + 2 == pytest.approx(pp * chunks * (1 + (pp - 1) / (pp * chunks)))


def test_the_first_rank_holds_figure_1s_factor_of_layers() -> None:
    """Figure 1's 530B model, p 35, m 3, 105 layers: L (1 + 34/105) = 139 layers on the first rank.

    Without dropout the embedding keeps only its token ids, eight bytes each.
    """
    model = replace(load_preset("megatron-530b"), dropout=False)
    plan = Plan(
        model,
        Training(2048, 280),
        Layout(tp=8, pp=35, sequence_parallel=True),
        partial(looped_placement, chunks_per_rank=3),
    )
    activations, layer = Activations(plan), plan.stages[1]
    held_layers = (
        rank_ledger(plan, 0).peak_activations - activations.transient_bytes(layer)
    ) / activations.saved_bytes(layer)
    assert held_layers == pytest.approx(105 * (1 + 34 / 105), rel=1e-3)


def test_ledger_times_are_those_of_the_passes() -> None:
    """One microbatch: kept from the forward's start, more during backward, nothing after it."""
    plan = pipeline_plan(1, 1, layout=Layout(tp=8))
    activations, (stage,) = Activations(plan), plan.stages
    passes = TimedPasses([Action(0, F, 0), Action(0, B, 0)], np.array([[1.0, 2.0], [5.0, 9.0]]))
    timeline = ledger_from_passes(Footprint(plan, BARE, 0.0), activations, 0, passes)
    kept_bytes, transient_bytes = activations.saved_bytes(stage), activations.transient_bytes(stage)
    assert timeline.times.tolist() == [1.0, 5.0, 9.0]
    assert timeline.activations.tolist() == pytest.approx([kept_bytes, kept_bytes + transient_bytes, 0.0], abs=1e-3)


def test_ended_passes_are_freed_before_passes_that_start_at_the_same_time() -> None:
    plan = pipeline_plan(1, 2, layout=Layout(tp=8))
    alternating = [Action(0, F, 0), Action(0, B, 0), Action(0, F, 1), Action(0, B, 1)]
    timeline = ledger_from_order(Footprint(plan, BARE, 0.0), Activations(plan), 0, pass_order(alternating))
    one_microbatch = Activations(plan).saved_bytes(plan.stages[0]) + Activations(plan).transient_bytes(plan.stages[0])
    assert timeline.peak_activations == pytest.approx(one_microbatch)


@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(0.5, 4.0)), min_size=16, max_size=16))
def test_the_peak_does_not_depend_on_pass_durations(times: list[tuple[float, float]]) -> None:
    """One stream: a pass starts when the previous one has ended, or some time later."""
    plan = pipeline_plan(4, 8)
    actions, bounds, now = OneFOneB().order(4, 8)[0], [], 0.0
    for gap, length in times:
        bounds.append((now + gap, now + gap + length))
        now = bounds[-1][1]
    footprint, activations = Footprint(plan, BARE, 0.0), Activations(plan)
    timed = ledger_from_passes(footprint, activations, 0, TimedPasses(actions, np.array(bounds))).peak
    assert timed == pytest.approx(ledger_from_order(footprint, activations, 0, pass_order(actions)).peak)


@pytest.mark.parametrize("chunks", [1, 2])
def test_memory_is_never_negative_and_empty_at_the_end(chunks: int) -> None:
    plan = pipeline_plan(4, 8, chunks)
    for rank in range(4):
        timeline = rank_ledger(plan, rank)
        scale = timeline.peak_activations
        assert (timeline.activations > -1e-9 * scale).all()
        assert abs(timeline.activations[-1]) < 1e-9 * scale
        assert (np.diff(timeline.times) >= 0).all()


def test_categories_at_the_peak_sum_to_the_peak() -> None:
    plan = pipeline_plan(2, 4)
    timeline = rank_ledger(plan, 0, framework=Framework(1.07, 5e8))
    assert sum(timeline.peak_by_category().values()) == pytest.approx(timeline.peak)
    assert set(timeline.peak_by_category()) == set(MemoryCategory)


def test_fragmentation_applies_only_to_allocator_memory() -> None:
    """The driver's context and the communication library's buffers are not the allocator's."""
    plan = pipeline_plan(2, 4)
    bare, padded = (
        ledger_from_order(
            Footprint(plan, Framework(factor, 5e8), 1e9), Activations(plan), 0, pass_order(OneFOneB().order(2, 4)[0])
        )
        for factor in (1.0, 1.05)
    )
    outside_allocator = bare.resident[MemoryCategory.CONTEXT] + bare.resident[MemoryCategory.COMMUNICATION]
    assert bare.resident[MemoryCategory.CONTEXT] == 1e9
    assert padded.peak - bare.peak == pytest.approx(0.05 * (bare.peak - outside_allocator))
    assert padded.peak_by_category()[MemoryCategory.FRAGMENTATION] == pytest.approx(
        0.05 * (bare.peak - outside_allocator)
    )


def _sharded_plan(data: DataParallelStrategy, microbatches: int, chunks: int) -> Plan:
    layout = Layout(tp=8, pp=4, dp=8, sequence_parallel=True, data=data)
    training = Training(2048, 8 * microbatches)
    return Plan(MODEL, training, layout, partial(looped_placement, chunks_per_rank=chunks))


def _gradient_bytes(plan: Plan, rank: int) -> list[float]:
    return [4.0 * plan.parameter_count(stage) for stage in plan.stages_on_rank(rank)]


@pytest.mark.parametrize("schedule", [BreadthFirst(4), Interleaved(4)], ids=["bfs", "interleaved, one round"])
@pytest.mark.parametrize("rank", [1, 2])
def test_fsdp_holds_one_stages_gradients_where_stages_run_backward_in_turn(schedule: Schedule, rank: int) -> None:
    """Activations are fullest in the first backward, when only its stage has gradients; ZeRO-1 has all for good."""
    fsdp, zero1 = (_sharded_plan(data, 4, 4) for data in (FullyShard(), Zero1()))
    (stage_bytes,) = set(_gradient_bytes(fsdp, rank))
    at_peak = [rank_ledger(plan, rank, schedule).peak_by_category() for plan in (fsdp, zero1)]
    assert at_peak[0][MemoryCategory.ACTIVATIONS] == pytest.approx(at_peak[1][MemoryCategory.ACTIVATIONS])
    assert at_peak[1][MemoryCategory.GRADIENTS] == pytest.approx(4 * stage_bytes)
    assert at_peak[0][MemoryCategory.GRADIENTS] == pytest.approx(stage_bytes * (1 + 3 / 8))


@given(microbatches=st.integers(2, 9), rank=st.integers(0, 3))
def test_unreduced_gradients_of_fsdp_are_bounded_by_all_of_a_rank_and_one_unit(microbatches: int, rank: int) -> None:
    """From nothing to all of a rank's stages and one reduction buffer; in the end what is left is the buffer."""
    plan = _sharded_plan(FullyShard(), microbatches, 1)
    ledger = rank_ledger(plan, rank, OneFOneB())
    unreduced, buffer = (
        7 / 8 * sum(_gradient_bytes(plan, rank)),
        4.0 * max(unit.parameter_count for stage in plan.stages_on_rank(rank) for unit in plan.stage_units(stage)),
    )
    assert ledger.unreduced_gradients[0] == 0.0
    assert ledger.unreduced_gradients.max() == pytest.approx(unreduced + buffer)
    assert ledger.unreduced_gradients[-1] == pytest.approx(buffer)
    assert ledger.peak == pytest.approx(ledger.over_time()[1].sum(axis=0).max())


@pytest.mark.parametrize("data", [DdpStrategy(), Zero1(), Zero2()])
def test_gradient_buffers_of_other_strategies_stay_for_the_whole_step(data: DataParallelStrategy) -> None:
    ledger = rank_ledger(_sharded_plan(data, 4, 1), 1, OneFOneB())
    assert not ledger.unreduced_gradients.any()


def test_torch_data_parallel_gathers_all_logits_on_the_first_gpu() -> None:
    """torch.nn.DataParallel gathers three other GPUs' logits: bf16, and fp32 for the loss."""
    model = load_preset("gpt2-small")
    layout = Layout(dp=4, data=NaiveDataParallel())
    data_parallel, single_gpu = Plan(model, Training(1024, 4), layout), Plan(model, Training(1024, 1), Layout())
    additional_bytes = rank_ledger(data_parallel).peak_activations - rank_ledger(single_gpu).peak_activations
    assert additional_bytes == pytest.approx(3 * 1024 * 50257 * 6)


def test_recomputation_reduces_kept_activations() -> None:
    none, full = (
        rank_ledger(Plan(MODEL, Training(2048, 8, recompute=recompute), Layout(tp=8, pp=8)))
        for recompute in (Training(1, 1).recompute, FullRecompute())
    )
    assert full.peak_activations < none.peak_activations / 4
    assert full.resident == none.resident == resident_bytes(pipeline_plan(8, 8))


@given(pp=st.integers(2, 8), extra=st.integers(0, 16), memory=st.integers(1, 2), data=st.data())
def test_zero_bubble_keeps_p_or_2p_microbatches(pp: int, extra: int, memory: int, data: st.DataObject) -> None:
    """With equal costs every microbatch counts fully until its weight gradients: rank r holds at least p - r."""
    rank = data.draw(st.integers(0, pp - 1))
    plan = pipeline_plan(pp, pp + extra)
    stage, activations = plan.stages[rank], Activations(plan)
    peak = rank_ledger(plan, rank, ZeroBubble(memory)).peak_activations
    assert peak >= (pp - rank) * activations.saved_bytes(stage)
    assert peak <= memory * pp * activations.saved_bytes(stage) + activations.transient_bytes(stage)


@pytest.mark.parametrize("recompute", [NoRecompute(), SelectiveRecompute(), FullRecompute(), FullRecompute(2)])
def test_split_backward_frees_activations_in_two_stages(recompute: Recompute) -> None:
    plan = Plan(MODEL, Training(2048, 1, recompute=recompute), Layout(tp=8, pp=4))
    activations = Activations(plan)
    for stage in plan.stages:
        turns = pass_order([Action(stage.index, kind, 0) for kind in (F, I, W)])
        timeline = ledger_from_order(Footprint(plan, BARE, 0.0), activations, stage.index, turns)
        kept_bytes, deferred_bytes = activations.saved_bytes(stage), activations.wgrad_bytes(stage)
        transient_bytes = activations.transient_bytes(stage, I), activations.transient_bytes(stage, W)
        expected = [
            kept_bytes,
            kept_bytes + transient_bytes[0],
            deferred_bytes,
            deferred_bytes + transient_bytes[1],
            0.0,
        ]
        assert timeline.activations.tolist() == pytest.approx(expected, abs=1.0)


def test_deferred_weight_gradients_hold_more_than_full_recomputation_keeps() -> None:
    """A layer's input is 2 s b h bytes of the 32 s b h that its weight gradients need again."""
    plan = Plan(MODEL, Training(2048, 4, recompute=FullRecompute()), Layout(pp=4))
    activations, stage = Activations(plan), plan.stages[1]
    assert activations.wgrad_bytes(stage) == 16 * activations.saved_bytes(stage)
    min_bytes = activations.wgrad_bytes(stage) - activations.saved_bytes(stage)
    assert activations.transient_bytes(stage, I) >= min_bytes * (stage.layer_count - 1) / stage.layer_count


@pytest.mark.parametrize("memory", [1, 2])
def test_zero_bubble_exceeds_its_memory_limit_by_at_most_one_microbatch(memory: int) -> None:
    """Llama 3 405B, tp 8 with sequence parallelism, pp 16: deferred weight gradients hold more than was kept.

    In units of s b h / t elements a layer keeps 16 (two norms' inputs, q and k, attention's, 6.5 + 3.25 of a
    SwiGLU with ffn 3.25 h, as the terms of `Activations.saved_bytes` add up) while the gradients of its two row-
    parallel outputs are already 2 t = 16 when deferred. So the kept bytes of p microbatches bound a rank only if
    weight gradients run early: at most (memory p - 1) kept + deferred, and transient bytes.
    """
    plan = Plan(load_preset("llama3-405b"), Training(8192, 40), Layout(tp=8, pp=16, sequence_parallel=True))
    activations = Activations(plan)
    max_kept = max(map(activations.saved_bytes, plan.stages))
    max_deferred = max(map(activations.wgrad_bytes, plan.stages))
    max_transient = max(activations.transient_bytes(stage, kind) for stage in plan.stages for kind in (I, W))
    assert max_deferred > 1.5 * max_kept
    deferred_ratio = sum(map(activations.wgrad_bytes, plan.stages)) / sum(map(activations.saved_bytes, plan.stages))
    order = ZeroBubble(memory, PassCosts(pending_memory_ratio=deferred_ratio))
    peaks = [rank_ledger(plan, rank, order).peak_activations for rank in range(16)]
    assert max(peaks) <= (16 * memory - 1) * max_kept + max_deferred + max_transient
