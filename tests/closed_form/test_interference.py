"""Interference of overlapping collectives with kernels, in lowered training steps.

A kernel runs at 1/(1 + φ) of its rate while a collective of its GPU's DP stream is in flight, so a collective
of c seconds that overlaps kernels throughout adds c φ/(1 + φ) s to them, and a kernel of k seconds overlapped
throughout takes k (1 + φ).
"""

import pytest

from clustersim.cost.interference import Interference
from clustersim.parallel.data_parallel_strategy import DataParallelStrategy, DdpStrategy, FullyShard
from clustersim.parallel.layout import Layout
from clustersim.program.task import CollectiveType, CommOp
from tests.closed_form.degraded_step import DegradedStep, StepRun
from tests.closed_form.fixed_durations import MODEL, FixedDurations, Step

LAYERS = 4
F, B, OPTIMIZER = 1.0, 2.0, 0.5
PROJECTION = 4.0 * 3 * MODEL.hidden**2
"""Bytes of a layer's first gradients behind its attention core: those of queries, keys and values."""
INTERFERENCE_LEVELS = [0.0, 0.25, 1.0]


def interference_seconds(seconds: float, interference: float) -> float:
    """Seconds that a collective of given duration adds to the kernels it overlaps."""
    return seconds * interference / (1 + interference)


def run_ddp(reduction: float, interference: float, data: DataParallelStrategy | None = None) -> StepRun:
    """Four layers, each with one reduction at the end of its backward (`qkv_reduction_durations`)."""
    step = Step(LAYERS, Layout(dp=2, data=data or DdpStrategy(bucket=1.0)))
    return DegradedStep(step, qkv_reduction_durations(reduction), interference=interference).checked_run


def qkv_reduction_durations(reduction: float) -> FixedDurations:
    """Every gradient is a bucket; those of queries, keys and values take `reduction_op` seconds, all others 0."""

    def bucket_seconds(comm_op: CommOp) -> float:
        return reduction if comm_op.payload == PROJECTION else 0.0

    return FixedDurations(F, B, optimizer=OPTIMIZER, comm_seconds={"reduce gradients": bucket_seconds})


@pytest.mark.parametrize("interference", INTERFERENCE_LEVELS)
@pytest.mark.parametrize("reduction", [0.0, 0.5, 1.0, 2.0])
def test_ddp_with_reductions_shorter_than_a_backward(reduction: float, interference: float) -> None:
    """Each of the L - 1 first reductions overlaps the backward of the layer below, which ends after it.

    L (f + b) + (L - 1) r φ/(1 + φ), then the last reduction and the optimizer, which overlap nothing.
    """
    slowdown_seconds = (LAYERS - 1) * interference_seconds(reduction, interference)
    run = run_ddp(reduction, interference)
    assert run.seconds == pytest.approx(LAYERS * (F + B) + slowdown_seconds + reduction + OPTIMIZER)
    categories = {
        "compute": LAYERS * (F + B),
        "optimizer": OPTIMIZER,
        "exposed dp": reduction,
        "slowed by communication": slowdown_seconds,
    }
    assert run.nonzero_categories(0) == pytest.approx({name: value for name, value in categories.items() if value})
    assert float(run.trace.slowed.sum()) == pytest.approx(slowdown_seconds), "one class was run"


@pytest.mark.parametrize("interference", INTERFERENCE_LEVELS)
@pytest.mark.parametrize("reduction", [4.0, 7.0])
def test_ddp_bound_by_its_reductions(reduction: float, interference: float) -> None:
    """With r >= b (1 + φ) the stream is always busy once the last layer's backward has ended, at L f + b.

    All other backwards are slowed throughout; this is hidden, as L r s follow in any case.
    """
    run = run_ddp(reduction, interference)
    assert run.seconds == pytest.approx(LAYERS * F + B + LAYERS * reduction + OPTIMIZER)
    slowdown_seconds = (LAYERS - 1) * B * interference
    hidden = (LAYERS - 1) * B * (1 + interference)
    assert run.nonzero_categories(0).get("slowed by communication", 0.0) == pytest.approx(slowdown_seconds)
    assert run.nonzero_categories(0)["exposed dp"] == pytest.approx(LAYERS * reduction - hidden)


def test_reductions_after_all_kernels_slow_none() -> None:
    run = run_ddp(0.5, 1.0, DdpStrategy(overlap=False))
    assert "slowed by communication" not in run.nonzero_categories(0)
    assert run.seconds == LAYERS * (F + B) + OPTIMIZER


def test_the_ddp_critical_path_includes_interference() -> None:
    """Compute, the slowdown by reductions of 1 s at φ = 1, the last reduction, and the optimizer."""
    categories = {"compute": 12.0, "optimizer": OPTIMIZER, "exposed dp": 1.0, "slowed by communication": 1.5}
    assert run_ddp(1.0, 1.0).path == pytest.approx(categories)


def run_fsdp(interference: float, *, prefetch: int = 1) -> StepRun:
    """Three layers of forward 2 and backward 4; gathers and reductions of 1."""
    durations = FixedDurations(2.0, 4.0, optimizer=OPTIMIZER, comm_seconds={"gather layer": 1.0, "reduce layer": 1.0})
    step = Step(3, Layout(dp=2, data=FullyShard(prefetch=prefetch)))
    return DegradedStep(step, durations, interference=interference).checked_run


@pytest.mark.parametrize("interference", INTERFERENCE_LEVELS)
def test_fsdp_with_prefetch(interference: float) -> None:
    """Each collective takes 1 s, and costs kernels beside it l = φ/(1 + φ).

    Forward: the first gather is waited for (1); gathers of the second and third layer are beside the first and second
    (2 + l each); nothing is beside the third (2). Backward: the third layer's gather is waited for (1), and that of the
    second is beside its backward (4 + l); beside the second's are the third's reduction, then the first's gather
    (4 + 2l); beside the first's is the second's reduction (4 + l). Its own (1) and the optimizer end the step.
    """
    slowdown_seconds = 6 * interference_seconds(1.0, interference)
    run = run_fsdp(interference)
    assert run.seconds == pytest.approx(1 + 6 + 1 + 12 + 1 + OPTIMIZER + slowdown_seconds)
    assert run.nonzero_categories(0)["exposed dp"] == pytest.approx(3.0)
    assert run.nonzero_categories(0).get("slowed by communication", 0.0) == pytest.approx(slowdown_seconds)


def test_fsdp_with_different_interference_of_gathers_and_reductions() -> None:
    """As with one number, but of the six collectives beside kernels four gather (φ = 1/4), two reduce (φ = 1).

    So l = 1/5 and l = 1/2: the second layer's backward, beside the third's reduction, then the first's gather, lasts
    4 + 1/2 + 1/5.
    """
    levels = dict(Interference.uniform(0.25).kernels)
    levels |= {pair: 1.0 for pair in levels if pair[0] is CollectiveType.REDUCE_SCATTER}
    durations = FixedDurations(2.0, 4.0, optimizer=OPTIMIZER, comm_seconds={"gather layer": 1.0, "reduce layer": 1.0})
    step = Step(3, Layout(dp=2, data=FullyShard(prefetch=1)))
    run = DegradedStep(step, durations, interference=Interference.from_measurements(levels, {})).checked_run
    slowdown_seconds = 4 * interference_seconds(1.0, 0.25) + 2 * interference_seconds(1.0, 1.0)
    assert run.seconds == pytest.approx(1 + 6 + 1 + 12 + 1 + OPTIMIZER + slowdown_seconds)
    assert run.nonzero_categories(0)["slowed by communication"] == pytest.approx(slowdown_seconds)


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_a_collective_that_waits_for_a_slow_rank_slows_nothing(microbatches: int) -> None:
    """Of two ranks one is at half speed; φ = 1, reductions of 1 s, so l = 1/2 is lost to one that is beside kernels.

    A rank that is not slow works T = m L f + (m - 1) L b until its first reduction (the head's, of no time), then L b;
    the slow one works 2T, then 2b for the last layer and 2b + l for each of the others. So data first move at 2T + 2b,
    when the other has done its L b already and only waits. The last reduction starts at 2T + 2 L b + (L - 1) l, and the
    slow rank's optimizer follows it.
    """
    run = DegradedStep(
        Step(LAYERS, Layout(dp=2, data=DdpStrategy(bucket=1.0)), microbatches=microbatches),
        qkv_reduction_durations(1.0), {1: 0.5}, interference=1.0,
    ).checked_run  # fmt: skip
    first_reduction_time = microbatches * LAYERS * F + (microbatches - 1) * LAYERS * B
    last_reduction_time = 2 * first_reduction_time + 2 * LAYERS * B + (LAYERS - 1) * interference_seconds(1.0, 1.0)
    assert run.seconds == pytest.approx(last_reduction_time + 1.0 + 2 * OPTIMIZER)
    assert first_reduction_time + LAYERS * B <= 2 * first_reduction_time + 2 * B
    assert run.nonzero_categories(0).get("slowed by communication", 0.0) == 0.0
    assert run.nonzero_categories(1)["slowed by communication"] == pytest.approx(
        (LAYERS - 1) * interference_seconds(1.0, 1.0)
    )
