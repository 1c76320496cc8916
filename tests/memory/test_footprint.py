"""Memory that is allocated for the full step."""

from dataclasses import replace
from functools import partial

import pytest

from clustersim.common.dtypes import DType
from clustersim.memory.footprint import MemoryCategory
from clustersim.model.framework import Framework
from clustersim.model.framework_files import load_framework
from clustersim.model.optimizers import Muon, Optimizer
from clustersim.model.overheads import NO_OVERHEADS, Accumulation
from clustersim.model.precision_recipe import PrecisionRecipe, mixed_precision
from clustersim.model.presets import load_preset
from clustersim.model.training import Training
from clustersim.model.transformer import layer_parameter_count, parameter_count
from clustersim.parallel.data_parallel_strategy import (
    DataParallelStrategy,
    DdpStrategy,
    FullyShard,
    NaiveDataParallel,
    ReductionFrequency,
    Zero1,
    Zero2,
)
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.program.placement import looped_placement
from tests.memory.rank_memory import rank_ledger, resident_bytes

LLAMA = load_preset("llama3-8b")
TRAINING = Training(8192, 8)
WITH_BUFFERS = Framework(1.0, 5e8)


def llama_plan(layout: Layout, training: Training = TRAINING) -> Plan:
    return Plan(LLAMA, training, layout)


@pytest.mark.parametrize("name", ["llama3-8b", "gpt2-small", "gpt3-175b"])
@pytest.mark.parametrize("layout", [Layout(), Layout(pp=4), Layout(tp=4), Layout(tp=2, pp=2)])
def test_memory_and_lowering_count_the_same_parameters(name: str, layout: Layout) -> None:
    plan = Plan(load_preset(name), Training(1024, 8), layout)
    for rank in range(layout.pp):
        held = sum(plan.parameter_count(stage) for stage in plan.stages_on_rank(rank))
        assert resident_bytes(plan, rank)[MemoryCategory.PARAMETERS] == 2 * held


@pytest.mark.parametrize(
    ("optimizer", "precision", "width"),
    [
        (Optimizer.ADAM, mixed_precision(), 12),  # fp32 master weight and two moments
        (Optimizer.SGD, mixed_precision(), 8),  # fp32 master weight and momentum
        (Optimizer.ADAM, mixed_precision(compute=DType.FP32, master=None), 8),
        (Optimizer.ADAM, mixed_precision(moments=DType.BF16), 8),
    ],
)
def test_optimizer_state_per_parameter(optimizer: Optimizer, precision: PrecisionRecipe, width: int) -> None:
    held = resident_bytes(llama_plan(Layout(), replace(TRAINING, optimizer=optimizer, recipe=precision)))
    assert held[MemoryCategory.OPTIMIZER] == width * parameter_count(LLAMA)


def test_replicas_are_data_and_context_parallel_ranks() -> None:
    """ZeRO shards over dp x cp: both hold the same weights."""
    held = resident_bytes(llama_plan(Layout(dp=2, cp=4, data=Zero1())))
    assert held[MemoryCategory.OPTIMIZER] == 12 * parameter_count(LLAMA) / 8


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_zero_3_holds_the_largest_adjacent_gathered_units_and_one_gradient(prefetch: int) -> None:
    """Head (final norm and 128,256 x 4,096) and the layers before it; bf16 weights, fp32 gradients of the head.

    The embedding is at the other end: it is freed long before the head is gathered.
    """
    head = LLAMA.vocab * LLAMA.hidden + LLAMA.hidden
    units = [head, *[layer_parameter_count(LLAMA, *LLAMA.distinct_specs)] * 32][: prefetch + 1]
    held = resident_bytes(llama_plan(Layout(dp=8, data=FullyShard(prefetch=prefetch))))
    assert held[MemoryCategory.GATHERED] == 2 * sum(units) + 4 * head


def test_zero_3_keeps_parameters_for_their_next_use_and_a_bucket() -> None:
    """DeepSpeed's live parameters instead of two units of 0.5 and 0.2 billion, and 1 GB for reductions."""
    plan, head = llama_plan(Layout(dp=8, data=FullyShard())), LLAMA.vocab * LLAMA.hidden + LLAMA.hidden
    deepspeed = replace(WITH_BUFFERS, zero3_bucket_bytes=1e9, zero3_live_bytes=2e9)
    assert resident_bytes(plan, framework=deepspeed)[MemoryCategory.GATHERED] == 2e9 + 1e9 + 4 * head


def test_without_resharding_zero_3_holds_all_weights() -> None:
    held = resident_bytes(llama_plan(Layout(dp=8, data=FullyShard(reshard_after_forward=False))))
    head = LLAMA.vocab * LLAMA.hidden + LLAMA.hidden
    assert held[MemoryCategory.GATHERED] == 2 * parameter_count(LLAMA) + 4 * head


@pytest.mark.parametrize("data", [Zero2(), FullyShard()])
def test_gradients_and_gathered_weights_stay_unsharded_in_a_pipeline(data: DataParallelStrategy) -> None:
    """Gradients are summed unsharded until the last of several microbatches; FSDP's weights stay gathered."""
    held = resident_bytes(llama_plan(Layout(dp=8, pp=2, data=data), replace(TRAINING, global_batch=16)))
    on_first = LLAMA.vocab * LLAMA.hidden + 16 * layer_parameter_count(LLAMA, *LLAMA.distinct_specs)
    at_peak = rank_ledger(llama_plan(Layout(dp=8, pp=2, data=data), replace(TRAINING, global_batch=16)))
    assert at_peak.peak_by_category()[MemoryCategory.GRADIENTS] == pytest.approx(4 * on_first)
    assert held[MemoryCategory.GRADIENTS] == 4 * on_first / (8 if data.zero_stage == 3 else 1)
    assert held[MemoryCategory.GATHERED] == (2 * on_first if data.zero_stage == 3 else 0)
    assert held[MemoryCategory.PARAMETERS] == 2 * on_first / (8 if data.zero_stage == 3 else 1)
    assert held[MemoryCategory.OPTIMIZER] == 12 * on_first / 8


@pytest.mark.parametrize("data", [DdpStrategy(), Zero1(), Zero2(), FullyShard()])
def test_nothing_is_gathered_without_sharded_weights(data: DataParallelStrategy) -> None:
    layout = Layout(dp=1, data=data) if data == FullyShard() else Layout(dp=8, data=data)
    assert resident_bytes(llama_plan(layout))[MemoryCategory.GATHERED] == 0.0


def test_zero_2_fills_a_bucket_of_unsharded_gradients() -> None:
    """Megatron's rule, 40 M or 1 M per replica, in fp32; never more than all gradients."""
    assert resident_bytes(llama_plan(Layout(dp=8, data=Zero2())))[MemoryCategory.MESSAGES] == 40e6 * 4
    assert resident_bytes(llama_plan(Layout(dp=512, data=Zero2())))[MemoryCategory.MESSAGES] == 512e6 * 4
    assert resident_bytes(llama_plan(Layout(dp=8, data=Zero2(bucket=5e6))))[MemoryCategory.MESSAGES] == 5e6
    assert resident_bytes(llama_plan(Layout(dp=8, data=Zero2(bucket=1e15))))[
        MemoryCategory.MESSAGES
    ] == 4 * parameter_count(LLAMA)
    assert resident_bytes(llama_plan(Layout(dp=8, data=Zero1())))[MemoryCategory.MESSAGES] == 0.0


def test_zero_2_in_a_pipeline_fills_a_bucket_of_a_full_model_chunk() -> None:
    """All but the first pipeline rank's first chunk are one bucket (Megatron-LM), where every microbatch is reduced."""
    plan = llama_plan(Layout(dp=4, pp=2, data=Zero2(reduce=ReductionFrequency.PER_MICROBATCH)))
    messages = 2 * 2 * 8192 * LLAMA.hidden  # an activation and a gradient, bf16
    second_stage = 16 * layer_parameter_count(LLAMA, *LLAMA.distinct_specs) + LLAMA.vocab * LLAMA.hidden + LLAMA.hidden
    assert resident_bytes(plan, 0)[MemoryCategory.MESSAGES] == 40e6 * 4 + messages
    assert resident_bytes(plan, 1)[MemoryCategory.MESSAGES] == 4 * second_stage + messages
    chunks = replace(plan, placement_rule=partial(looped_placement, chunks_per_rank=2))
    assert resident_bytes(chunks, 1)[MemoryCategory.MESSAGES] < 4 * second_stage


@pytest.mark.parametrize("dp", [2, 8])
def test_gradients_that_are_reduced_once_wait_in_the_place_of_their_shard(dp: int) -> None:
    """A step's only microbatch beside a pipeline: bucket and kept shards are the fp32 gradients of the stage."""
    plan = llama_plan(Layout(dp=dp, pp=2, data=Zero2()), replace(TRAINING, global_batch=dp))
    held, messages = resident_bytes(plan, 1), 2 * 2 * 8192 * LLAMA.hidden
    stage = 16 * layer_parameter_count(LLAMA, *LLAMA.distinct_specs) + LLAMA.vocab * LLAMA.hidden + LLAMA.hidden
    bucket_bytes = held[MemoryCategory.MESSAGES] - messages
    assert bucket_bytes == pytest.approx(4 * stage * (1 - 1 / dp))
    assert held[MemoryCategory.GRADIENTS] + bucket_bytes == pytest.approx(4 * stage)


@pytest.mark.parametrize(
    ("layout", "groups"),
    [
        (Layout(), 0),
        (Layout(dp=8), 1),
        (Layout(tp=2, dp=4), 2),
        (Layout(tp=2, cp=2, dp=2), 3),
        (Layout(dp=4, data=NaiveDataParallel()), 1),
    ],
)
def test_each_process_group_has_a_communicators_buffers(layout: Layout, groups: int) -> None:
    assert resident_bytes(llama_plan(layout), framework=WITH_BUFFERS)[MemoryCategory.COMMUNICATION] == groups * 5e8


@pytest.mark.parametrize(("tp", "chunks"), [(1, 1), (2, 1), (2, 2)])
def test_a_pipeline_posts_one_activation_and_gradient_per_virtual_stage(tp: int, chunks: int) -> None:
    """Each 8,192 x 4,096 in bf16, split over tensor ranks."""
    plan = Plan(LLAMA, TRAINING, Layout(tp=tp, pp=2), partial(looped_placement, chunks_per_rank=chunks))
    assert resident_bytes(plan)[MemoryCategory.MESSAGES] == 2 * chunks * 8192 * 4096 * 2 / tp


def test_the_packaged_framework_has_plausible_constants() -> None:
    framework = load_framework()
    assert 1.0 <= framework.fragmentation < 1.2
    assert 1e8 < framework.communicator_bytes < 2e9


def test_the_optimizers_widened_copy_does_not_add_to_activations() -> None:
    recipe = mixed_precision(DType.FP16, gradients=DType.FP16)
    held = [
        resident_bytes(
            llama_plan(
                Layout(dp=4, data=Zero1()),
                replace(TRAINING, recipe=recipe, overheads=replace(NO_OVERHEADS, upcast_gradients=it)),
            )
        )
        for it in (False, True)
    ]
    assert held[0] == held[1]


def test_converted_gradients_are_kept_in_both_formats() -> None:
    held = []
    for accumulation in (Accumulation.ADDED, Accumulation.CONVERTED):
        training = replace(TRAINING, overheads=replace(NO_OVERHEADS, accumulation=accumulation))
        plan = llama_plan(Layout(dp=4), training)
        held.append(resident_bytes(plan)[MemoryCategory.GRADIENTS])
    assert held[1] - held[0] == 2.0 * plan.parameter_count(plan.stages[0])


def test_an_optimizer_in_backward_keeps_the_gradients_of_one_unit() -> None:
    """The output matrix and the final norm in FP32, or an eighth of them; without it all weights."""
    unit = 4096 * 128256 + 4096
    for layout, shards in ((Layout(), 1), (Layout(dp=8, data=FullyShard()), 8)):
        training = replace(TRAINING, microbatch=8 // layout.dp, optimizer_in_backward=True)
        assert resident_bytes(llama_plan(layout, training))[MemoryCategory.GRADIENTS] == 4 * unit / shards
        at_the_end = resident_bytes(llama_plan(layout, replace(training, optimizer_in_backward=False)))
        assert at_the_end[MemoryCategory.GRADIENTS] == 4 * parameter_count(LLAMA) / shards


def test_states_of_muon_are_one_moment_of_layers_and_two_of_the_ends() -> None:
    """FP32: master weights of all, momentum of layers, both of Adam's moments of embedding, output matrix and norm."""
    ends = 2 * 4096 * 128256 + 4096
    held = resident_bytes(llama_plan(Layout(), replace(TRAINING, optimizer=Muon())))
    assert held[MemoryCategory.OPTIMIZER] == 8 * (parameter_count(LLAMA) - ends) + 12 * ends
