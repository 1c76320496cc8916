"""Replicated and partly sharded data parallelism (DDP, ZeRO-1, ZeRO-2, torch.nn.DataParallel), against closed forms.

Two layers of forward f and backward b on each of two ranks, and an optimizer of o. Gradients are FP32: four bytes a
parameter. A bucket is as large as the head and a layer together, so backward makes two: the head and the second layer,
complete b after backward began; the first layer and the embedding, complete at its end.
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
from tests.closed_form.fixed_durations import Fixed, Seconds, Step

FORWARD, BACKWARD, OPTIMIZER = 1.0, 2.0, 0.5
EMBEDDING, LAYER, _, HEAD = (unit.parameter_count for unit in Step(2).units())
ALL = EMBEDDING + 2 * LAYER + HEAD
BUCKET = 4.0 * (HEAD + LAYER)


def step(data: DataParallelStrategy, microbatches: int = 1, dp: int = 2) -> Step:
    return Step(2, Layout(dp=dp, data=data), microbatches=microbatches)


def cost(**exchanges: Seconds) -> Fixed:
    named = {name.replace("_", " "): seconds for name, seconds in exchanges.items()}
    return Fixed(FORWARD, BACKWARD, optimizer=OPTIMIZER, exchanges=named)


def buckets(first: float, second: float) -> Seconds:
    """The bucket of the head takes `first` seconds, that of the embedding `second`."""
    return lambda exchange: first if exchange.payload == BUCKET else second


def per_byte(seconds: float) -> Seconds:
    return lambda exchange: exchange.payload * seconds


def test_buckets_hold_every_gradient_once() -> None:
    issued = step(DdpStrategy(bucket=BUCKET)).issued("reduce gradients")
    assert [comm_op.payload for comm_op in issued] == [BUCKET, 4.0 * (LAYER + EMBEDDING)]
    assert {item.collective for item in issued} == {CollectiveType.ALL_REDUCE}


@pytest.mark.parametrize(("first", "second"), [(0.5, 0.25), (2.0, 1.0), (7.0, 1.0), (0.0, 9.0)])
def test_ddp_with_overlap(first: float, second: float) -> None:
    """Forward ends at 2f. The first bucket is full at 2f + b, and its reduction lasts c1 beside the first layer's b.

    The second is full at 2f + 2b and goes when the stream is free: max(2f + b + c1, 2f + 2b) + c2, then o.
    """
    expected = max(2 * FORWARD + BACKWARD + first, 2 * FORWARD + 2 * BACKWARD) + second + OPTIMIZER
    assert step(DdpStrategy(bucket=BUCKET)).seconds(cost(reduce_gradients=buckets(first, second))) == expected


def test_ddp_without_overlap() -> None:
    """Everything is reduced in one piece after backward: 2 (f + b) + c + o."""
    plain = step(DdpStrategy(bucket=BUCKET, overlap=False))
    assert [comm_op.payload for comm_op in plain.issued("reduce gradients")] == [4.0 * ALL]
    assert plain.seconds(cost(reduce_gradients=3.0)) == 2 * (FORWARD + BACKWARD) + 3.0 + OPTIMIZER


@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_ddp_and_zero_1_accumulate_without_communication(microbatches: int) -> None:
    """Only the last microbatch's backward is cut into buckets; the others take 2 (f + b) each."""
    before = (microbatches - 1) * 2 * (FORWARD + BACKWARD)
    last = max(2 * FORWARD + BACKWARD + 3.0, 2 * FORWARD + 2 * BACKWARD) + 1.0 + OPTIMIZER
    for data in (DdpStrategy(bucket=BUCKET), Zero1(bucket=BUCKET)):
        accumulating = step(data, microbatches)
        assert len(accumulating.issued("reduce gradients")) == 2
        assert accumulating.seconds(cost(reduce_gradients=buckets(3.0, 1.0))) == before + last


@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_zero_2_reduces_after_every_microbatch(microbatches: int) -> None:
    """Sharded gradients cannot be accumulated whole, so both buckets of each backward are reduced.

    With c1 = 3 and c2 = 1 the last bucket of a microbatch is done at 2f + b + 4 = 2f + 2b + 2: 2 s into the next, which
    needs the stream only f + f + b = 4 s after its start. So microbatches do not delay each other.
    """
    sharding = step(Zero2(bucket=BUCKET), microbatches)
    assert len(sharding.issued("reduce gradients")) == 2 * microbatches
    assert {comm_op.collective for comm_op in sharding.issued("reduce gradients")} == {CollectiveType.REDUCE_SCATTER}
    before = (microbatches - 1) * 2 * (FORWARD + BACKWARD)
    last = 2 * FORWARD + BACKWARD + 3.0 + 1.0 + OPTIMIZER
    assert sharding.seconds(cost(reduce_gradients=buckets(3.0, 1.0))) == before + last


def test_zero_2_that_is_bound_by_its_reductions() -> None:
    """With c1 = 8 the stream never rests once the first bucket is full at 2f + b: m (c1 + c2) later it is done."""
    sharding = step(Zero2(bucket=BUCKET), 3)
    assert sharding.seconds(cost(reduce_gradients=buckets(8.0, 1.0))) == 4.0 + 3 * 9.0 + OPTIMIZER


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_without_overlap(stage: int) -> None:
    """Work and its reduction (ZeRO-2: one after each microbatch), then the optimizer, then the gather."""
    plain = step({1: Zero1, 2: Zero2}[stage](overlap=False), microbatches=3)
    reductions = {1: 1, 2: 3}[stage]
    expected = 3 * 2 * (FORWARD + BACKWARD) + reductions * 4.0 + OPTIMIZER + 5.0
    assert plain.seconds(cost(reduce_gradients=4.0, gather_parameters=5.0)) == expected
    assert [comm_op.payload for comm_op in plain.issued("gather parameters")] == [2.0 * ALL]


@pytest.mark.parametrize("gather", [0.25, 1.0, 3.0])
def test_zero_1_forward_waits_for_parameters_layer_by_layer(gather: float) -> None:
    """A bucket of one byte gathers each unit alone; embedding and head are free, a layer's gather takes g.

    The first layer starts at g and the second at max(2g, g + f); the head follows. Then 2b, and o.
    """
    layered = step(Zero1(bucket=1.0))
    payloads = [comm_op.payload for comm_op in layered.issued("gather parameters")]
    assert payloads == [2.0 * EMBEDDING, 2.0 * LAYER, 2.0 * LAYER, 2.0 * HEAD]

    def seconds(exchange: CommOp) -> float:
        return gather if exchange.payload == 2.0 * LAYER else 0.0

    forward = max(2 * gather, gather + FORWARD) + FORWARD
    assert layered.seconds(cost(gather_parameters=seconds)) == forward + 2 * BACKWARD + OPTIMIZER


def test_the_first_forward_alone_waits_for_parameters() -> None:
    """In one bucket: g + m (2f + 2b) + c + o, whatever m is."""
    whole = step(Zero1(bucket=1e9), microbatches=3)
    expected = 5.0 + 3 * 2 * (FORWARD + BACKWARD) + 4.0 + OPTIMIZER
    assert whole.seconds(cost(gather_parameters=5.0, reduce_gradients=4.0)) == expected


def test_one_replica_communicates_nothing() -> None:
    alone = step(DdpStrategy(), microbatches=2, dp=1)
    assert not alone.program.groups
    assert alone.seconds(cost(reduce_gradients=100.0)) == 2 * 2 * (FORWARD + BACKWARD) + OPTIMIZER


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
    fixed = Fixed(FORWARD, BACKWARD, loss=0.125, optimizer=OPTIMIZER, exchanges=phases)
    each = sum(phases.values()) + 2 * (FORWARD + BACKWARD) + 2 * 0.125
    naive = step(NaiveDataParallel(), microbatches, dp=4)
    trace = naive.run(fixed)
    first, others = (naive.program.programs[kind] for kind in (0, 1))
    assert naive.seconds(fixed) == microbatches * each + OPTIMIZER
    assert len(first.tasks) == microbatches * 9 + 1
    assert len(others.tasks) == microbatches * 7
    assert trace.simulated_ranks.tolist() == [0, 1], "the others all do the same"
