"""Which stages MTP layers are on, what they hold there, and what they send and reduce.

Four layers of width 64 and a vocabulary of 256; microbatches of 64 tokens, whose activations are 2 x 64 x 64
bytes.
"""

from dataclasses import replace

import pytest

from clustersim.memory.activations import ActivationKind, Activations
from clustersim.memory.footprint import Footprint
from clustersim.model.framework_files import load_framework
from clustersim.model.kernels import Kernel
from clustersim.model.transformer import PositionEncoding, TransformerModel, mtp_parameter_count, parameter_count
from clustersim.parallel.data_parallel_strategy import DdpStrategy, FullyShard, Zero1
from clustersim.parallel.layer_partition import PipelineLayoutString
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.program.action import ActionKind
from clustersim.program.task import CollectiveType, CommOp, CommOverlap, ReceiveTask, SendTask
from tests.lowering.plans import SMALL, TRAINING, collectives, comparable_tasks, lower_plan, make_plan, operations

ROTARY = replace(SMALL, positions=PositionEncoding.ROTARY)
WITH_MTP = replace(ROTARY, mtp_layers=2)
TABLE, ACTIVATION = 256 * 64, 2 * 64 * 64
SEPARATE_MTP_STAGE = PipelineLayoutString((2, 1, 1, 0), (0, 0, 2, 0))


def parameters_per_rank(plan: Plan) -> list[int]:
    """Parameters of each pipeline rank."""
    ranks = range(plan.layout.pp)
    return [sum(plan.parameter_count(stage) for stage in plan.stages_on_rank(rank)) for rank in ranks]


def message_bytes(plan: Plan) -> dict[tuple[int, str], float]:
    """Bytes that each pipeline rank sends for one microbatch, by sender and group."""
    payloads = {}
    for rank, program in enumerate(lower_plan(plan).programs):
        for task in program.tasks:
            if isinstance(task, SendTask):
                payloads[rank, task.comm_op.comm_group] = task.comm_op.payload
    return payloads


def tied_embedding_ops(plan: Plan) -> dict[int, CommOp]:
    """The reductions of embedding gradients, by pipeline rank."""
    programs = enumerate(lower_plan(plan).programs)
    return {
        rank: collective
        for rank, rank_program in programs
        for collective in collectives(rank_program)
        if collective.comm_group == "embedding"
    }


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(pp=2), Layout(pp=4), Layout(pp=4, layers_per_stage=SEPARATE_MTP_STAGE)]
)
@pytest.mark.parametrize("tied_embeddings", [False, True])
def test_all_stages_hold_the_model_and_copies_of_the_embedding(layout: Layout, *, tied_embeddings: bool) -> None:
    """Once where the embedding is, once where MTP layers look tokens up, once where logits are tied to it."""
    model = replace(WITH_MTP, tied_embeddings=tied_embeddings)
    plan = make_plan(layout, model=model)
    assert sum(parameters_per_rank(plan)) == parameter_count(model) + (len(plan.embedding_ranks) - 1) * TABLE


@pytest.mark.parametrize(
    ("layout", "tied_embeddings", "tables"),
    [
        (Layout(), True, (0,)),
        (Layout(pp=4), False, (0, 3)),
        (Layout(pp=4), True, (0, 3)),
        (Layout(pp=4, layers_per_stage=SEPARATE_MTP_STAGE), False, (0, 2)),
        (Layout(pp=4, layers_per_stage=SEPARATE_MTP_STAGE), True, (0, 2, 3)),
    ],
)
def test_ranks_with_the_embedding_reduce_its_gradient(layout: Layout, tables: object, *, tied_embeddings: bool) -> None:
    plan = make_plan(layout, model=replace(WITH_MTP, tied_embeddings=tied_embeddings))
    assert plan.embedding_ranks == tables
    reductions = tied_embedding_ops(plan)
    assert set(reductions) == (set(plan.embedding_ranks) if len(plan.embedding_ranks) > 1 else set())
    assert {reduction.payload for reduction in reductions.values()} <= {4.0 * TABLE}
    groups = lower_plan(plan).groups
    assert len(plan.embedding_ranks) == 1 or groups["embedding"].members.tolist() == [list(plan.embedding_ranks)]


def test_stages_after_mtp_layers_receive_all_their_outputs() -> None:
    plan = make_plan(Layout(pp=4, layers_per_stage=SEPARATE_MTP_STAGE), model=WITH_MTP)
    assert message_bytes(plan) == {
        **{(rank, "pp_next"): ACTIVATION * (3 if rank == 2 else 1) for rank in range(3)},
        **{(rank, "pp_previous"): ACTIVATION * (3 if rank == 3 else 1) for rank in range(1, 4)},
    }
    last_payloads = [
        task.comm_op.payload for task in lower_plan(plan).programs[3].tasks if isinstance(task, ReceiveTask)
    ]
    assert set(last_payloads) == {3.0 * ACTIVATION}
    assert set(message_bytes(make_plan(Layout(pp=4), model=WITH_MTP)).values()) == {ACTIVATION}


@pytest.mark.parametrize(("split", "at"), [(None, 3), (SEPARATE_MTP_STAGE, 2)])
def test_mtp_kernels_are_on_the_stage_that_has_the_layers(split: PipelineLayoutString | None, at: int) -> None:
    program = lower_plan(make_plan(Layout(pp=4, layers_per_stage=split), model=WITH_MTP))
    for rank, rank_program in enumerate(program.programs):
        names = [op.body.name for op in operations(rank_program, ActionKind.FORWARD) if isinstance(op.body, Kernel)]
        assert names.count("mtp.projection") == 2 * (rank == at)
        assert names.count("embedding.tokens") == (rank == 0) + 2 * (rank == at)
        assert names.count("head.logits") == 3 * (rank == 3)


def pass_comm_ops(plan: Plan, kind: ActionKind) -> list[CommOp]:
    """Collectives inside the passes of a kind of one microbatch, overlapping a kernel or not."""
    (program,) = lower_plan(plan).programs
    bodies = [
        operation.body.comm_op if isinstance(operation.body, CommOverlap) else operation.body
        for operation in operations(program, kind)
    ]
    return [body for body in bodies if isinstance(body, CommOp)]


@pytest.mark.parametrize(
    ("split", "forward", "backward"),
    [
        (False, [], [CollectiveType.ALL_REDUCE]),
        (True, [CollectiveType.ALL_GATHER], [CollectiveType.ALL_GATHER, CollectiveType.REDUCE_SCATTER]),
    ],
)
def test_tensor_parallel_collectives_of_the_mtp_projection(
    forward: list[CollectiveType], backward: list[CollectiveType], *, split: bool
) -> None:
    """Its input is twice as wide: gathered, gathered again and its gradient scattered under sequence parallelism.

    Its result is gathered in full, and so is the gradient of that under sequence parallelism.
    """
    plan = make_plan(Layout(tp=2, sequence_parallel=split), model=replace(ROTARY, mtp_layers=1))
    for kind, expected in ((ActionKind.FORWARD, forward), (ActionKind.BACKWARD, backward)):
        comm_ops = pass_comm_ops(plan, kind)
        assert [comm_op.collective for comm_op in comm_ops if comm_op.payload == 2 * ACTIVATION] == expected
        projection_names = [item.name for item in comm_ops if "projection" in item.name]
        assert projection_names == ["gather projection"] * (kind is ActionKind.FORWARD) + [
            "gather projection gradient"
        ] * (split and kind is ActionKind.BACKWARD)
        assert all(element.payload == ACTIVATION for element in comm_ops if "projection" in element.name)


@pytest.mark.parametrize("data", [DdpStrategy(), Zero1(), FullyShard()])
def test_mtp_gradients_are_reduced_with_all_others(data: object) -> None:
    """In four bytes each, with those of the model; the embedding is one on a rank that has it already."""
    layout = Layout(dp=2, data=data)  # type: ignore[arg-type]
    plans = (make_plan(layout, replace(TRAINING, global_batch=2), model) for model in (ROTARY, WITH_MTP))
    reduced = [_gradient_bytes(collectives(lower_plan(plan).programs[0])) for plan in plans]
    assert reduced[1] - reduced[0] == 4.0 * mtp_parameter_count(WITH_MTP)


def _gradient_bytes(comm_ops: list[CommOp]) -> float:
    """Bytes of reduced gradients, without the gradient norm."""
    kinds = (CollectiveType.ALL_REDUCE, CollectiveType.REDUCE_SCATTER)
    return sum(comm_op.payload for comm_op in comm_ops if comm_op.collective in kinds and "norm" not in comm_op.name)


def test_memory_of_stages_by_hand() -> None:
    """Stage 2 keeps, besides its layers', ids of two lookups (8 bytes each) and three activations for later stages.

    The next one keeps three logits and their inputs, and no output. Messages: one each way of the wider ones.
    """
    layout = Layout(pp=4, layers_per_stage=SEPARATE_MTP_STAGE, deallocate_pipeline_outputs=False)
    plan, plan_without_mtp = (
        make_plan(layout, model=WITH_MTP),
        make_plan(replace(layout, layers_per_stage=(2, 1, 1, 0)), model=ROTARY),
    )
    with_mtp, without_mtp = Activations(plan), Activations(plan_without_mtp)
    (run,) = WITH_MTP.mtp_stack
    layers = 2 * plan.layer_by_spec[run.spec].saved_bytes
    assert (
        with_mtp.saved_bytes(plan.stages[2]) - without_mtp.saved_bytes(plan_without_mtp.stages[2])
        == layers + 2 * 8 * 64 + 2 * ACTIVATION
    )
    assert (
        with_mtp.saved_bytes(plan.stages[3])
        == plan.head.saved_bytes
        == without_mtp.bytes_of(ActivationKind.HEAD_SAVED) + 2 * (ACTIVATION + _loss_bytes(ROTARY))
    )
    footprints = (Footprint(item, load_framework(), 0.0) for item in (plan, plan_without_mtp))
    mtp_receives, plain_receives = (
        [footprint.receive_buffer_bytes(footprint.plan.stages_on_rank(rank)) for rank in range(4)]
        for footprint in footprints
    )
    assert [mtp_bytes - plain_bytes for mtp_bytes, plain_bytes in zip(mtp_receives, plain_receives, strict=True)] == [
        0,
        0,
        2 * ACTIVATION,
        2 * ACTIVATION,
    ]


def _loss_bytes(model: TransformerModel) -> float:
    """Bytes that a loss keeps."""
    return make_plan(Layout(), model=model).head.operators[-1].saved_bytes


def test_programs_without_mtp_layers_are_unchanged() -> None:
    layout = Layout(pp=4, layers_per_stage=PipelineLayoutString((1, 1, 1, 1), (0, 0, 0, 0)))
    drawn_program, even_program = (lower_plan(make_plan(item, model=ROTARY)) for item in (layout, Layout(pp=4)))
    assert comparable_tasks(drawn_program) == comparable_tasks(even_program)
