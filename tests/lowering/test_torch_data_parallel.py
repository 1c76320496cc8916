"""torch.nn.DataParallel: one process drives every GPU, and the first GPU does more."""

from dataclasses import replace

from clustersim.parallel.data_parallel_strategy import NaiveDataParallel
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.program.program import RankProgram
from clustersim.program.task import CollectiveTask, CollectiveType, ComputeTask
from tests.lowering.plans import TRAINING, collectives, lowered, planned, words

LAYOUT = Layout(dp=4, data=NaiveDataParallel())
ONE = replace(TRAINING, global_batch=4)


def programs(plan: Plan | None = None) -> tuple[RankProgram, ...]:
    return lowered(plan or planned(LAYOUT, ONE)).programs


def test_the_first_gpu_has_a_program_of_its_own() -> None:
    assert lowered(planned(LAYOUT, ONE)).program_index.tolist() == [0, 1, 1, 1]
    assert len(programs()) == 2


def test_a_step_is_what_data_parallel_py_does() -> None:
    """forward: replicate, scatter, parallel_apply, gather; loss on the first GPU; backward the reverse of each.

    The gradient of `replicate` (Broadcast) is ReduceAddCoalesced onto the first GPU; only that one steps.
    """
    root, other = programs()
    common = ["replicate weights", "scatter tokens", "F0", "gather logits"]
    after = ["scatter gradients of logits", "B0", "reduce gradients"]
    assert words(root) == [*common, "F0", "B0", *after, "optimizer"]
    assert words(other) == [*common, *after]


def test_payloads() -> None:
    """Whole batch: 4 sequences of 64 tokens; vocabulary 256 in bf16; weights bf16, gradients fp32."""
    plan = planned(LAYOUT, ONE)
    held = plan.parameter_count(plan.stages[0])
    expected = [
        (CollectiveType.BROADCAST, 2 * held),
        (CollectiveType.SCATTER, 256 * 8),
        (CollectiveType.GATHER, 256 * 256 * 2),
        (CollectiveType.SCATTER, 256 * 256 * 2),
        (CollectiveType.REDUCE, 4 * held),
    ]
    for program in programs(plan):
        assert [(collective.collective, collective.payload) for collective in collectives(program)] == expected


def test_nothing_overlaps() -> None:
    for program in programs():
        for number, task in enumerate(program.tasks):
            assert task.depends_on == ((number - 1,) if number else ())


def test_weights_are_broadcast_again_for_every_microbatch() -> None:
    root, _ = programs(planned(LAYOUT, replace(ONE, global_batch=12)))
    assert words(root).count("replicate weights") == 3
    assert words(root).count("optimizer") == 1


def test_the_first_gpu_computes_the_loss_of_the_whole_batch() -> None:
    """Four times the logits of one GPU's part, and no loss kernel elsewhere."""
    root, other = programs()

    def loss(program: RankProgram) -> list[float]:
        computes = [task for task in program.tasks if isinstance(task, ComputeTask)]
        kernels = [operation.kernel for task in computes for operation in task.segment.operations if operation.kernel]
        return [kernel.bytes for kernel in kernels if kernel.name.startswith("head.loss")]

    (own,) = lowered(planned(Layout(), replace(ONE, global_batch=1))).programs
    assert loss(other) == []
    assert loss(root) == [4 * size for size in loss(own)]


def test_all_ranks_meet_in_one_group() -> None:
    program = lowered(planned(LAYOUT, ONE))
    assert program.groups["dp"].members.tolist() == [[0, 1, 2, 3]]
    assert all(
        isinstance(task, CollectiveTask | ComputeTask)
        for rank_program in program.programs
        for task in rank_program.tasks
    )
