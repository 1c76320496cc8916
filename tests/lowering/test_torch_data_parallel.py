"""torch.nn.DataParallel: one process drives all GPUs, and the first GPU does more."""

from dataclasses import replace

from clustersim.parallel.data_parallel_strategy import NaiveDataParallel
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.program.program import RankProgram
from clustersim.program.task import CollectiveTask, CollectiveType, ComputeTask
from tests.lowering.plans import TRAINING, collectives, lower_plan, make_plan, task_names

LAYOUT = Layout(dp=4, data=NaiveDataParallel())
SINGLE_MICROBATCH = replace(TRAINING, global_batch=4)


def rank_programs(plan: Plan | None = None) -> tuple[RankProgram, ...]:
    return lower_plan(plan or make_plan(LAYOUT, SINGLE_MICROBATCH)).programs


def test_the_first_gpu_has_a_different_program() -> None:
    assert lower_plan(make_plan(LAYOUT, SINGLE_MICROBATCH)).program_index.tolist() == [0, 1, 1, 1]
    assert len(rank_programs()) == 2


def test_the_task_order_is_that_of_data_parallel_py() -> None:
    """forward: replicate, scatter, parallel_apply, gather; loss on the first GPU; backward the reverse of each.

    The gradient of `replicate` (Broadcast) is ReduceAddCoalesced onto the first GPU; only that one steps.
    """
    root, replica = rank_programs()
    forward_names = ["replicate weights", "scatter tokens", "F0", "gather logits"]
    backward_names = ["scatter gradients of logits", "B0", "reduce gradients"]
    assert task_names(root) == [*forward_names, "F0", "B0", *backward_names, "optimizer"]
    assert task_names(replica) == [*forward_names, *backward_names]


def test_payloads() -> None:
    """Full batch: 4 sequences of 64 tokens; vocabulary 256 in bf16; weights bf16, gradients fp32."""
    plan = make_plan(LAYOUT, SINGLE_MICROBATCH)
    parameter_count = plan.parameter_count(plan.stages[0])
    expected = [
        (CollectiveType.BROADCAST, 2 * parameter_count),
        (CollectiveType.SCATTER, 256 * 8),
        (CollectiveType.GATHER, 256 * 256 * 2),
        (CollectiveType.SCATTER, 256 * 256 * 2),
        (CollectiveType.REDUCE, 4 * parameter_count),
    ]
    for program in rank_programs(plan):
        assert [(collective.collective, collective.payload) for collective in collectives(program)] == expected


def test_nothing_overlaps() -> None:
    for program in rank_programs():
        for task_id, task in enumerate(program.tasks):
            assert task.depends_on == ((task_id - 1,) if task_id else ())


def test_weights_are_broadcast_again_for_every_microbatch() -> None:
    root, _ = rank_programs(make_plan(LAYOUT, replace(SINGLE_MICROBATCH, global_batch=12)))
    assert task_names(root).count("replicate weights") == 3
    assert task_names(root).count("optimizer") == 1


def test_the_first_gpu_computes_the_loss_of_the_full_batch() -> None:
    """Four times the logits of one GPU's share, and no loss kernel elsewhere."""
    root, replica = rank_programs()

    def loss_bytes(program: RankProgram) -> list[float]:
        computes = [task for task in program.tasks if isinstance(task, ComputeTask)]
        kernels = [operation.kernel for task in computes for operation in task.segment.operations if operation.kernel]
        return [kernel.bytes for kernel in kernels if kernel.name.startswith("head.loss")]

    (single_gpu,) = lower_plan(make_plan(Layout(), replace(SINGLE_MICROBATCH, global_batch=1))).programs
    assert loss_bytes(replica) == []
    assert loss_bytes(root) == [4 * size for size in loss_bytes(single_gpu)]


def test_all_ranks_are_in_one_group() -> None:
    program = lower_plan(make_plan(LAYOUT, SINGLE_MICROBATCH))
    assert program.groups["dp"].members.tolist() == [[0, 1, 2, 3]]
    assert all(
        isinstance(task, CollectiveTask | ComputeTask)
        for rank_program in program.programs
        for task in rank_program.tasks
    )
