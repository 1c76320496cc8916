"""Replicated and partly sharded data parallelism (DDP, ZeRO-1, ZeRO-2, torch.nn.DataParallel): closed forms.

Two layers of forward f and backward b on each of two ranks, and an optimizer of o. Gradients are FP32: four
bytes per parameter. A bucket is as large as the head and a layer together, so backward makes two: the head
and the second layer, complete b after backward began; the first layer and the embedding, complete at its end.
"""

import pytest

from clustersim.parallel.data_parallel_strategy import (
    DataParallelStrategy,
    DdpStrategy,
    NaiveDataParallel,
    Zero1,
    Zero2,
)
from clustersim.parallel.layout import Layout
from clustersim.program.task import CollectiveType, CommOp
from tests.closed_form.fixed_durations import CommSeconds, FixedDurations, Step

FORWARD, BACKWARD, OPTIMIZER = 1.0, 2.0, 0.5
EMBEDDING, LAYER, _, HEAD = (unit.parameter_count for unit in Step(2).fsdp_units())
ALL_PARAMETERS = EMBEDDING + 2 * LAYER + HEAD
BUCKET = 4.0 * (HEAD + LAYER)


def step(data: DataParallelStrategy, microbatches: int = 1, dp: int = 2) -> Step:
    return Step(2, Layout(dp=dp, data=data), microbatches=microbatches)


def durations(**comm_seconds: CommSeconds) -> FixedDurations:
    seconds_by_name = {name.replace("_", " "): seconds for name, seconds in comm_seconds.items()}
    return FixedDurations(FORWARD, BACKWARD, optimizer=OPTIMIZER, comm_seconds=seconds_by_name)


def bucket_seconds(head_bucket: float, embedding_bucket: float) -> CommSeconds:
    """The bucket of the head takes `head_bucket` seconds, that of the embedding `embedding_bucket`."""
    return lambda comm_op: head_bucket if comm_op.payload == BUCKET else embedding_bucket


def per_byte(seconds: float) -> CommSeconds:
    return lambda comm_op: comm_op.payload * seconds


def test_buckets_hold_every_gradient_once() -> None:
    issued = step(DdpStrategy(bucket=BUCKET)).issued_comm_ops("reduce gradients")
    assert [comm_op.payload for comm_op in issued] == [BUCKET, 4.0 * (LAYER + EMBEDDING)]
    assert {comm_op.collective for comm_op in issued} == {CollectiveType.ALL_REDUCE}


@pytest.mark.parametrize(("first", "second"), [(0.5, 0.25), (2.0, 1.0), (7.0, 1.0), (0.0, 9.0)])
def test_ddp_with_overlap(first: float, second: float) -> None:
    """Forward ends at 2f. The first bucket is full at 2f + b; its reduction of c1 overlaps the first layer's b.

    The second is full at 2f + 2b and starts when the stream is free: max(2f + b + c1, 2f + 2b) + c2, then o.
    """
    expected = max(2 * FORWARD + BACKWARD + first, 2 * FORWARD + 2 * BACKWARD) + second + OPTIMIZER
    assert (
        step(DdpStrategy(bucket=BUCKET)).step_seconds(durations(reduce_gradients=bucket_seconds(first, second)))
        == expected
    )


def test_ddp_without_overlap() -> None:
    """All gradients are reduced in one collective after backward: 2 (f + b) + c + o."""
    no_overlap_step = step(DdpStrategy(bucket=BUCKET, overlap=False))
    assert [comm_op.payload for comm_op in no_overlap_step.issued_comm_ops("reduce gradients")] == [
        4.0 * ALL_PARAMETERS
    ]
    assert no_overlap_step.step_seconds(durations(reduce_gradients=3.0)) == 2 * (FORWARD + BACKWARD) + 3.0 + OPTIMIZER


@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_ddp_and_zero_1_accumulate_without_communication(microbatches: int) -> None:
    """Only the last microbatch's backward is split into buckets; the others take 2 (f + b) each."""
    accumulation_seconds = (microbatches - 1) * 2 * (FORWARD + BACKWARD)
    last_microbatch_seconds = max(2 * FORWARD + BACKWARD + 3.0, 2 * FORWARD + 2 * BACKWARD) + 1.0 + OPTIMIZER
    for data in (DdpStrategy(bucket=BUCKET), Zero1(bucket=BUCKET)):
        accumulation_step = step(data, microbatches)
        assert len(accumulation_step.issued_comm_ops("reduce gradients")) == 2
        assert (
            accumulation_step.step_seconds(durations(reduce_gradients=bucket_seconds(3.0, 1.0)))
            == accumulation_seconds + last_microbatch_seconds
        )


@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_zero_2_reduces_after_every_microbatch(microbatches: int) -> None:
    """Unsharded gradients are not kept for accumulation, so both buckets of each backward are reduced.

    With c1 = 3 and c2 = 1 the last bucket of a microbatch is done at 2f + b + 4 = 2f + 2b + 2: 2 s into the next,
    which needs the stream only f + f + b = 4 s after its start. So microbatches do not delay each other.
    """
    zero2_step = step(Zero2(bucket=BUCKET), microbatches)
    assert len(zero2_step.issued_comm_ops("reduce gradients")) == 2 * microbatches
    assert {comm_op.collective for comm_op in zero2_step.issued_comm_ops("reduce gradients")} == {
        CollectiveType.REDUCE_SCATTER
    }
    earlier_seconds = (microbatches - 1) * 2 * (FORWARD + BACKWARD)
    last_microbatch_seconds = 2 * FORWARD + BACKWARD + 3.0 + 1.0 + OPTIMIZER
    assert (
        zero2_step.step_seconds(durations(reduce_gradients=bucket_seconds(3.0, 1.0)))
        == earlier_seconds + last_microbatch_seconds
    )


def test_zero_2_bound_by_reductions() -> None:
    """With c1 = 8 the stream is busy from 2f + b, when the first bucket is full, for m (c1 + c2)."""
    zero2_step = step(Zero2(bucket=BUCKET), 3)
    assert zero2_step.step_seconds(durations(reduce_gradients=bucket_seconds(8.0, 1.0))) == 4.0 + 3 * 9.0 + OPTIMIZER


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_without_overlap(stage: int) -> None:
    """Work and its reduction (ZeRO-2: one after each microbatch), then the optimizer, then the gather."""
    no_overlap_step = step({1: Zero1, 2: Zero2}[stage](overlap=False), microbatches=3)
    reductions = {1: 1, 2: 3}[stage]
    expected = 3 * 2 * (FORWARD + BACKWARD) + reductions * 4.0 + OPTIMIZER + 5.0
    assert no_overlap_step.step_seconds(durations(reduce_gradients=4.0, gather_parameters=5.0)) == expected
    assert [comm_op.payload for comm_op in no_overlap_step.issued_comm_ops("gather parameters")] == [
        2.0 * ALL_PARAMETERS
    ]


@pytest.mark.parametrize("gather", [0.25, 1.0, 3.0])
def test_zero_1_forward_waits_for_parameters_layer_by_layer(gather: float) -> None:
    """A bucket of one byte gathers each unit separately; embedding and head are free, a layer's gather takes g.

    The first layer starts at g and the second at max(2g, g + f); the head follows. Then 2b, and o.
    """
    zero1_step = step(Zero1(bucket=1.0, overlap_param_gather=True))
    payloads = [comm_op.payload for comm_op in zero1_step.issued_comm_ops("gather parameters")]
    assert payloads == [2.0 * EMBEDDING, 2.0 * LAYER, 2.0 * LAYER, 2.0 * HEAD]

    def gather_seconds(comm_op: CommOp) -> float:
        return gather if comm_op.payload == 2.0 * LAYER else 0.0

    forward = max(2 * gather, gather + FORWARD) + FORWARD
    assert zero1_step.step_seconds(durations(gather_parameters=gather_seconds)) == forward + 2 * BACKWARD + OPTIMIZER


def test_only_the_first_forward_waits_for_parameters() -> None:
    """With one bucket: g + m (2f + 2b) + c + o for any m."""
    one_bucket_step = step(Zero1(bucket=1e9), microbatches=3)
    expected = 5.0 + 3 * 2 * (FORWARD + BACKWARD) + 4.0 + OPTIMIZER
    assert one_bucket_step.step_seconds(durations(gather_parameters=5.0, reduce_gradients=4.0)) == expected


def test_one_replica_communicates_nothing() -> None:
    single_replica = step(DdpStrategy(), microbatches=2, dp=1)
    assert not single_replica.program.groups
    assert single_replica.step_seconds(durations(reduce_gradients=100.0)) == 2 * 2 * (FORWARD + BACKWARD) + OPTIMIZER


@pytest.mark.parametrize("microbatches", [1, 3])
def test_torch_data_parallel_is_the_sum_of_its_phases(microbatches: int) -> None:
    """Nothing overlaps.

    Each microbatch replicates weights, scatters tokens, runs forward, gathers logits, computes the loss and its
    gradient on the first GPU, scatters that, runs backward and reduces; one optimizer step on the first GPU ends it.
    """
    phases = {
        "replicate weights": 1.0,
        "scatter tokens": 0.25,
        "gather logits": 0.5,
        "scatter gradients of logits": 0.75,
        "reduce gradients": 2.0,
    }
    durations = FixedDurations(FORWARD, BACKWARD, loss=0.125, optimizer=OPTIMIZER, comm_seconds=phases)
    microbatch_seconds = sum(phases.values()) + 2 * (FORWARD + BACKWARD) + 2 * 0.125
    torch_dp_step = step(NaiveDataParallel(), microbatches, dp=4)
    trace = torch_dp_step.run(durations)
    first_rank, other_ranks = (torch_dp_step.program.programs[program_index] for program_index in (0, 1))
    assert torch_dp_step.step_seconds(durations) == microbatches * microbatch_seconds + OPTIMIZER
    assert len(first_rank.tasks) == microbatches * 9 + 1
    assert len(other_ranks.tasks) == microbatches * 7
    assert trace.simulated_ranks.tolist() == [0, 1], "the others all do the same"
