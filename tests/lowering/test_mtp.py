"""Where layers that predict further tokens are, what they hold there, and what they send and reduce.

Four layers of width 64 and a vocabulary of 256; microbatches of 64 tokens, whose activations are 2 x 64 x 64 bytes.
"""

from dataclasses import replace

import pytest

from clustersim.memory.activations import ActivationKind, Activations
from clustersim.memory.footprint import Footprint
from clustersim.model.framework import load_framework
from clustersim.model.kernels import Kernel
from clustersim.model.transformer import PositionEncoding, TransformerModel, mtp_parameter_count, parameter_count
from clustersim.parallel.data_parallel_strategy import DdpStrategy, FullyShard, Zero1
from clustersim.parallel.layer_partition import PipelineLayoutString
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.program.action import ActionKind
from clustersim.program.task import CollectiveType, CommOp, CommOverlap, ReceiveTask, SendTask
from tests.lowering.plans import SMALL, TRAINING, collectives, lowered, operations, planned, told

ROTARY = replace(SMALL, positions=PositionEncoding.ROTARY)
FURTHER = replace(ROTARY, mtp_layers=2)
TABLE, ACTIVATION = 256 * 64, 2 * 64 * 64
ALONE = PipelineLayoutString((2, 1, 1, 0), (0, 0, 2, 0))


def held(plan: Plan) -> list[int]:
    """Parameters of each pipeline rank."""
    ranks = range(plan.layout.pp)
    return [sum(plan.parameter_count(stage) for stage in plan.stages_on_rank(rank)) for rank in ranks]


def messages(plan: Plan) -> dict[tuple[int, str], float]:
    """What each pipeline rank sends for one microbatch, and where: bytes by sender and role."""
    found = {}
    for rank, program in enumerate(lowered(plan).programs):
        for task in program.tasks:
            if isinstance(task, SendTask):
                found[rank, task.comm_op.comm_group] = task.comm_op.payload
    return found


def tied(plan: Plan) -> dict[int, CommOp]:
    """The sums of embeddings' gradients, by pipeline rank."""
    programs = enumerate(lowered(plan).programs)
    return {
        rank: collective
        for rank, found in programs
        for collective in collectives(found)
        if collective.comm_group == "embedding"
    }


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2), Layout(pp=4), Layout(pp=4, layers_per_stage=ALONE)])
@pytest.mark.parametrize("tied_embeddings", [False, True])
def test_all_ranks_hold_the_model_and_copies_of_the_embedding(layout: Layout, *, tied_embeddings: bool) -> None:
    """Once where the embedding is, once where further tokens are looked up, once where logits are tied to it."""
    model = replace(FURTHER, tied_embeddings=tied_embeddings)
    plan = planned(layout, model=model)
    assert sum(held(plan)) == parameter_count(model) + (len(plan.embedding_ranks) - 1) * TABLE


@pytest.mark.parametrize(
    ("layout", "tied_embeddings", "tables"),
    [
        (Layout(), True, (0,)),
        (Layout(pp=4), False, (0, 3)),
        (Layout(pp=4), True, (0, 3)),
        (Layout(pp=4, layers_per_stage=ALONE), False, (0, 2)),
        (Layout(pp=4, layers_per_stage=ALONE), True, (0, 2, 3)),
    ],
)
def test_those_that_hold_the_embedding_sum_its_gradient(
    layout: Layout, tables: object, *, tied_embeddings: bool
) -> None:
    plan = planned(layout, model=replace(FURTHER, tied_embeddings=tied_embeddings))
    assert plan.embedding_ranks == tables
    found = tied(plan)
    assert set(found) == (set(plan.embedding_ranks) if len(plan.embedding_ranks) > 1 else set())
    assert {comm_op.payload for comm_op in found.values()} <= {4.0 * TABLE}
    groups = lowered(plan).groups
    assert len(plan.embedding_ranks) == 1 or groups["embedding"].members.tolist() == [list(plan.embedding_ranks)]


def test_stages_behind_theirs_are_sent_what_each_of_them_made() -> None:
    plan = planned(Layout(pp=4, layers_per_stage=ALONE), model=FURTHER)
    assert messages(plan) == {
        **{(rank, "pp_next"): ACTIVATION * (3 if rank == 2 else 1) for rank in range(3)},
        **{(rank, "pp_previous"): ACTIVATION * (3 if rank == 3 else 1) for rank in range(1, 4)},
    }
    last = [task.comm_op.payload for task in lowered(plan).programs[3].tasks if isinstance(task, ReceiveTask)]
    assert set(last) == {3.0 * ACTIVATION}
    assert set(messages(planned(Layout(pp=4), model=FURTHER)).values()) == {ACTIVATION}


@pytest.mark.parametrize(("split", "at"), [(None, 3), (ALONE, 2)])
def test_kernels_are_on_the_stage_that_has_the_layers(split: PipelineLayoutString | None, at: int) -> None:
    program = lowered(planned(Layout(pp=4, layers_per_stage=split), model=FURTHER))
    for rank, rank_program in enumerate(program.programs):
        names = [op.body.name for op in operations(rank_program, ActionKind.FORWARD) if isinstance(op.body, Kernel)]
        assert names.count("mtp.projection") == 2 * (rank == at)
        assert names.count("embedding.tokens") == (rank == 0) + 2 * (rank == at)
        assert names.count("head.logits") == 3 * (rank == 3)


def joined(plan: Plan, kind: ActionKind) -> list[CommOp]:
    """What is sent inside the passes of a kind of one microbatch, beside a kernel or not."""
    (program,) = lowered(plan).programs
    does = [
        operation.body.comm_op if isinstance(operation.body, CommOverlap) else operation.body
        for operation in operations(program, kind)
    ]
    return [doe for doe in does if isinstance(doe, CommOp)]


@pytest.mark.parametrize(
    ("split", "forward", "backward"),
    [
        (False, [], [CollectiveType.ALL_REDUCE]),
        (True, [CollectiveType.ALL_GATHER], [CollectiveType.ALL_GATHER, CollectiveType.REDUCE_SCATTER]),
    ],
)
def test_what_tensor_parallelism_sends_for_a_projection(
    forward: list[CollectiveType], backward: list[CollectiveType], *, split: bool
) -> None:
    """What it reads is twice as wide: gathered, gathered again and its gradient scattered where the sequence is split.

    Its result is gathered whole, and so is the gradient of that where the sequence is split.
    """
    plan = planned(Layout(tp=2, sequence_parallel=split), model=replace(ROTARY, mtp_layers=1))
    for kind, wide in ((ActionKind.FORWARD, forward), (ActionKind.BACKWARD, backward)):
        found = joined(plan, kind)
        assert [comm_op.collective for comm_op in found if comm_op.payload == 2 * ACTIVATION] == wide
        own = [item.name for item in found if "projection" in item.name]
        assert own == ["gather projection"] * (kind is ActionKind.FORWARD) + ["gather projection gradient"] * (
            split and kind is ActionKind.BACKWARD
        )
        assert all(element.payload == ACTIVATION for element in found if "projection" in element.name)


@pytest.mark.parametrize("data", [DdpStrategy(), Zero1(), FullyShard()])
def test_their_gradients_are_reduced_with_all_others(data: object) -> None:
    """In four bytes each, beside those of the model; the embedding's are one on a rank that has it already."""
    layout = Layout(dp=2, data=data)  # type: ignore[arg-type]
    plans = (planned(layout, replace(TRAINING, global_batch=2), model) for model in (ROTARY, FURTHER))
    reduced = [_reduced(collectives(lowered(plan).programs[0])) for plan in plans]
    assert reduced[1] - reduced[0] == 4.0 * mtp_parameter_count(FURTHER)


def _reduced(found: list[CommOp]) -> float:
    """Bytes of gradients, without the norm of all."""
    kinds = (CollectiveType.ALL_REDUCE, CollectiveType.REDUCE_SCATTER)
    return sum(comm_op.payload for comm_op in found if comm_op.collective in kinds and "norm" not in comm_op.name)


def test_memory_of_stages_by_hand() -> None:
    """Stage 2 keeps, beside its layers', ids of two lookups (8 bytes each) and three activations for those behind.

    The next one keeps three logits and what they read, and no output. Messages: one each way of the wider ones.
    """
    layout = Layout(pp=4, layers_per_stage=ALONE, release_outputs=False)
    plan, plain = planned(layout, model=FURTHER), planned(replace(layout, layers_per_stage=(2, 1, 1, 0)), model=ROTARY)
    made, before = Activations(plan), Activations(plain)
    (run,) = FURTHER.mtp_stack
    layers = 2 * plan.layer_by_spec[run.spec].saved_bytes
    assert (
        made.saved_bytes(plan.stages[2]) - before.saved_bytes(plain.stages[2]) == layers + 2 * 8 * 64 + 2 * ACTIVATION
    )
    assert (
        made.saved_bytes(plan.stages[3])
        == plan.head.saved_bytes
        == before.bytes_of(ActivationKind.HEAD_SAVED) + 2 * (ACTIVATION + _loss(ROTARY))
    )
    held = (Footprint(item, load_framework(), 0.0) for item in (plan, plain))
    wide, narrow = (
        [footprint.receive_buffer_bytes(footprint.plan.stages_on_rank(rank)) for rank in range(4)] for footprint in held
    )
    assert [more - less for more, less in zip(wide, narrow, strict=True)] == [0, 0, 2 * ACTIVATION, 2 * ACTIVATION]


def _loss(model: TransformerModel) -> float:
    """Bytes that a loss keeps."""
    return planned(Layout(), model=model).head.operators[-1].saved_bytes


def test_without_them_programs_are_what_they_were() -> None:
    layout = Layout(pp=4, layers_per_stage=PipelineLayoutString((1, 1, 1, 1), (0, 0, 0, 0)))
    drawn, even = (lowered(planned(item, model=ROTARY)) for item in (layout, Layout(pp=4)))
    assert told(drawn) == told(even)
