"""ZeRO-3 / FSDP of three layers, against recurrences derived by hand.

Units are embedding, three layers (forward f, backward b, gather g, reduction r) and head; embedding and head are free
in every respect. Gathers and reductions of a rank queue on one stream in the order of issue.
"""

from dataclasses import dataclass

import pytest

from clustersim.parallel.data_parallel_strategy import FullyShard
from clustersim.parallel.layout import Layout
from clustersim.program.task import CollectiveType
from tests.closed_form.fixed_durations import Fixed, Step

OPTIMIZER = 0.5


@dataclass(frozen=True)
class Case:
    f: float
    b: float
    g: float
    r: float

    @property
    def cost(self) -> Fixed:
        return Fixed(self.f, self.b, optimizer=OPTIMIZER, exchanges={"gather layer": self.g, "reduce layer": self.r})


CASES = [
    Case(f=2.0, b=4.0, g=1.0, r=1.0),  # compute hides all but the first gather and the last reduction
    Case(f=1.0, b=2.0, g=3.0, r=3.0),  # bound by communication
    Case(f=1.0, b=2.0, g=1.0, r=4.0),  # reductions delay the gathers behind them
    Case(f=1.0, b=2.0, g=1.5, r=0.25),
    Case(f=3.0, b=1.0, g=2.0, r=0.5),
    Case(f=1.0, b=2.0, g=0.0, r=0.0),
]


def step(microbatches: int = 1, *, prefetch: int = 1, reshard: bool = True, overlap: bool = True) -> Step:
    data = FullyShard(prefetch=prefetch, reshard_after_forward=reshard, overlap=overlap)
    return Step(3, Layout(dp=2, data=data), microbatches=microbatches)


def forward(case: Case) -> float:
    """End of the third layer's forward with prefetch 1.

    The first layer's gather is issued at the start, the second's when compute reaches the first layer (at 0: the
    embedding is free), the third's when it reaches the second, at e1.
    """
    e1 = case.g + case.f
    e2 = max(e1, 2 * case.g) + case.f
    third = max(2 * case.g, e1) + case.g
    return max(e2, third) + case.f


def backward(case: Case, e3: float) -> float:
    """End of the last reduction with prefetch 1, from forward's end e3.

    Issued in this order: G3 (with the head's backward, at e3), G2 (when compute reaches layer 3, also e3), R3 (layer
    3's reduction), G1 (when compute reaches layer 2), R2, R1; each starts when the one before it is done and what it
    waits for has happened. x3, x2, x1 are the ends of the layers' backwards.
    """
    gather3 = e3 + case.g
    x3 = gather3 + case.b
    gather2 = gather3 + case.g
    x2 = max(x3, gather2) + case.b
    reduce3 = max(gather2, x3) + case.r
    gather1 = reduce3 + case.g
    x1 = max(x2, gather1) + case.b
    reduce2 = max(gather1, x2) + case.r
    return max(reduce2, x1) + case.r


@pytest.mark.parametrize("case", CASES)
def test_prefetch_of_one_layer(case: Case) -> None:
    assert step().seconds(case.cost) == backward(case, forward(case)) + OPTIMIZER


def test_prefetch_hides_what_fits_behind_compute() -> None:
    """With g <= f and g + r <= b only the first gather, the first of backward and the last reduction are exposed."""
    case = CASES[0]
    assert step().seconds(case.cost) == 3 * (case.f + case.b) + 2 * case.g + case.r + OPTIMIZER


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_without_prefetch_everything_is_exposed(case: Case, microbatches: int) -> None:
    """Each gather waits for the unit before it, and for that unit's reduction, which is before it in the stream."""
    each = 3 * (case.g + case.f) + 3 * (case.g + case.b + case.r)
    expected = microbatches * each + OPTIMIZER
    assert step(microbatches, prefetch=0).seconds(case.cost) == expected
    assert step(microbatches, overlap=False).seconds(case.cost) == expected


@pytest.mark.parametrize("case", CASES)
def test_parameters_that_stay_gathered_are_not_gathered_again(case: Case) -> None:
    """Backward is compute with reductions queueing behind it, as in DDP with a bucket for each layer."""
    kept = step(reshard=False)
    done = [forward(case) + place * case.b for place in (1, 2, 3)]
    reduced = 0.0
    for end in done:
        reduced = max(reduced, end) + case.r
    assert kept.seconds(case.cost) == reduced + OPTIMIZER
    assert len(kept.issued("gather layer")) == 3


@pytest.mark.parametrize("prefetch", [5, 100])
def test_with_enough_prefetch_forward_is_a_pipe_of_gathers_and_layers(prefetch: int) -> None:
    """All gathers are issued at the start, so layer k runs from max(k g, end of k - 1); here g = 3 and f = 1: 3 g + f.

    Backward: G3 G2 G1 at once, layers at e + g, e + 2g, e + 3g, reductions behind them: e + 3g, R3, R2; R1 after x1.
    """
    case = CASES[1]
    e3 = 3 * case.g + case.f
    gathered = e3 + 3 * case.g
    expected = gathered + 3 * case.r + OPTIMIZER
    assert gathered + 2 * case.r >= gathered + case.b, "the last backward is done before its reduction's turn"
    assert step(prefetch=prefetch).seconds(case.cost) == expected


@pytest.mark.parametrize("microbatches", [1, 4])
def test_every_microbatch_gathers_twice_and_reduces_once(microbatches: int) -> None:
    """The head stays gathered from its forward to its backward, which follows at once."""
    sharded = step(microbatches)
    counts = {name: len(sharded.issued(name)) for name in ("gather layer", "gather embedding", "gather head")}
    assert counts == {
        "gather layer": 6 * microbatches,
        "gather embedding": 2 * microbatches,
        "gather head": microbatches,
    }
    for name, many in (("reduce layer", 3), ("reduce embedding", 1), ("reduce head", 1)):
        assert len(sharded.issued(name)) == many * microbatches


def test_gathers_move_compute_width_and_reductions_gradient_width() -> None:
    layer = step().units()[1].parameter_count
    gather, reduction = step().issued("gather layer")[0], step().issued("reduce layer")[0]
    assert (gather.payload, gather.collective) == (2.0 * layer, CollectiveType.ALL_GATHER)
    assert (reduction.payload, reduction.collective) == (4.0 * layer, CollectiveType.REDUCE_SCATTER)
