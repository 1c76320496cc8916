"""ZeRO-3 / FSDP of three layers, against recurrences derived by hand.

Units are embedding, three layers (forward f, backward b, gather g, reduction r) and head; embedding and head are free
in every respect. Gathers and reductions of a rank queue on one stream in the order of issue.
"""

from dataclasses import dataclass

import pytest

from clustersim.parallel.data_parallel_strategy import FullyShard
from clustersim.parallel.layout import Layout
from clustersim.program.task import CollectiveType
from tests.closed_form.fixed_durations import FixedDurations, Step

OPTIMIZER = 0.5


@dataclass(frozen=True)
class Case:
    forward: float
    backward: float
    gather: float
    reduction: float

    @property
    def durations(self) -> FixedDurations:
        return FixedDurations(
            self.forward,
            self.backward,
            optimizer=OPTIMIZER,
            comm_seconds={"gather layer": self.gather, "reduce layer": self.reduction},
        )


DURATION_CASES = [
    Case(
        forward=2.0, backward=4.0, gather=1.0, reduction=1.0
    ),  # compute hides all but the first gather and the last reduction
    Case(forward=1.0, backward=2.0, gather=3.0, reduction=3.0),  # bound by communication
    Case(forward=1.0, backward=2.0, gather=1.0, reduction=4.0),  # reductions delay the gathers behind them
    Case(forward=1.0, backward=2.0, gather=1.5, reduction=0.25),
    Case(forward=3.0, backward=1.0, gather=2.0, reduction=0.5),
    Case(forward=1.0, backward=2.0, gather=0.0, reduction=0.0),
]


def step(microbatches: int = 1, *, prefetch: int = 1, reshard: bool = True, overlap: bool = True) -> Step:
    data = FullyShard(prefetch=prefetch, reshard_after_forward=reshard, overlap=overlap)
    return Step(3, Layout(dp=2, data=data), microbatches=microbatches)


def forward_end(case: Case) -> float:
    """End of the third layer's forward with prefetch 1.

    The first layer's gather is issued at the start, the second's when compute reaches the first layer (at 0: the
    embedding is free), the third's when it reaches the second, at e1.
    """
    e1 = case.gather + case.forward
    e2 = max(e1, 2 * case.gather) + case.forward
    third = max(2 * case.gather, e1) + case.gather
    return max(e2, third) + case.forward


def backward_end(case: Case, forward_end_time: float) -> float:
    """End of the last reduction with prefetch 1, from forward's end e3.

    Issued in this order: G3 (with the head's backward, at e3), G2 (when compute reaches layer 3, also e3), R3 (layer
    3's reduction), G1 (when compute reaches layer 2), R2, R1; each starts when the one before it is done and what it
    waits for has happened. x3, x2, x1 are the ends of the layers' backwards.
    """
    gather3 = forward_end_time + case.gather
    x3 = gather3 + case.backward
    gather2 = gather3 + case.gather
    x2 = max(x3, gather2) + case.backward
    reduce3 = max(gather2, x3) + case.reduction
    gather1 = reduce3 + case.gather
    x1 = max(x2, gather1) + case.backward
    reduce2 = max(gather1, x2) + case.reduction
    return max(reduce2, x1) + case.reduction


@pytest.mark.parametrize("case", DURATION_CASES)
def test_prefetch_of_one_layer(case: Case) -> None:
    assert step().step_seconds(case.durations) == backward_end(case, forward_end(case)) + OPTIMIZER


def test_prefetch_hides_what_fits_behind_compute() -> None:
    """With g <= f and g + r <= b only the first gather, the first of backward and the last reduction are exposed."""
    case = DURATION_CASES[0]
    assert (
        step().step_seconds(case.durations)
        == 3 * (case.forward + case.backward) + 2 * case.gather + case.reduction + OPTIMIZER
    )


@pytest.mark.parametrize("case", DURATION_CASES)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_without_prefetch_everything_is_exposed(case: Case, microbatches: int) -> None:
    """Each gather waits for the previous unit and for that unit's reduction, which precedes it in the stream."""
    microbatch_seconds = 3 * (case.gather + case.forward) + 3 * (case.gather + case.backward + case.reduction)
    expected = microbatches * microbatch_seconds + OPTIMIZER
    assert step(microbatches, prefetch=0).step_seconds(case.durations) == expected
    assert step(microbatches, overlap=False).step_seconds(case.durations) == expected


@pytest.mark.parametrize("case", DURATION_CASES)
def test_without_reshard_parameters_are_gathered_once(case: Case) -> None:
    """Backward is compute with reductions queueing after it, as in DDP with one bucket per layer."""
    no_reshard_step = step(reshard=False)
    layer_ends = [forward_end(case) + layer * case.backward for layer in (1, 2, 3)]
    reduction_end = 0.0
    for layer_end in layer_ends:
        reduction_end = max(reduction_end, layer_end) + case.reduction
    assert no_reshard_step.step_seconds(case.durations) == reduction_end + OPTIMIZER
    assert len(no_reshard_step.issued_comm_ops("gather layer")) == 3


@pytest.mark.parametrize("prefetch", [5, 100])
def test_with_enough_prefetch_forward_pipelines_gathers_and_layers(prefetch: int) -> None:
    """All gathers are issued at the start, so layer k runs from max(k g, end of k - 1); here g = 3 and f = 1: 3 g + f.

    Backward: G3 G2 G1 at once, layers at e + g, e + 2g, e + 3g, reductions behind them: e + 3g, R3, R2; R1 after x1.
    """
    case = DURATION_CASES[1]
    e3 = 3 * case.gather + case.forward
    gathers_end = e3 + 3 * case.gather
    expected = gathers_end + 3 * case.reduction + OPTIMIZER
    assert gathers_end + 2 * case.reduction >= gathers_end + case.backward, (
        "the last backward is done before its reduction's turn"
    )
    assert step(prefetch=prefetch).step_seconds(case.durations) == expected


@pytest.mark.parametrize("microbatches", [1, 4])
def test_every_microbatch_gathers_twice_and_reduces_once(microbatches: int) -> None:
    """The head stays gathered from its forward to its backward, which follows at once."""
    sharded = step(microbatches)
    counts = {name: len(sharded.issued_comm_ops(name)) for name in ("gather layer", "gather embedding", "gather head")}
    assert counts == {
        "gather layer": 6 * microbatches,
        "gather embedding": 2 * microbatches,
        "gather head": microbatches,
    }
    for name, per_microbatch in (("reduce layer", 3), ("reduce embedding", 1), ("reduce head", 1)):
        assert len(sharded.issued_comm_ops(name)) == per_microbatch * microbatches


def test_gathers_use_the_compute_dtype_and_reductions_the_gradient_dtype() -> None:
    layer = step().fsdp_units()[1].parameter_count
    gather, reduction = step().issued_comm_ops("gather layer")[0], step().issued_comm_ops("reduce layer")[0]
    assert (gather.payload, gather.collective) == (2.0 * layer, CollectiveType.ALL_GATHER)
    assert (reduction.payload, reduction.collective) == (4.0 * layer, CollectiveType.REDUCE_SCATTER)
