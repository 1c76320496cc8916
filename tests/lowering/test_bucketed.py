"""DDP, ZeRO-1 and ZeRO-2: which collectives are issued, when, and of how many bytes."""

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
from tests.lowering.plans import (
    SMALL,
    TRAINING,
    collectives,
    comparable_tasks,
    data_parallel_task_names,
    lower_plan,
    make_plan,
)
from tests.parallel.operation_listing import comparable_operations

HUGE = 1e12
PARAMETERS = parameter_count(SMALL)


def rank_program(data: DataParallelStrategy, microbatches: int = 2) -> RankProgram:
    training = replace(TRAINING, global_batch=4 * microbatches, gradient_clipping=False)
    (lowered_program,) = lower_plan(make_plan(Layout(dp=4, data=data), training)).programs
    return lowered_program


def test_ddp_reduces_in_the_last_microbatch_only() -> None:
    """Gradient accumulation: torch's no_sync for all microbatches but the last."""
    assert data_parallel_task_names(rank_program(DdpStrategy(bucket=HUGE), microbatches=3)) == [
        "F0", "B0", "F1", "B1", "F2", "B2", "reduce gradients", "optimizer",
    ]  # fmt: skip


def test_zero_1_gathers_before_forward_and_reduces_at_the_end() -> None:
    assert data_parallel_task_names(rank_program(Zero1(bucket=HUGE, overlap_param_gather=True))) == [
        "gather parameters", "F0", "B0", "F1", "B1", "reduce gradients", "optimizer",
    ]  # fmt: skip


def test_zero_2_reduces_after_every_microbatch() -> None:
    """A rank keeps only its shard of the gradients, so full ones cannot be accumulated (ZeRO, section 5.2)."""
    assert data_parallel_task_names(rank_program(Zero2(bucket=HUGE, overlap_param_gather=True))) == [
        "gather parameters", "F0", "B0", "reduce gradients", "F1", "B1", "reduce gradients", "optimizer",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("data", "kinds"),
    [
        (DdpStrategy(overlap=False), [CollectiveType.ALL_REDUCE]),
        (Zero1(overlap=False), [CollectiveType.REDUCE_SCATTER, CollectiveType.ALL_GATHER]),
        (Zero1(overlap=False, overlap_param_gather=True), [CollectiveType.REDUCE_SCATTER, CollectiveType.ALL_GATHER]),
    ],
)
def test_without_overlap_everything_follows_the_last_backward(
    data: DataParallelStrategy, kinds: list[CollectiveType]
) -> None:
    lowered_program = rank_program(data)
    names = data_parallel_task_names(lowered_program)
    assert names[:5] == ["F0", "B0", "F1", "B1", "reduce gradients"]
    assert names[5:] == ["optimizer", "gather parameters"][: len(kinds)]
    assert [collective.collective for collective in collectives(lowered_program)] == kinds


def test_zero_2_without_overlap_reduces_before_the_next_pass_starts() -> None:
    lowered_program = rank_program(Zero2(overlap=False))
    assert data_parallel_task_names(lowered_program) == [
        "F0", "B0", "reduce gradients", "F1", "B1", "reduce gradients", "optimizer", "gather parameters",
    ]  # fmt: skip
    assert lowered_program.tasks[3].depends_on == (2,)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("make", "reductions", "gathers"),
    [
        (DdpStrategy, 1, 0),
        (lambda **options: Zero1(**options), 1, 1),
        (lambda **options: Zero2(**options), 3, 1),
    ],
)
def test_reduced_and_gathered_bytes_of_a_step(
    make: Callable[..., DataParallelStrategy], reductions: int, gathers: int, overlap: bool
) -> None:
    """Gradients are fp32 (4 bytes), gathered parameters bf16 (2), over three microbatches."""
    comm_ops = collectives(rank_program(make(bucket=10_000.0, overlap=overlap), microbatches=3))
    reduced = sum(comm_op.payload for comm_op in comm_ops if comm_op.collective is not CollectiveType.ALL_GATHER)
    gathered = sum(item.payload for item in comm_ops if item.collective is CollectiveType.ALL_GATHER)
    assert reduced == 4 * PARAMETERS * reductions
    assert gathered == 2 * PARAMETERS * gathers


def test_ddp_buckets_of_25_mb_are_split_at_the_gradient_that_fills_them() -> None:
    """Llama 3 8B, fp32 gradients: 25 MiB are 6,553,600 elements, so every large matrix fills a bucket of its own.

    Backward completes, per layer: down (14336 x 4096 = 58.7 M), up and gate (117 M), mlp norm with attention out
    (4,096 + 16.8 M), qkv (25.2 M); the attention norm's 4,096 go with the next layer's down matrix. First comes
    the head's logits matrix; then its norm with the first down matrix; last the last norm with the embedding.
    """
    model = load_preset("llama3-8b")
    training = Training(1024, 2, gradient_clipping=False)
    (lowered_program,) = lower_plan(make_plan(Layout(dp=2), training, model)).programs
    hidden, ffn, vocab, qkv = 4096, 14336, 128256, 4096 + 2 * 1024
    layer = [hidden + hidden * ffn, 2 * hidden * ffn, hidden + hidden * hidden, hidden * qkv]
    expected = [hidden * vocab, *layer * 32, hidden + hidden * vocab]
    assert [collective.payload for collective in collectives(lowered_program)] == [
        4.0 * elements for elements in expected
    ]
    assert sum(expected) == parameter_count(model)


def test_buckets_wait_for_their_backward_piece_and_the_optimizer_for_all() -> None:
    lowered_program = rank_program(DdpStrategy(bucket=10_000.0), microbatches=1)
    buckets = [task_id for task_id, task in enumerate(lowered_program.tasks) if isinstance(task, CollectiveTask)]
    assert len(buckets) > 3
    for task_id in buckets:
        task, piece = lowered_program.tasks[task_id], lowered_program.tasks[task_id - 1]
        assert isinstance(piece, ComputeTask)
        assert task.depends_on == (task_id - 1,)
        assert lowered_program.streams[task_id] is Stream.DP
        assert piece.segment.operations[-1].gradient_count > 0
    assert lowered_program.tasks[-1].depends_on == tuple(buckets)


def test_split_backward_has_the_operations_of_the_unsplit_one() -> None:
    def backward_operations(data: DataParallelStrategy) -> list[tuple[object, ...]]:
        tasks = [task for task in rank_program(data, microbatches=1).tasks if isinstance(task, ComputeTask)]
        return comparable_operations(
            operation
            for task in tasks
            if task.action is not None and task.action.kind is ActionKind.BACKWARD
            for operation in task.segment.operations
        )

    assert backward_operations(DdpStrategy(bucket=10_000.0)) == backward_operations(DdpStrategy(bucket=HUGE))


def test_forward_waits_for_the_parameters_layer_by_layer() -> None:
    """Buckets of full units: the embedding and the first layers that fill one, the next, ... in forward order."""
    lowered_program = rank_program(Zero1(bucket=100_000.0, overlap_param_gather=True), microbatches=1)
    gathers = [
        task_id
        for task_id, task in enumerate(lowered_program.tasks)
        if isinstance(task, CollectiveTask) and not task.depends_on
    ]
    forwards = [
        task
        for task in lowered_program.tasks
        if isinstance(task, ComputeTask) and task.action is not None and task.action.kind is ActionKind.FORWARD
    ]
    assert len(gathers) == len(forwards) > 2
    assert [task.depends_on for task in forwards] == [(task_id,) for task_id in gathers]


def test_forwards_after_the_first_do_not_gather() -> None:
    names = data_parallel_task_names(rank_program(Zero1(bucket=100_000.0, overlap_param_gather=True), microbatches=3))
    first = names.index("F1")
    assert "gather parameters" not in names[first:]
    assert names.count("F1") == names.count("F2") == 1


def test_megatrons_bucket_is_40_million_parameters_or_a_million_per_rank() -> None:
    """Megatron-LM, DistributedDataParallelConfig.bucket_size: max(40000000, 1000000 * dp)."""
    model = load_preset("llama3-8b")

    def bucket_count(dp: int) -> int:
        (lowered_program,) = lower_plan(make_plan(Layout(dp=dp, data=Zero1()), Training(1024, dp), model)).programs
        return len(
            [
                collective
                for collective in collectives(lowered_program)
                if collective.collective is CollectiveType.REDUCE_SCATTER
            ]
        )

    # 8 ranks: out and qkv (42 M) share a bucket, down and up fill one each: 3 a layer; head, embedding
    assert bucket_count(8) == 32 * 3 + 2
    # 4096 ranks: 4.1 G elements are half of the model
    assert bucket_count(4096) == 2


@pytest.mark.parametrize("strategy", [Zero1(), DdpStrategy(bucket=None)])
def test_only_the_first_chunk_of_the_first_pipeline_rank_has_megatrons_buckets(strategy: DataParallelStrategy) -> None:
    """All others reduce each chunk's gradients at once (Megatron-LM: `pp_rank > 0`, `model_chunk_idx > 0`).

    8 of 32 layers a chunk: with 16 ranks 40 M elements make three buckets of a layer, and one of the embedding.
    """
    training = Training(1024, 64, gradient_clipping=False)
    plan = make_plan(Layout(dp=16, pp=2, data=strategy), training, load_preset("llama3-8b"), chunks=2)
    kind = CollectiveType.REDUCE_SCATTER if strategy.zero_stage else CollectiveType.ALL_REDUCE
    counts = [
        sum(collective.collective is kind for collective in collectives(lowered_program))
        for lowered_program in lower_plan(plan).programs
    ]
    assert counts == [8 * 3 + 1 + 1, 2]


def test_an_explicit_bucket_size_applies_to_all_stages() -> None:
    training = Training(1024, 64, gradient_clipping=False)
    plan = make_plan(Layout(dp=16, pp=2, data=DdpStrategy(bucket=160e6)), training, load_preset("llama3-8b"), chunks=2)
    for lowered_program in lower_plan(
        plan
    ).programs:  # three a layer, on 16 layers, and those of the embedding or the head
        assert len(collectives(lowered_program)) in range(16 * 3 + 1, 16 * 3 + 4)


@pytest.mark.parametrize("overlap", [True, False])
def test_zero_2_with_a_pipeline_reduces_gradients_like_zero_1(overlap: bool) -> None:
    """Once a step, by each chunk's last backward: no framework shards them before."""
    layout = Layout(dp=4, pp=2, data=Zero2(overlap=overlap))
    zero_1 = comparable_tasks(lower_plan(make_plan(replace(layout, data=Zero1(overlap=overlap)), chunks=2)))
    assert comparable_tasks(lower_plan(make_plan(layout, chunks=2))) == zero_1
    always = replace(layout, data=Zero2(overlap=overlap, reduce=ReductionFrequency.PER_MICROBATCH))
    assert comparable_tasks(lower_plan(make_plan(always, chunks=2))) != zero_1


def test_zero_2_can_reduce_once_without_a_pipeline() -> None:
    data = Zero2(bucket=HUGE, overlap_param_gather=True, reduce=ReductionFrequency.LAST_MICROBATCH)
    assert data_parallel_task_names(rank_program(data)) == data_parallel_task_names(
        rank_program(Zero1(bucket=HUGE, overlap_param_gather=True))
    )


def test_without_replicas_nothing_is_communicated() -> None:
    for data in (DdpStrategy(), Zero1(), Zero2(), FullyShard()):
        training = replace(TRAINING, gradient_clipping=False)
        (lowered_program,) = lower_plan(make_plan(Layout(data=data), training)).programs
        assert not collectives(lowered_program)


def test_context_parallel_ranks_reduce_gradients_too() -> None:
    lowered_program = lower_plan(make_plan(Layout(cp=2), replace(TRAINING, gradient_clipping=False)))
    assert lowered_program.groups["dp"].members.shape == (1, 2)
    assert sum(collective.payload for collective in collectives(lowered_program.programs[0])) == 4 * PARAMETERS


def test_gradients_are_reduced_in_the_gradient_dtype() -> None:
    training = replace(TRAINING, recipe=mixed_precision(gradients=mixed_precision().compute), gradient_clipping=False)
    (lowered_program,) = lower_plan(make_plan(Layout(dp=4), training)).programs
    assert sum(collective.payload for collective in collectives(lowered_program)) == 2 * PARAMETERS


def test_virtual_stages_reduce_and_gather_their_own_parameters() -> None:
    training = replace(TRAINING, gradient_clipping=False)
    plan = make_plan(Layout(dp=2, pp=2, data=Zero1()), training, chunks=2)
    for rank, rank_tasks in enumerate(lower_plan(plan).programs):
        rank_parameters = sum(plan.parameter_count(stage) for stage in plan.stages_on_rank(rank))
        bytes_by_collective = {
            kind: sum(comm_op.payload for comm_op in collectives(rank_tasks) if comm_op.collective is kind)
            for kind in CollectiveType
        }
        assert bytes_by_collective[CollectiveType.REDUCE_SCATTER] == 4 * rank_parameters
        assert bytes_by_collective[CollectiveType.ALL_GATHER] == 2 * rank_parameters
