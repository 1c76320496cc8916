"""DDP, ZeRO-1 and ZeRO-2: which collectives are issued, where, and of how many bytes."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from clustersim.model.precision_recipe import mixed_precision
from clustersim.model.presets import load_preset
from clustersim.model.training import Training
from clustersim.model.transformer import parameter_count
from clustersim.parallel.data_parallel_strategy import (
    DataParallelStrategy,
    DdpStrategy,
    FullyShard,
    ReductionFrequency,
    Zero1,
    Zero2,
)
from clustersim.parallel.layout import Layout
from clustersim.program.action import ActionKind
from clustersim.program.program import RankProgram
from clustersim.program.task import CollectiveTask, CollectiveType, ComputeTask, Stream
from tests.lowering.plans import SMALL, TRAINING, collectives, data_words, lowered, planned, told

HUGE = 1e12
PARAMETERS = parameter_count(SMALL)


def program(data: DataParallelStrategy, microbatches: int = 2) -> RankProgram:
    training = replace(TRAINING, global_batch=4 * microbatches, gradient_clipping=False)
    (only,) = lowered(planned(Layout(dp=4, data=data), training)).programs
    return only


def test_ddp_reduces_in_the_last_microbatch_only() -> None:
    """Gradient accumulation: torch's no_sync for all microbatches but the last."""
    assert data_words(program(DdpStrategy(bucket=HUGE), microbatches=3)) == [
        "F0", "B0", "F1", "B1", "F2", "B2", "reduce gradients", "optimizer",
    ]  # fmt: skip


def test_zero_1_gathers_what_the_last_step_updated_and_reduces_at_the_end() -> None:
    assert data_words(program(Zero1(bucket=HUGE))) == [
        "gather parameters", "F0", "B0", "F1", "B1", "reduce gradients", "optimizer",
    ]  # fmt: skip


def test_zero_2_reduces_after_every_microbatch() -> None:
    """A rank keeps its shard of gradients only, so whole ones cannot be accumulated (ZeRO, section 5.2)."""
    assert data_words(program(Zero2(bucket=HUGE))) == [
        "gather parameters", "F0", "B0", "reduce gradients", "F1", "B1", "reduce gradients", "optimizer",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("data", "kinds"),
    [
        (DdpStrategy(overlap=False), [CollectiveType.ALL_REDUCE]),
        (Zero1(overlap=False), [CollectiveType.REDUCE_SCATTER, CollectiveType.ALL_GATHER]),
    ],
)
def test_without_overlap_everything_follows_the_last_backward(
    data: DataParallelStrategy, kinds: list[CollectiveType]
) -> None:
    only = program(data)
    words = data_words(only)
    assert words[:5] == ["F0", "B0", "F1", "B1", "reduce gradients"]
    assert words[5:] == ["optimizer", "gather parameters"][: len(kinds)]
    assert [collective.collective for collective in collectives(only)] == kinds


def test_zero_2_without_overlap_reduces_before_the_next_pass_starts() -> None:
    only = program(Zero2(overlap=False))
    assert data_words(only) == [
        "F0", "B0", "reduce gradients", "F1", "B1", "reduce gradients", "optimizer", "gather parameters",
    ]  # fmt: skip
    assert only.tasks[3].depends_on == (2,)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("make", "reductions", "gathers"),
    [
        (DdpStrategy, 1, 0),
        (lambda **options: Zero1(**options), 1, 1),
        (lambda **options: Zero2(**options), 3, 1),
    ],
)
def test_a_step_communicates_every_parameter_so_many_times(
    make: Callable[..., DataParallelStrategy], reductions: int, gathers: int, overlap: bool
) -> None:
    """Gradients are fp32 (4 bytes), gathered parameters bf16 (2), over three microbatches."""
    sent = collectives(program(make(bucket=10_000.0, overlap=overlap), microbatches=3))
    reduced = sum(comm_op.payload for comm_op in sent if comm_op.collective is not CollectiveType.ALL_GATHER)
    gathered = sum(item.payload for item in sent if item.collective is CollectiveType.ALL_GATHER)
    assert reduced == 4 * PARAMETERS * reductions
    assert gathered == 2 * PARAMETERS * gathers


def test_ddp_buckets_of_25_mb_are_cut_at_the_gradient_that_fills_them() -> None:
    """Llama 3 8B, fp32 gradients: 25 MiB are 6,553,600 elements, so every large matrix fills a bucket by itself.

    Backward completes, per layer: down (14336 x 4096 = 58.7 M), up and gate (117 M), mlp norm with attention out
    (4,096 + 16.8 M), qkv (25.2 M); the attention norm's 4,096 go with the next layer's down matrix. First comes the
    head's logits matrix; then its norm with the first down matrix; last the last norm with the embedding.
    """
    model = load_preset("llama3-8b")
    training = Training(1024, 2, gradient_clipping=False)
    (only,) = lowered(planned(Layout(dp=2), training, model)).programs
    hidden, ffn, vocab, qkv = 4096, 14336, 128256, 4096 + 2 * 1024
    layer = [hidden + hidden * ffn, 2 * hidden * ffn, hidden + hidden * hidden, hidden * qkv]
    expected = [hidden * vocab, *layer * 32, hidden + hidden * vocab]
    assert [collective.payload for collective in collectives(only)] == [4.0 * elements for elements in expected]
    assert sum(expected) == parameter_count(model)


def test_a_bucket_waits_for_the_backward_piece_that_fills_it_and_the_optimizer_for_all() -> None:
    only = program(DdpStrategy(bucket=10_000.0), microbatches=1)
    buckets = [number for number, task in enumerate(only.tasks) if isinstance(task, CollectiveTask)]
    assert len(buckets) > 3
    for number in buckets:
        task, piece = only.tasks[number], only.tasks[number - 1]
        assert isinstance(piece, ComputeTask)
        assert task.depends_on == (number - 1,)
        assert only.streams[number] is Stream.DP
        assert piece.segment.operations[-1].gradient_count > 0
    assert only.tasks[-1].depends_on == tuple(buckets)


def test_backward_in_pieces_is_backward() -> None:
    def backward(data: DataParallelStrategy) -> list[object]:
        tasks = [task for task in program(data, microbatches=1).tasks if isinstance(task, ComputeTask)]
        return [
            operation
            for task in tasks
            if task.action is not None and task.action.kind is ActionKind.BACKWARD
            for operation in task.segment.operations
        ]

    assert backward(DdpStrategy(bucket=10_000.0)) == backward(DdpStrategy(bucket=HUGE))


def test_forward_waits_for_the_parameters_layer_by_layer() -> None:
    """Buckets of whole units: the embedding and the first layers that fill one, the next, ... in forward's order."""
    only = program(Zero1(bucket=100_000.0), microbatches=1)
    gathers = [
        number for number, task in enumerate(only.tasks) if isinstance(task, CollectiveTask) and not task.depends_on
    ]
    forwards = [
        task
        for task in only.tasks
        if isinstance(task, ComputeTask) and task.action is not None and task.action.kind is ActionKind.FORWARD
    ]
    assert len(gathers) == len(forwards) > 2
    assert [task.depends_on for task in forwards] == [(number,) for number in gathers]


def test_later_forwards_do_not_gather_again() -> None:
    words = data_words(program(Zero1(bucket=100_000.0), microbatches=3))
    first = words.index("F1")
    assert "gather parameters" not in words[first:]
    assert words.count("F1") == words.count("F2") == 1


def test_megatrons_bucket_is_40_million_parameters_or_a_million_per_rank() -> None:
    """Megatron-LM, DistributedDataParallelConfig.bucket_size: max(40000000, 1000000 * dp)."""
    model = load_preset("llama3-8b")

    def buckets(dp: int) -> int:
        (only,) = lowered(planned(Layout(dp=dp, data=Zero1()), Training(1024, dp), model)).programs
        return len(
            [collective for collective in collectives(only) if collective.collective is CollectiveType.REDUCE_SCATTER]
        )

    # 8 ranks: out and qkv (42 M) share a bucket, down and up fill one each: 3 a layer; head, embedding
    assert buckets(8) == 32 * 3 + 2
    # 4096 ranks: 4.1 G elements are half of the model
    assert buckets(4096) == 2


@pytest.mark.parametrize("strategy", [Zero1(), DdpStrategy(bucket=None)])
def test_only_the_first_chunk_of_the_first_pipeline_rank_has_megatrons_buckets(strategy: DataParallelStrategy) -> None:
    """All others reduce each chunk's gradients at once (Megatron-LM: `pp_rank > 0`, `model_chunk_idx > 0`).

    8 of 32 layers a chunk: with 16 ranks 40 M elements make three buckets of a layer, and one of the embedding.
    """
    training = Training(1024, 64, gradient_clipping=False)
    plan = planned(Layout(dp=16, pp=2, data=strategy), training, load_preset("llama3-8b"), chunks=2)
    kind = CollectiveType.REDUCE_SCATTER if strategy.zero_stage else CollectiveType.ALL_REDUCE
    counts = [
        sum(collective.collective is kind for collective in collectives(program)) for program in lowered(plan).programs
    ]
    assert counts == [8 * 3 + 1 + 1, 2]


def test_buckets_of_a_stated_size_are_those_of_every_stage() -> None:
    training = Training(1024, 64, gradient_clipping=False)
    plan = planned(Layout(dp=16, pp=2, data=DdpStrategy(bucket=160e6)), training, load_preset("llama3-8b"), chunks=2)
    for program in lowered(plan).programs:  # three a layer, on 16 layers, and those of the embedding or the head
        assert len(collectives(program)) in range(16 * 3 + 1, 16 * 3 + 4)


@pytest.mark.parametrize("overlap", [True, False])
def test_zero_2_beside_a_pipeline_reduces_gradients_as_zero_1_does(overlap: bool) -> None:
    """Once a step, by each chunk's last backward: no framework shards them before."""
    layout = Layout(dp=4, pp=2, data=Zero2(overlap=overlap))
    one = told(lowered(planned(replace(layout, data=Zero1(overlap=overlap)), chunks=2)))
    assert told(lowered(planned(layout, chunks=2))) == one
    always = replace(layout, data=Zero2(overlap=overlap, reduce=ReductionFrequency.PER_MICROBATCH))
    assert told(lowered(planned(always, chunks=2))) != one


def test_zero_2_can_reduce_once_without_a_pipeline() -> None:
    data = Zero2(bucket=HUGE, reduce=ReductionFrequency.LAST_MICROBATCH)
    assert data_words(program(data)) == data_words(program(Zero1(bucket=HUGE)))


def test_without_replicas_nothing_is_communicated() -> None:
    for data in (DdpStrategy(), Zero1(), Zero2(), FullyShard()):
        training = replace(TRAINING, gradient_clipping=False)
        (only,) = lowered(planned(Layout(data=data), training)).programs
        assert not collectives(only)


def test_context_parallel_ranks_reduce_gradients_too() -> None:
    only = lowered(planned(Layout(cp=2), replace(TRAINING, gradient_clipping=False)))
    assert only.groups["dp"].members.shape == (1, 2)
    assert sum(collective.payload for collective in collectives(only.programs[0])) == 4 * PARAMETERS


def test_gradients_are_reduced_in_their_own_format() -> None:
    training = replace(TRAINING, recipe=mixed_precision(gradients=mixed_precision().compute), gradient_clipping=False)
    (only,) = lowered(planned(Layout(dp=4), training)).programs
    assert sum(collective.payload for collective in collectives(only)) == 2 * PARAMETERS


def test_every_virtual_stage_reduces_and_gathers_its_own_part() -> None:
    training = replace(TRAINING, gradient_clipping=False)
    plan = planned(Layout(dp=2, pp=2, data=Zero1()), training, chunks=2)
    for rank, rank_program in enumerate(lowered(plan).programs):
        held = sum(plan.parameter_count(stage) for stage in plan.stages_on_rank(rank))
        kinds = {
            kind: sum(x.payload for x in collectives(rank_program) if x.collective is kind) for kind in CollectiveType
        }
        assert kinds[CollectiveType.REDUCE_SCATTER] == 4 * held
        assert kinds[CollectiveType.ALL_GATHER] == 2 * held
