"""Operations inside segments, derived after the run: synchronization inside them and overlapping collectives."""

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
from tests.engine.small_programs import all_reduce, compute, make_comm_op, make_replicated_program
from tests.strategies import fold_ranks

Span = tuple[int, int, float, float]
"""(task, operation, start, end)"""


def make_cost(program: Program, speeds: Sequence[float], interference: float = 0.0) -> SegmentCost:
    unit_cost = UnitCost(program)
    values = sorted(set(speeds))
    machines = tuple(
        DeviceModel(ThrottledKernels(unit_cost, speed), Interference.uniform(interference)) for speed in values
    )
    return SegmentCost(program, DeviceModels(machines, np.array([values.index(speed) for speed in speeds])), unit_cost)


def read_operations(
    program: Program,
    segment_cost: SegmentCost,
    classes: SymmetryClasses | None = None,
    *,
    coalesce: bool = True,
    jitter: Jitter | None = None,
) -> OperationTraceReader:
    classes = singleton_classes(program) if classes is None else classes
    return OperationTraceReader(
        program,
        classes,
        segment_cost,
        jitter,
        *simulate_program(program, classes, segment_cost, coalesce=coalesce, jitter=jitter),
    )


def operation_spans(reader: OperationTraceReader, rank: int) -> list[Span]:
    operations = reader.rank_spans(rank)
    columns = operations.task, operations.operation, operations.start, operations.end
    return list(zip(*(column.tolist() for column in columns), strict=True))


TP_SEGMENT_BODIES = (1.0, make_comm_op("tp", 2.0), 1.0)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_synchronize_inside_segments(ranks: int) -> None:
    """One of two at half speed, as two scalar or four vectorized ranks: it arrives at 2, the other waits from 1.

    The wait shows between the first operation's end and the second's start.
    """
    program = make_replicated_program(
        [compute(*TP_SEGMENT_BODIES)], ranks, {"tp": np.arange(ranks).reshape(-1, 2).tolist()}
    )
    reader = read_operations(program, make_cost(program, [1.0, 0.5] * (ranks // 2)))
    for rank in range(0, ranks, 2):
        assert operation_spans(reader, rank) == [(0, 0, 0.0, 1.0), (0, 1, 2.0, 4.0), (0, 2, 4.0, 5.0)]
        assert operation_spans(reader, rank + 1) == [(0, 0, 0.0, 2.0), (0, 1, 2.0, 4.0), (0, 2, 4.0, 6.0)]


def test_waiting_propagates_through_two_groups() -> None:
    """Rank 3 at half speed delays 2 in its row, which delays 0 in its column: 1 s of kernel ends at 2 on rank 3.

    tp joins (0, 1) and (2, 3), cp joins (0, 2) and (1, 3). Both tp exchanges last 1 s: (0, 1) are through at 2, (2, 3)
    at 3, and all go on with cp at 3.
    """
    steps = [compute(1.0, make_comm_op("tp", 1.0), make_comm_op("cp", 1.0))]
    program = make_replicated_program(steps, 4, {"tp": [[0, 1], [2, 3]], "cp": [[0, 2], [1, 3]]})
    reader = read_operations(program, make_cost(program, [1.0, 1.0, 1.0, 0.5]))
    assert operation_spans(reader, 0) == [(0, 0, 0.0, 1.0), (0, 1, 1.0, 2.0), (0, 2, 3.0, 4.0)]
    assert operation_spans(reader, 2) == [(0, 0, 0.0, 1.0), (0, 1, 2.0, 3.0), (0, 2, 3.0, 4.0)]
    assert operation_spans(reader, 3) == [(0, 0, 0.0, 2.0), (0, 1, 2.0, 3.0), (0, 2, 3.0, 4.0)]


def test_waiting_propagates_through_three_syncs() -> None:
    """A ring of six, connected by tp and cp in turn: rank 3 is slow, and three collectives follow its kernel.

    tp connects (0, 1), (2, 3), (4, 5), cp (1, 2), (3, 4), (5, 0), each for 1 s: first tp delays 2, then cp 1 and
    4, then tp 0 and 5, by 1 s.
    """
    ring = {"tp": [[0, 1], [2, 3], [4, 5]], "cp": [[1, 2], [3, 4], [5, 0]]}
    program = make_replicated_program(
        [compute(1.0, make_comm_op("tp", 1.0), make_comm_op("cp", 1.0), make_comm_op("tp", 1.0))], 6, ring
    )
    reader = read_operations(program, make_cost(program, [1.0, 1.0, 1.0, 0.5, 1.0, 1.0]))
    assert operation_spans(reader, 0) == [(0, 0, 0.0, 1.0), (0, 1, 1.0, 2.0), (0, 2, 2.0, 3.0), (0, 3, 4.0, 5.0)]
    assert operation_spans(reader, 1) == [(0, 0, 0.0, 1.0), (0, 1, 1.0, 2.0), (0, 2, 3.0, 4.0), (0, 3, 4.0, 5.0)]


OVERLAPPED_STEPS = [
    compute(1.0),
    compute(1.0, make_comm_op("tp", 1.0), 1.0),
    all_reduce(2.0, depends_on=(0,)),
    compute(1.0),
]
"""A reduction of 2 s from the end of the first segment on."""


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("coalesce", [False, True])
def test_a_collective_slows_only_the_operations_it_overlaps(ranks: int, coalesce: bool) -> None:
    """With φ = 1 and the reduction from 1 to 3: the second segment's kernel takes 2 s, exactly the overlap."""
    groups = {"tp": [[rank] for rank in range(ranks)], "dp": [list(range(ranks))]}
    program = make_replicated_program(OVERLAPPED_STEPS, ranks, groups)
    reader = read_operations(program, make_cost(program, [1.0] * ranks, 1.0), coalesce=coalesce)
    expected = [(0, 0, 0.0, 1.0), (1, 0, 1.0, 3.0), (1, 1, 3.0, 4.0), (1, 2, 4.0, 5.0), (3, 0, 5.0, 6.0)]
    assert operation_spans(reader, ranks - 1) == expected


def test_each_run_of_a_segment_has_its_own_overlap() -> None:
    """4 s of kernel with φ = 1: overlapped by two collectives from 1 to 3, then by the last one from 6 to 8."""
    segment_step = compute(4.0)
    reductions = [all_reduce(1.0, depends_on=(0,)), all_reduce(1.0, depends_on=(0,))]
    program = make_replicated_program(
        [compute(1.0), segment_step, *reductions, segment_step, all_reduce(2.0, depends_on=(1,))], 1, {"dp": [[0]]}
    )
    expected = [(0, 0, 0.0, 1.0), (1, 0, 1.0, 6.0), (4, 0, 6.0, 11.0)]
    assert operation_spans(read_operations(program, make_cost(program, [1.0], 1.0)), 0) == expected


def test_a_rank_has_the_operations_of_its_representative() -> None:
    """Of six ranks in pairs, rank 5 is slow: 0 represents 1, 2 and 3; rank 4 synchronizes with the slow one."""
    program = make_replicated_program([compute(*TP_SEGMENT_BODIES)], 6, {"tp": [[0, 1], [2, 3], [4, 5]]})
    segment_cost = make_cost(program, [1.0] * 5 + [0.5])
    folded_reader, unfolded_reader = (
        read_operations(program, segment_cost, fold_ranks(program, segment_cost)),
        read_operations(program, segment_cost),
    )
    assert folded_reader.trace.simulated_ranks.tolist() == [0, 4, 5]
    for rank in range(6):
        assert operation_spans(folded_reader, rank) == operation_spans(unfolded_reader, rank)
    assert folded_reader.rank_spans(3).rank.tolist() == [0, 0, 0]


@pytest.mark.parametrize("ranks", [1, 6])
def test_every_kernel_has_the_jitter_factor_of_its_index(ranks: int) -> None:
    """Factors are drawn for all operations of all segments in order, including communication, which does not vary."""
    jitter, groups = Jitter(0.1, seed=4), {"tp": [[rank] for rank in range(ranks)]}
    program = make_replicated_program(
        [compute(*TP_SEGMENT_BODIES), compute(2.0), compute(*TP_SEGMENT_BODIES)], ranks, groups
    )
    reader = read_operations(program, make_cost(program, [1.0] * ranks), jitter=jitter)
    for rank in range(ranks):
        nominal = np.array([1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0])
        varied = nominal * jitter.rank_factors(rank, 7)
        varied[[1, 5]] = 2.0
        operations = reader.rank_spans(rank)
        assert (operations.end - operations.start).tolist() == pytest.approx(varied.tolist())
        assert operations.end.tolist() == pytest.approx(np.cumsum(varied).tolist())


def single_tp_group(ranks: int) -> Mapping[str, list[list[int]]]:
    return {"tp": [list(range(ranks))]}


def test_ranks_with_jitter_synchronize_at_every_collective() -> None:
    """The n-th exchange starts at the sum of the slowest kernels so far, and of the exchanges before it."""
    jitter, ranks = Jitter(0.1, seed=1), 5
    program = make_replicated_program(
        [compute(1.0, make_comm_op("tp", 2.0), 1.0, make_comm_op("tp", 3.0))], ranks, single_tp_group(ranks)
    )
    reader = read_operations(program, make_cost(program, [1.0] * ranks), jitter=jitter)
    factors = np.stack([jitter.rank_factors(rank, 4) for rank in range(ranks)])
    first_slowest, second_slowest = factors[:, 0].max(), factors[:, 2].max()
    for rank in range(ranks):
        start = reader.rank_spans(rank).start
        assert start[1] == pytest.approx(first_slowest)
        assert start[3] == pytest.approx(first_slowest + 2.0 + second_slowest)


SLOW = {"degradations": {"slow": [{"gpu": 1, "speed": 0.8}]}}
JITTER = {"degradations": {"jitter": "5 %"}}
RUN_CASES: dict[str, dict[str, Any]] = {
    "jitter": {"layout": {"tp": 4, "pp": 2}, **JITTER},
    "slow": {"layout": {"tp": 4, "pp": 2}, **SLOW},
    "kernels beside exchanges of their own": {"layout": {"tp": 4, "pp": 2, "tp_comm_overlap": True}, **JITTER},
    "FSDP": {"layout": {"tp": 2, "dp": 4, "data": "fsdp"}, **SLOW},
    "FSDP, jitter": {"layout": {"dp": 8, "data": "fsdp"}, **JITTER},
    "many collectives beside": {"layout": {"tp": 2, "dp": 4, "data": {"ddp": {"bucket": "64 KiB"}}}, **JITTER},
}


def simulate_case(case: str) -> RenderedResult:
    """24 sequences a step on eight GPUs, simulated by the vectorized engine: no operations are logged."""
    model = {"family": "llama", "layers": 4, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 128, "vocab": 256}
    mapping: dict[str, Any] = {
        "model": model,
        "cluster": {"name": "dgx-h100", "gpus": 8},
        "cost": {"symmetry": "off", "interference": 0.5, "network": "uncontended"},
        "training": {"sequence": 128, "global_batch": 24},
        **RUN_CASES[case],
    }
    result = simulate(Scenario.from_mapping(mapping))
    assert not len(result.operation_trace.operation_log)
    return result


@pytest.mark.parametrize("most", [1_000_000, 200])
@pytest.mark.parametrize("case", RUN_CASES)
def test_batched_segment_runs_equal_single_ones(case: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: runs of a segment are independent of each other, of the requested tasks and of the batch size."""
    monkeypatch.setattr(inside_module, "MAX_BATCH_OPERATIONS", most)
    monkeypatch.setattr(segment_durations, "DRAW_SIZE", 7)
    result, rank = simulate_case(case), 5
    trace, operations = result.trace, result.operation_spans(rank)
    events = trace.rank_events(rank, Stream.COMPUTE)
    single = [result.operation_spans(rank, frozenset({task})) for task in sorted(trace.task[events].tolist())]
    for column, pieces in zip(
        operations.columns, zip(*(task_operations.columns for task_operations in single), strict=True), strict=True
    ):
        assert column.tolist() == np.concatenate(pieces).tolist()
    task_subset = frozenset(trace.task[events][1::3].tolist())
    assert (
        result.operation_spans(rank, task_subset).end.tolist()
        == operations.end[np.isin(operations.task, list(task_subset))].tolist()
    )


@pytest.mark.parametrize("case", RUN_CASES)
def test_operations_fill_the_spans_of_the_trace(case: str) -> None:
    """Operations lie within their span; the remainder of the span is waiting (up to rounding)."""
    result, rank = simulate_case(case), 5
    trace, operations, rounding = result.trace, result.operation_spans(rank), 1e-12 * result.trace.makespan
    events = trace.rank_events(rank, Stream.COMPUTE)
    events = events[np.argsort(trace.task[events])]
    assert (trace.waited[events] + trace.slowed[events] > 0).any()
    first_operation = np.flatnonzero(np.diff(operations.task, prepend=-1))
    assert operations.task[first_operation].tolist() == trace.task[events].tolist()
    assert (operations.start[first_operation] >= trace.start[events] - rounding).all()
    assert operations.end[[*(first_operation[1:] - 1), -1]] == pytest.approx(trace.end[events], abs=rounding)
    busy = np.add.reduceat(operations.end - operations.start, first_operation)
    assert busy + trace.waited[events] == pytest.approx(trace.end[events] - trace.start[events], abs=rounding)
