"""Operations inside blocks, worked out after the run: who met inside them, and what was beside them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from clustersim import RenderedResult, Scenario, simulate
from clustersim.cost.device_models import DeviceModel, DeviceModels, ThrottledKernels
from clustersim.cost.interference import Interference
from clustersim.cost.jitter import Jitter
from clustersim.cost.segment import SegmentCost
from clustersim.engine.engine import simulate_program
from clustersim.engine.recording import operation_trace as inside_module
from clustersim.engine.recording.operation_trace import OperationTraceReader
from clustersim.engine.vectorized import segment_durations
from clustersim.program.program import Program
from clustersim.program.task import Stream
from clustersim.symmetry.refinement import SymmetryClasses, singleton_classes
from tests.engine.fake_costs import UnitCost
from tests.engine.small_programs import compute, exchange, meet, replicated
from tests.strategies import fold

Span = tuple[int, int, float, float]
"""(task, operation, start, end)"""


def cost(made: Program, speeds: Sequence[float], interference: float = 0.0) -> SegmentCost:
    unit = UnitCost(made)
    values = sorted(set(speeds))
    machines = tuple(DeviceModel(ThrottledKernels(unit, speed), Interference.uniform(interference)) for speed in values)
    return SegmentCost(made, DeviceModels(machines, np.array([values.index(speed) for speed in speeds])), unit)


def inside(
    made: Program,
    blocks: SegmentCost,
    classes: SymmetryClasses | None = None,
    *,
    coalesce: bool = True,
    jitter: Jitter | None = None,
) -> OperationTraceReader:
    classes = singleton_classes(made) if classes is None else classes
    return OperationTraceReader(
        made, classes, blocks, jitter, *simulate_program(made, classes, blocks, coalesce=coalesce, jitter=jitter)
    )


def spans(found: OperationTraceReader, rank: int) -> list[Span]:
    of = found.rank_spans(rank)
    columns = of.task, of.operation, of.start, of.end
    return list(zip(*(column.tolist() for column in columns), strict=True))


BLOCK = (1.0, exchange("tp", 2.0), 1.0)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_meet_inside_blocks(ranks: int) -> None:
    """One of two at half speed, as two ranks one by one or four as arrays: it comes at 2, the other waits from 1.

    The pause shows between the first operation's end and the second's start.
    """
    made = replicated([compute(*BLOCK)], ranks, {"tp": np.arange(ranks).reshape(-1, 2).tolist()})
    found = inside(made, cost(made, [1.0, 0.5] * (ranks // 2)))
    for rank in range(0, ranks, 2):
        assert spans(found, rank) == [(0, 0, 0.0, 1.0), (0, 1, 2.0, 4.0), (0, 2, 4.0, 5.0)]
        assert spans(found, rank + 1) == [(0, 0, 0.0, 2.0), (0, 1, 2.0, 4.0), (0, 2, 4.0, 6.0)]


def test_a_rank_waits_for_one_that_it_meets_only_through_others() -> None:
    """Rank 3 at half speed delays 2 in its row, which delays 0 in its column: 1 s of kernel ends at 2 on rank 3.

    tp joins (0, 1) and (2, 3), cp joins (0, 2) and (1, 3). Both tp exchanges last 1 s: (0, 1) are through at 2, (2, 3)
    at 3, and all go on with cp at 3.
    """
    steps = [compute(1.0, exchange("tp", 1.0), exchange("cp", 1.0))]
    made = replicated(steps, 4, {"tp": [[0, 1], [2, 3]], "cp": [[0, 2], [1, 3]]})
    found = inside(made, cost(made, [1.0, 1.0, 1.0, 0.5]))
    assert spans(found, 0) == [(0, 0, 0.0, 1.0), (0, 1, 1.0, 2.0), (0, 2, 3.0, 4.0)]
    assert spans(found, 2) == [(0, 0, 0.0, 1.0), (0, 1, 2.0, 3.0), (0, 2, 3.0, 4.0)]
    assert spans(found, 3) == [(0, 0, 0.0, 2.0), (0, 1, 2.0, 3.0), (0, 2, 3.0, 4.0)]


def test_a_rank_waits_for_one_that_is_three_meetings_away() -> None:
    """A ring of six, joined by tp and cp in turn: rank 3 is slow, and three meetings follow its kernel.

    tp joins (0, 1), (2, 3), (4, 5), cp (1, 2), (3, 4), (5, 0), each for 1 s: first tp delays 2, then cp 1 and 4, then
    tp 0 and 5, by 1 s.
    """
    ring = {"tp": [[0, 1], [2, 3], [4, 5]], "cp": [[1, 2], [3, 4], [5, 0]]}
    made = replicated([compute(1.0, exchange("tp", 1.0), exchange("cp", 1.0), exchange("tp", 1.0))], 6, ring)
    found = inside(made, cost(made, [1.0, 1.0, 1.0, 0.5, 1.0, 1.0]))
    assert spans(found, 0) == [(0, 0, 0.0, 1.0), (0, 1, 1.0, 2.0), (0, 2, 2.0, 3.0), (0, 3, 4.0, 5.0)]
    assert spans(found, 1) == [(0, 0, 0.0, 1.0), (0, 1, 1.0, 2.0), (0, 2, 3.0, 4.0), (0, 3, 4.0, 5.0)]


BESIDE = [compute(1.0), compute(1.0, exchange("tp", 1.0), 1.0), meet(2.0, after=(0,)), compute(1.0)]
"""A reduction of 2 s from the end of the first block on."""


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("coalesce", [False, True])
def test_a_collective_beside_slows_the_operations_that_it_overlaps_and_no_others(ranks: int, coalesce: bool) -> None:
    """With φ = 1 and the reduction from 1 to 3: the second block's kernel takes 2 s, and fills it."""
    groups = {"tp": [[rank] for rank in range(ranks)], "dp": [list(range(ranks))]}
    made = replicated(BESIDE, ranks, groups)
    found = inside(made, cost(made, [1.0] * ranks, 1.0), coalesce=coalesce)
    expected = [(0, 0, 0.0, 1.0), (1, 0, 1.0, 3.0), (1, 1, 3.0, 4.0), (1, 2, 4.0, 5.0), (3, 0, 5.0, 6.0)]
    assert spans(found, ranks - 1) == expected


def test_runs_of_one_block_have_each_their_own_collectives_beside_them() -> None:
    """4 s of kernel with φ = 1: beside two collectives from 1 to 3, then beside the last one from 6 to 8."""
    block = compute(4.0)
    reductions = [meet(1.0, after=(0,)), meet(1.0, after=(0,))]
    made = replicated([compute(1.0), block, *reductions, block, meet(2.0, after=(1,))], 1, {"dp": [[0]]})
    expected = [(0, 0, 0.0, 1.0), (1, 0, 1.0, 6.0), (4, 0, 6.0, 11.0)]
    assert spans(inside(made, cost(made, [1.0], 1.0)), 0) == expected


def test_a_rank_shows_the_operations_of_the_one_that_stands_for_it() -> None:
    """Of six ranks in pairs, rank 5 is slow: 0 stands for 1, 2 and 3; rank 4 meets the slow one."""
    made = replicated([compute(*BLOCK)], 6, {"tp": [[0, 1], [2, 3], [4, 5]]})
    blocks = cost(made, [1.0] * 5 + [0.5])
    folded, every = inside(made, blocks, fold(made, blocks)), inside(made, blocks)
    assert folded.trace.simulated_ranks.tolist() == [0, 4, 5]
    for rank in range(6):
        assert spans(folded, rank) == spans(every, rank)
    assert folded.rank_spans(3).rank.tolist() == [0, 0, 0]


@pytest.mark.parametrize("ranks", [1, 6])
def test_every_kernel_has_the_factor_of_its_place_in_the_rank_s_program(ranks: int) -> None:
    """Factors are drawn for the first to the last operation of all blocks, exchanges included, which do not vary."""
    jitter, groups = Jitter(0.1, seed=4), {"tp": [[rank] for rank in range(ranks)]}
    made = replicated([compute(*BLOCK), compute(2.0), compute(*BLOCK)], ranks, groups)
    found = inside(made, cost(made, [1.0] * ranks), jitter=jitter)
    for rank in range(ranks):
        own = np.array([1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0])
        varied = own * jitter.rank_factors(rank, 7)
        varied[[1, 5]] = 2.0
        of = found.rank_spans(rank)
        assert (of.end - of.start).tolist() == pytest.approx(varied.tolist())
        assert of.end.tolist() == pytest.approx(np.cumsum(varied).tolist())


def groups_of(ranks: int) -> Mapping[str, list[list[int]]]:
    return {"tp": [list(range(ranks))]}


def test_ranks_with_jitter_go_on_together_at_every_exchange() -> None:
    """The n-th exchange starts at the sum of the slowest kernels so far, and of the exchanges before it."""
    jitter, ranks = Jitter(0.1, seed=1), 5
    made = replicated([compute(1.0, exchange("tp", 2.0), 1.0, exchange("tp", 3.0))], ranks, groups_of(ranks))
    found = inside(made, cost(made, [1.0] * ranks), jitter=jitter)
    factors = np.stack([jitter.rank_factors(rank, 4) for rank in range(ranks)])
    first, second = factors[:, 0].max(), factors[:, 2].max()
    for rank in range(ranks):
        start = found.rank_spans(rank).start
        assert start[1] == pytest.approx(first)
        assert start[3] == pytest.approx(first + 2.0 + second)


SLOW = {"disturbances": {"slow": [{"gpu": 1, "speed": 0.8}]}}
JITTER = {"disturbances": {"jitter": "5 %"}}
RUNS: dict[str, dict[str, Any]] = {
    "jitter": {"layout": {"tp": 4, "pp": 2}, **JITTER},
    "slow": {"layout": {"tp": 4, "pp": 2}, **SLOW},
    "kernels beside exchanges of their own": {"layout": {"tp": 4, "pp": 2, "tensor_overlap": True}, **JITTER},
    "FSDP": {"layout": {"tp": 2, "dp": 4, "data": "fsdp"}, **SLOW},
    "FSDP, jitter": {"layout": {"dp": 8, "data": "fsdp"}, **JITTER},
    "many collectives beside": {"layout": {"tp": 2, "dp": 4, "data": {"ddp": {"bucket": "64 KiB"}}}, **JITTER},
}


def ran(case: str) -> RenderedResult:
    """24 sequences a step on eight GPUs, whose blocks were run as arrays: none of their operations is written."""
    model = {"family": "llama", "layers": 4, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 128, "vocab": 256}
    mapping: dict[str, Any] = {
        "model": model,
        "cluster": {"name": "dgx-h100", "gpus": 8},
        "cost": {"symmetry": "off", "interference": 0.5, "network": "uncontended"},
        "training": {"sequence": 128, "global_batch": 24},
        **RUNS[case],
    }
    result = simulate(Scenario.from_mapping(mapping))
    assert not len(result.operation_trace.operation_log)
    return result


@pytest.mark.parametrize("most", [1_000_000, 200])
@pytest.mark.parametrize("case", RUNS)
def test_all_runs_at_once_are_runs_one_by_one(case: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: runs of a block do not mind each other, whoever is asked for, in whatever portions."""
    monkeypatch.setattr(inside_module, "MAX_BATCH_OPERATIONS", most)
    monkeypatch.setattr(segment_durations, "DRAW_SIZE", 7)
    result, rank = ran(case), 5
    trace, whole = result.trace, result.operation_spans(rank)
    rows = trace.rank_events(rank, Stream.COMPUTE)
    single = [result.operation_spans(rank, frozenset({task})) for task in sorted(trace.task[rows].tolist())]
    for column, parts in zip(
        whole.columns, zip(*(operation_spans.columns for operation_spans in single), strict=True), strict=True
    ):
        assert column.tolist() == np.concatenate(parts).tolist()
    some = frozenset(trace.task[rows][1::3].tolist())
    assert result.operation_spans(rank, some).end.tolist() == whole.end[np.isin(whole.task, list(some))].tolist()


@pytest.mark.parametrize("case", RUNS)
def test_operations_fill_the_spans_of_the_trace(case: str) -> None:
    """The first begins no sooner, the last ends together; what is not filled was waited (the rest is rounding)."""
    result, rank = ran(case), 5
    trace, whole, rounding = result.trace, result.operation_spans(rank), 1e-12 * result.trace.makespan
    rows = trace.rank_events(rank, Stream.COMPUTE)
    rows = rows[np.argsort(trace.task[rows])]
    assert (trace.waited[rows] + trace.slowed[rows] > 0).any()
    first = np.flatnonzero(np.diff(whole.task, prepend=-1))
    assert whole.task[first].tolist() == trace.task[rows].tolist()
    assert (whole.start[first] >= trace.start[rows] - rounding).all()
    assert whole.end[[*(first[1:] - 1), -1]] == pytest.approx(trace.end[rows], abs=rounding)
    busy = np.add.reduceat(whole.end - whole.start, first)
    assert busy + trace.waited[rows] == pytest.approx(trace.end[rows] - trace.start[rows], abs=rounding)
