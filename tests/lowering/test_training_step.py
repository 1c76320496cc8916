"""The program of a full step: pipeline messages, reductions after the last backward, the optimizer."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.model.presets import load_preset
from clustersim.model.training import FullRecompute, Training
from clustersim.parallel.data_parallel_strategy import DataParallelStrategy, DdpStrategy, FullyShard, Zero1, Zero2
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.program.action import ActionKind
from clustersim.program.placement import looped_placement
from clustersim.program.program import Program, RankProgram
from clustersim.program.task import (
    CollectiveTask,
    CollectiveType,
    ComputeTask,
    ReceiveTask,
    SendTask,
    Stream,
    Task,
    WorkType,
)
from tests.lowering.plans import (
    SMALL,
    TRAINING,
    collectives,
    data_parallel_task_names,
    lower_plan,
    make_plan,
    operations,
    task_names,
)
from tests.strategies import default_schedule

UNCLIPPED = replace(TRAINING, global_batch=2, gradient_clipping=False)
PLANS = st.builds(
    lambda tp, dp, pp, chunks, data, clipping: make_plan(
        Layout(tp=tp, dp=dp, pp=pp, data=data),
        replace(TRAINING, global_batch=dp * 2 * pp, gradient_clipping=clipping),
        chunks=chunks if pp > 1 else 1,
    ),
    st.sampled_from([1, 2]),
    st.integers(1, 3),
    st.sampled_from([1, 2]),
    st.integers(1, 2),
    st.sampled_from(
        [DdpStrategy(), DdpStrategy(bucket=5e4), Zero1(), Zero2(), FullyShard(), FullyShard(overlap=False)]
    ),
    st.booleans(),
)


def message_tasks(program: RankProgram, kind: type[SendTask | ReceiveTask]) -> list[SendTask | ReceiveTask]:
    return [task for task in program.tasks if isinstance(task, kind)]


@given(PLANS)
def test_tasks_wait_for_earlier_tasks_only(plan: Plan) -> None:
    for program in lower_plan(plan).programs:
        for task_id, task in enumerate(program.tasks):
            assert all(0 <= dependency < task_id for dependency in task.depends_on)


@given(PLANS)
def test_messages_are_sent_once_and_received_once_at_their_stage(plan: Plan) -> None:
    program = lower_plan(plan)
    sent = Counter(
        (task.comm_op, task.tag) for rank_program in program.programs for task in message_tasks(rank_program, SendTask)
    )
    received = Counter(
        (task.comm_op, task.tag) for item in program.programs for task in message_tasks(item, ReceiveTask)
    )
    assert sent == received
    assert set(sent.values()) <= {1}
    assert len(sent) == 2 * (len(plan.stages) - 1) * plan.microbatches if plan.layout.pp > 1 else not sent
    for rank, element in enumerate(program.programs):
        assert all(task.tag.stage % plan.layout.pp == rank for task in message_tasks(element, ReceiveTask))


@given(PLANS)
def test_used_groups_are_the_groups_of_the_program(plan: Plan) -> None:
    program = lower_plan(plan)
    used = {comm_op.comm_group for rank_program in program.programs for comm_op in rank_program.comm_ops}
    assert used == set(program.groups)


@given(PLANS)
def test_the_passes_of_a_rank_follow_the_schedule(plan: Plan) -> None:
    order = default_schedule(plan.placement.max_chunks).order(plan.layout.pp, plan.microbatches)
    for program, actions in zip(lower_plan(plan).programs, order, strict=True):
        passes = [task.action for task in program.tasks if isinstance(task, ComputeTask) and task.action is not None]
        assert list(dict.fromkeys(passes)) == list(actions)


@given(PLANS)
def test_microbatches_do_the_same_work(plan: Plan) -> None:
    for program in lower_plan(plan).programs:
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
            first = [operation.body for operation in operations(program, kind, 0)]
            assert first == [item.body for item in operations(program, kind, plan.microbatches - 1)]


@given(PLANS)
def test_the_optimizer_is_last_to_compute_and_waits_for_all_reductions(plan: Plan) -> None:
    for program in lower_plan(plan).programs:
        computes = [task for task in program.tasks if isinstance(task, ComputeTask)]
        assert computes[-1].segment.name == "optimizer"
        assert all(task.segment.name in ("forward", "backward") for task in computes[:-1] if task.action)
        reductions = {n for n, t in enumerate(program.tasks) if isinstance(t, CollectiveTask) and _is_reduction(t)}
        first = next(task for task in computes if task.action is None)
        assert reductions <= set(first.depends_on)


def _is_reduction(task: CollectiveTask) -> bool:
    return task.comm_op.comm_group == "dp" and task.comm_op.collective is not CollectiveType.ALL_GATHER


def test_the_program_index_of_a_rank_is_its_pipeline_coordinate() -> None:
    assert lower_plan(make_plan(Layout(tp=2, pp=2, dp=2))).program_index.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    order = ("tp", "pp", "cp", "dp")
    assert lower_plan(make_plan(Layout(tp=2, pp=2, dp=2, order=order))).program_index.tolist() == [
        0,
        0,
        1,
        1,
        0,
        0,
        1,
        1,
    ]


def test_1f1b_on_two_ranks() -> None:
    """Narayanan et al. 2021, figure 4: the last rank alternates, the first one has one microbatch more in flight."""
    first, last = lower_plan(make_plan(Layout(pp=2), replace(UNCLIPPED, global_batch=3))).programs
    assert task_names(first) == [
        "F0", "send 1F0", "F1", "send 1F1", "receive 0B0", "B0", "F2", "send 1F2",
        "receive 0B1", "B1", "receive 0B2", "B2", "optimizer",
    ]  # fmt: skip
    assert task_names(last) == [
        "receive 1F0", "F0", "B0", "send 0B0", "receive 1F1", "F1", "B1", "send 0B1",
        "receive 1F2", "F2", "B2", "send 0B2", "optimizer",
    ]  # fmt: skip


def test_a_pass_waits_for_its_message_and_a_send_for_its_pass() -> None:
    first, last = lower_plan(make_plan(Layout(pp=2), UNCLIPPED)).programs
    assert isinstance(first.tasks[1], SendTask)
    assert first.tasks[1].depends_on == (0,)
    assert isinstance(last.tasks[0], ReceiveTask)
    assert last.tasks[1].depends_on == (0,)
    assert last.streams[0] is Stream.RECEIVE
    assert (first.streams[1], last.streams[3]) == (Stream.SEND_NEXT, Stream.SEND_PREVIOUS)


def test_without_pipeline_overlap_the_next_pass_waits_for_the_send() -> None:
    overlapped, waiting = (
        lower_plan(make_plan(Layout(pp=2, overlap_p2p_comm=overlap), UNCLIPPED)).programs[0]
        for overlap in (True, False)
    )
    second = task_names(waiting).index("F1")
    assert overlapped.tasks[second].depends_on == ()
    assert waiting.tasks[second].depends_on == (second - 1,)
    assert isinstance(waiting.tasks[second - 1], SendTask)


def test_interleaved_sends_are_paired_without_pipeline_overlap() -> None:
    """Two ranks, two chunks, four microbatches: rank 0 sends F2's output and B0's gradient when both are done.

    Megatron-LM's `send_forward_backward_recv_forward_backward`; its next pass waits for both. Before and after
    the steady phase sends are separate.
    """
    plan = make_plan(Layout(pp=2, overlap_p2p_comm=False), replace(UNCLIPPED, global_batch=4), chunks=2)
    first, _ = lower_plan(plan).programs
    names = task_names(first)
    steady = names.index("F2")
    assert names[:steady] == [
        "F0", "send 1F0", "F1", "send 1F1", "receive 2F0", "F0", "send 3F0", "receive 2F1", "F1", "send 3F1",
    ]  # fmt: skip
    assert names[steady : steady + 6] == ["F2", "receive 2B0", "B0", "send 1F2", "send 1B0", "F3"]
    backward = steady + 2
    assert [task.depends_on for task in first.tasks[backward + 1 : backward + 4]] == [
        (backward,), (backward,), (backward + 1, backward + 2),
    ]  # fmt: skip
    assert names[-8:] == [
        "receive 2B3", "B3", "send 1B3", "receive 0B2", "B2", "receive 0B3", "B3", "optimizer",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("overlap", "microbatches", "chunks"),
    [(True, 4, 2), (False, 2, 2), (False, 4, 1)],
    ids=["they are overlapped", "all forwards come first", "there is one chunk"],
)
def test_outputs_are_sent_immediately_where(overlap: bool, microbatches: int, chunks: int) -> None:
    training = replace(UNCLIPPED, global_batch=microbatches)
    for program in lower_plan(make_plan(Layout(pp=2, overlap_p2p_comm=overlap), training, chunks=chunks)).programs:
        for task_id, task in enumerate(program.tasks):
            if isinstance(task, SendTask):
                assert isinstance(program.tasks[task_id - 1], ComputeTask)
                assert task.depends_on == (task_id - 1,)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_tensor_rank_sends_its_shard_gathered_on_arrival(
    sequence_parallel: bool,
) -> None:
    """Narayanan et al. 2021 section 4.1: b s h / t elements; 64 x 64 x 2 / 2 bytes here.

    Under sequence parallelism the stage's input is sharded anyway, so nothing is gathered on arrival.
    """
    layout = Layout(tp=2, pp=2, sequence_parallel=sequence_parallel)
    _, last = lower_plan(make_plan(layout, UNCLIPPED)).programs
    assert {task.comm_op.payload for task in last.tasks if isinstance(task, SendTask | ReceiveTask)} == {4096.0}
    first_operation = next(task for task in last.tasks if isinstance(task, ComputeTask)).segment.operations[0]
    gathers_input = first_operation.comm_op is not None and first_operation.comm_op.name == "gather stage input"
    assert gathers_input is not sequence_parallel
    if first_operation.comm_op is not None:
        assert first_operation.comm_op.payload == 8192.0


def test_interleaving_sends_from_the_last_rank_back_to_the_first() -> None:
    plan = make_plan(Layout(pp=2), replace(UNCLIPPED, global_batch=4), chunks=2)
    first, last = lower_plan(plan).programs
    assert [str(task.tag) for task in message_tasks(last, SendTask)][:2] == ["2F0", "2F1"]
    assert "2F0" in [str(task.tag) for task in message_tasks(first, ReceiveTask)]
    assert lower_plan(plan).groups["pp_next"].members.tolist() == [[0, 1], [1, 0]]


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_a_tied_embedding_is_reduced_over_the_stages_that_hold_it(pp: int) -> None:
    """First and last stage: 256 rows of 64, fp32; Megatron's `_allreduce_word_embedding_grads`."""
    plan = make_plan(Layout(pp=pp), UNCLIPPED, replace(SMALL, tied_embeddings=True))
    program = lower_plan(plan)
    payloads = [
        [collective.payload for collective in collectives(rank) if collective.comm_group == "embedding"]
        for rank in program.programs
    ]
    ends = [[256 * 64 * 4.0]]
    assert payloads == ([[]] if pp == 1 else ends + [[]] * (pp - 2) + ends)
    assert ("embedding" in program.groups) == (pp > 1)


@pytest.mark.parametrize(("data", "shards"), [(DdpStrategy(), 1), (Zero1(), 1), (Zero2(), 4), (FullyShard(), 4)])
def test_ranks_reduce_their_shard_of_the_tied_embedding_gradient(data: DataParallelStrategy, shards: int) -> None:
    model = replace(SMALL, tied_embeddings=True)
    program = lower_plan(make_plan(Layout(pp=2, dp=4, data=data), Training(64, 4), model))
    payloads = {
        collective.payload
        for rank_program in program.programs
        for collective in collectives(rank_program)
        if collective.comm_group == "embedding"
    }
    assert payloads == {256 * 64 * 4 / shards}


def test_the_tied_embedding_follows_the_last_bucket() -> None:
    plan = make_plan(Layout(pp=2, dp=2), replace(UNCLIPPED, global_batch=4), replace(SMALL, tied_embeddings=True))
    for program in lower_plan(plan).programs:
        assert data_parallel_task_names(program)[-3:] == ["reduce gradients", "reduce tied embedding", "optimizer"]
        task_id = task_names(program).index("reduce tied embedding")
        buckets = [index for index, word in enumerate(task_names(program)) if word == "reduce gradients"]
        assert buckets[-1] in program.tasks[task_id].depends_on
        assert task_id in program.tasks[-1].depends_on


def test_clipping_reduces_the_norm_over_all_ranks_with_shards() -> None:
    """One fp32 number: over the model's ranks, or over all where gradients are sharded over replicas too."""
    for data, group in ((DdpStrategy(), "model"), (Zero1(overlap_param_gather=True), "world"), (FullyShard(), "world")):
        plan = make_plan(Layout(tp=2, dp=2, data=data), replace(TRAINING, global_batch=4))
        program = lower_plan(plan).programs[0]
        *_, norm, total, optimizer = task_names(program)
        assert (norm, total, optimizer) == ("gradient norm", "gradient norm", "optimizer")
        comm_op = collectives(program)[-1]
        assert (comm_op.comm_group, comm_op.collective, comm_op.payload) == (group, CollectiveType.ALL_REDUCE, 4.0)


def test_without_clipping_there_is_no_norm() -> None:
    for program in lower_plan(make_plan(Layout(dp=2), replace(UNCLIPPED, global_batch=4))).programs:
        assert "gradient norm" not in task_names(program)


@pytest.mark.parametrize(
    ("data", "share"),
    [
        (DdpStrategy(), 1),
        (Zero1(overlap_param_gather=True), 4),
        (Zero2(overlap_param_gather=True), 4),
        (FullyShard(), 4),
    ],
)
def test_the_optimizer_updates_its_shard(data: DataParallelStrategy, share: int) -> None:
    def optimizer_bytes(layout: Layout) -> float:
        tasks: tuple[Task, ...] = lower_plan(make_plan(layout, replace(UNCLIPPED, global_batch=4))).programs[0].tasks
        last = tasks[-1]
        assert isinstance(last, ComputeTask)
        return sum(operation.kernel.bytes for operation in last.segment.operations if operation.kernel)

    assert optimizer_bytes(Layout(dp=4, data=data)) * share == pytest.approx(optimizer_bytes(Layout()))


@pytest.mark.parametrize("chunks", [1, 2])
def test_uneven_stages_do_their_own_layers(chunks: int) -> None:
    layers = {1: (3, 1), 2: (0, 2, 2, 0)}[chunks]
    plan = make_plan(Layout(pp=2, layers_per_stage=layers), replace(UNCLIPPED, global_batch=4), chunks=chunks)
    for rank, program in enumerate(lower_plan(plan).programs):
        up_projections = [
            operation
            for operation in operations(program, ActionKind.FORWARD)
            if operation.kernel and operation.kernel.name == "mlp.up"
        ]
        assert len(up_projections) == sum(layers[rank::2])


def test_ends_without_layers_still_hold_embedding_and_head() -> None:
    """Llama 3's 126 layers in 16 x 8 virtual stages: 0, 1, ..., 1, 0."""
    model = load_preset("llama3-405b")
    plan = Plan(model, Training(64, 16), Layout(pp=16), partial(looped_placement, chunks_per_rank=8))
    program = lower_plan(plan)
    assert (plan.stages[0].layer_count, plan.stages[-1].layer_count) == (0, 0)
    completed = [
        sum(operation.gradient_count for operation in operations(rank, ActionKind.BACKWARD))
        for rank in program.programs
    ]
    rank_parameters = [sum(plan.parameter_count(stage) for stage in plan.stages_on_rank(rank)) for rank in range(16)]
    assert completed == rank_parameters


@given(PLANS)
def test_one_microbatchs_backward_completes_the_gradients_of_the_rank(plan: Plan) -> None:
    for rank, program in enumerate(lower_plan(plan).programs):
        rank_parameters = sum(plan.parameter_count(stage) for stage in plan.stages_on_rank(rank))
        assert (
            sum(operation.gradient_count for operation in operations(program, ActionKind.BACKWARD)) == rank_parameters
        )


@given(PLANS)
def test_equal_work_shares_segments(plan: Plan) -> None:
    """Segments are timed once: their number does not grow with the microbatches."""

    def segment_count(lowered_program: Program) -> int:
        return len(
            {
                task.segment
                for program in lowered_program.programs
                for task in program.tasks
                if isinstance(task, ComputeTask)
            }
        )

    larger_batch = replace(plan, training=replace(plan.training, global_batch=4 * plan.training.global_batch))
    assert (
        segment_count(lower_plan(larger_batch))
        <= segment_count(lower_plan(plan)) + 2 * plan.placement.max_chunks * plan.layout.pp
    )


def test_recomputed_operations_have_recompute_work_type() -> None:
    """Full recomputation reruns every layer's forward, but neither the embedding's nor the head's."""
    program = lower_plan(make_plan(Layout(), replace(UNCLIPPED, recompute=FullRecompute()))).programs[0]
    names = Counter(operation.kernel.name for operation in operations(program, ActionKind.FORWARD) if operation.kernel)
    backward = [item for item in operations(program, ActionKind.BACKWARD) if item.work_type is WorkType.RECOMPUTE]
    recomputed = Counter(element.kernel.name for element in backward if element.kernel)
    assert recomputed == {name: count for name, count in names.items() if name.startswith(("attention", "mlp"))}
