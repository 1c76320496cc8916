"""Built-in orders against torch's generators, reviewed CSVs, closed forms and laws."""

import re
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from clustersim.common.errors import InputError
from clustersim.program.action import ActionKind, OverlappedPair, PipelineOrder, flatten_entries
from clustersim.schedules.breadth_first import BreadthFirst
from clustersim.schedules.csv_format import format_order
from clustersim.schedules.dual_pipe_v import DualPipeV
from clustersim.schedules.gpipe import GPipe
from clustersim.schedules.interleaved import Interleaved
from clustersim.schedules.one_f_one_b import OneFOneB
from clustersim.schedules.overlapped_1f1b import Overlapped1F1B
from clustersim.schedules.registry import build_schedule
from clustersim.schedules.schedule import Schedule
from clustersim.schedules.validation import dry_run, validate_order
from clustersim.schedules.zero_bubble_v import ZeroBubbleV
from tests.schedules.pipeline_orders import parse_order, peak_in_flight_microbatches

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
GOLDEN = Path(__file__).parents[1] / "golden" / "schedules"

SCHEDULES: list[Schedule] = [
    GPipe(), OneFOneB(), Interleaved(2), Interleaved(3), Interleaved(5), BreadthFirst(2), BreadthFirst(3),
    ZeroBubbleV(),
]  # fmt: skip
SHAPES = [(1, 1), (1, 5), (2, 2), (2, 7), (3, 3), (3, 8), (4, 4), (4, 8), (5, 13), (8, 32), (16, 64)]
DUAL_SHAPES = [(1, 2), (1, 5), (2, 4), (2, 7), (3, 6), (3, 8), (4, 8), (5, 13), (8, 32), (16, 64)]
INTERLEAVED_SHAPES = [
    (1, 1, 2), (1, 4, 3), (2, 2, 2), (2, 8, 2), (4, 3, 2), (4, 4, 3), (4, 10, 2), (4, 8, 8), (8, 24, 3), (16, 64, 8),
]  # fmt: skip


def torch_order(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> str:
    """The order of torch's generator, without its idle steps and gradient reductions."""
    visualizer: Any = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    rank_actions = visualizer.get_schedule_ops(name, ranks, microbatches, num_stages_per_rank=chunks)
    compute_actions = [
        [str(action) for action in actions if action is not None and action.is_compute_op] for actions in rank_actions
    ]
    return "".join(",".join(actions) + "\n" for actions in compute_actions)


@pytest.mark.parametrize(("ranks", "microbatches"), SHAPES)
def test_gpipe_matches_torch(ranks: int, microbatches: int) -> None:
    assert format_order(GPipe().order(ranks, microbatches)) == torch_order("GPipe", ranks, microbatches)


@pytest.mark.parametrize(("ranks", "microbatches"), SHAPES)
def test_1f1b_matches_torch(ranks: int, microbatches: int) -> None:
    """The orders are torch's, except for one oversight.

    On the last rank torch 2.13's listing numbers forwards from 1 (`0F1,0B0` for one microbatch), though its
    runtime runs them from 0; renumbering the forwards of that rank corrects it, and changes nothing where it is
    right.
    """
    *lines, last = torch_order("1F1B", ranks, microbatches).splitlines(keepends=True)
    microbatch_ids = count()
    renumbered = re.sub(r"F\d+", lambda _: f"F{next(microbatch_ids)}", last)
    assert format_order(OneFOneB().order(ranks, microbatches)) == "".join([*lines, renumbered])


@pytest.mark.parametrize(("ranks", "microbatches", "chunks"), INTERLEAVED_SHAPES)
def test_interleaved_matches_torch_for_any_legal_round(ranks: int, microbatches: int, chunks: int) -> None:
    ours = format_order(Interleaved(chunks).order(ranks, microbatches))
    assert ours == torch_order("Interleaved1F1B", ranks, microbatches, chunks)


@pytest.mark.parametrize(("ranks", "microbatches"), SHAPES)
def test_zb_v_matches_torch(ranks: int, microbatches: int) -> None:
    assert format_order(ZeroBubbleV().order(ranks, microbatches)) == torch_order("ZBVZeroBubble", ranks, microbatches)


@pytest.mark.parametrize(("ranks", "microbatches"), DUAL_SHAPES)
def test_dual_pipe_v_matches_torch(ranks: int, microbatches: int) -> None:
    assert format_order(DualPipeV().order(ranks, microbatches)) == torch_order("DualPipeV", ranks, microbatches)


@pytest.mark.parametrize(("ranks", "microbatches"), DUAL_SHAPES)
@pytest.mark.parametrize("saved", [0.0, 0.5, 1.0])
def test_dual_pipe_v_has_the_published_bubble(ranks: int, microbatches: int, saved: float) -> None:
    """(PP/2 - 1)(F&B + B - 3W) of deepseek-ai/DualPipe's table, for equal passes F = I = W = 1.

    PP = 2 ranks stages. A pair takes F + B minus the saved time. It is the bubble of the rank with most pairs,
    which has the least work; if pairs save nothing, of every rank. Activations: PP + 1.
    """
    order, pair_seconds = DualPipeV().order(ranks, microbatches), 3.0 - saved
    run = dry_run(order, forward=1.0, backward=2.0, weight=1.0, pair=pair_seconds)
    work = [
        sum(pair_seconds if isinstance(step, OverlappedPair) else 1.0 + (step.kind is B) for step in steps)
        for steps in order
    ]
    bubble = (ranks - 1) * (pair_seconds + 2.0 - 3.0 * 1.0)
    assert run.makespan - min(work) == pytest.approx(bubble)
    assert saved or len(set(work)) == 1
    assert peak_in_flight_microbatches(order) == (2 * ranks + 1,) * ranks
    validate_order(order, placement=DualPipeV().placement(ranks), microbatches=microbatches)


def test_dual_pipe_v_needs_as_many_microbatches_as_stages() -> None:
    with pytest.raises(InputError, match="dualpipev on 4 pipeline ranks has 8 stages"):
        DualPipeV().order(4, 7)


@pytest.mark.parametrize(("ranks", "microbatches", "chunks"), INTERLEAVED_SHAPES)
def test_overlapped_1f1b_runs_the_same_passes_one_forward_earlier(ranks: int, microbatches: int, chunks: int) -> None:
    """Each kind of pass is in the plain order, and no backward reads the output of the forward that it overlaps."""
    interleaved = Interleaved(chunks)
    overlapped = Overlapped1F1B(interleaved)
    order = overlapped.order(ranks, microbatches)
    for steps, actions in zip(order, interleaved.order(ranks, microbatches), strict=True):
        for kind in (F, B):
            assert [flatten_entry for flatten_entry in flatten_entries(steps) if flatten_entry.kind is kind] == [
                item for item in flatten_entries(actions) if item.kind is kind
            ]
        assert all(pair.forward[::2] != pair.backward[::2] for pair in steps if isinstance(pair, OverlappedPair))
    validate_order(order, placement=overlapped.placement(ranks), microbatches=microbatches)
    plain_peaks = peak_in_flight_microbatches(interleaved.order(ranks, microbatches))
    passes = chunks * microbatches
    assert peak_in_flight_microbatches(order) == tuple(min(element + 1, passes) for element in plain_peaks)


def test_overlapped_1f1b_without_a_pipeline_pairs_adjacent_microbatches() -> None:
    """Megatron-LM, `combined_1f1b_schedule_for_no_pipelining`."""
    expected = "0F0,(0F1;0B0)OVERLAP_F_B,(0F2;0B1)OVERLAP_F_B,0B2\n"
    assert format_order(Overlapped1F1B(OneFOneB()).order(1, 3)) == expected


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("ranks", "microbatches"), SHAPES)
def test_breadth_first_matches_torch(ranks: int, microbatches: int, chunks: int) -> None:
    ours = format_order(BreadthFirst(chunks).order(ranks, microbatches))
    assert ours == torch_order("LoopedBFS", ranks, microbatches, chunks)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.csv")), ids=lambda path: path.stem)
def test_golden_order(path: Path) -> None:
    name, shape, *chunks = path.stem.split("_")
    ranks, microbatches = map(int, shape.split("x"))
    chosen = build_schedule(name, int(chunks[0].removeprefix("chunks")) if chunks else None)
    assert chosen.order(ranks, microbatches) == parse_order(path.read_text(encoding="utf-8"))


@st.composite
def schedule_shapes(draw: st.DrawFn) -> tuple[Schedule, int, int]:
    """A built-in schedule, ranks, and a microbatch count that it supports."""
    ranks = draw(st.integers(1, 7))
    chosen = draw(st.sampled_from(SCHEDULES))
    if not isinstance(chosen, Interleaved):
        return chosen, ranks, draw(st.integers(1, 20))
    rounds = draw(st.integers(1, 4))
    round_size = draw(st.integers(1, ranks)) if rounds == 1 else ranks
    return chosen, ranks, rounds * round_size


@given(schedule_shapes())
def test_every_order_is_valid(shape: tuple[Schedule, int, int]) -> None:
    chosen, ranks, microbatches = shape
    validate_order(chosen.order(ranks, microbatches), placement=chosen.placement(ranks), microbatches=microbatches)


@given(schedule_shapes())
def test_orders_survive_their_text_form(shape: tuple[Schedule, int, int]) -> None:
    chosen, ranks, microbatches = shape
    order = chosen.order(ranks, microbatches)
    assert parse_order(format_order(order)) == order


@given(schedule_shapes(), st.floats(0.5, 2), st.floats(0.5, 4))
def test_no_order_is_faster_than_the_ideal_time_plus_pipeline_fill(
    shape: tuple[Schedule, int, int], forward: float, backward: float
) -> None:
    """One way down and up is idle on the last rank.

    The first microbatch must come down to the last rank before that rank starts, and its last gradient must come
    back up; in between the last rank has m v (f + b) of its work.
    """
    chosen, ranks, microbatches = shape
    assume(chosen.placement(ranks).stage_ranks[-1] == ranks - 1)  # in a V the last stage is on the first rank
    finish = dry_run(chosen.order(ranks, microbatches), forward=forward, backward=backward).makespan
    lower_bound = (chosen.placement(ranks).max_chunks * microbatches + ranks - 1) * (forward + backward)
    assert finish >= lower_bound * (1 - 1e-12)


def bubble_ratio(order: PipelineOrder, ideal: float, forward: float, backward: float) -> float:
    return (dry_run(order, forward=forward, backward=backward).makespan - ideal) / ideal


@given(st.sampled_from([GPipe(), OneFOneB()]), st.integers(1, 8), st.integers(1, 24), st.floats(0.1, 5))
def test_bubble_of_gpipe_and_1f1b_is_p_minus_1_over_m(
    chosen: Schedule, ranks: int, microbatches: int, backward: float
) -> None:
    """The step is m (f + b) of work and (p - 1)(f + b) of waiting.

    The last rank idles (p - 1) f before its first forward and (p - 1) b after its last backward, and works
    without gaps in between, so the step is m (f + b) + (p - 1)(f + b). That holds with m < p too.
    """
    ideal = microbatches * (1 + backward)
    expected = (ranks - 1) / microbatches
    assert bubble_ratio(chosen.order(ranks, microbatches), ideal, 1, backward) == pytest.approx(expected, abs=1e-12)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(2, 5), st.floats(0.1, 5))
def test_bubble_of_interleaved_is_p_minus_1_over_v_m(ranks: int, rounds: int, chunks: int, backward: float) -> None:
    """The step is v m (f + b) of chunk passes and (p - 1)(f + b) of waiting.

    With rounds of p microbatches the last rank again only waits for p - 1 passes of one chunk each way. A
    chunk's passes are 1/v as long as a stage's, so (p - 1)(f + b)/v is idle in addition to m (f + b).
    """
    microbatches = rounds * ranks
    ideal = microbatches * chunks * (1 + backward)
    order = Interleaved(chunks).order(ranks, microbatches)
    assert bubble_ratio(order, ideal, 1, backward) == pytest.approx((ranks - 1) / (chunks * microbatches), abs=1e-12)


@given(st.integers(1, 8), st.integers(1, 24), st.integers(2, 4), st.floats(0.1, 5))
def test_breadth_first_has_the_interleaved_bubble_and_all_microbatches_in_flight(
    ranks: int, microbatches: int, chunks: int, backward: float
) -> None:
    """With at least p microbatches: (p - 1)/(v m), as the last rank waits p - 1 chunk passes each way.

    With fewer, rank r waits before each of its v - 1 other chunks until the first microbatch has come around, p
    - m passes more than it has work for, in forward as well as backward.
    """
    order = BreadthFirst(chunks).order(ranks, microbatches)
    ideal = microbatches * chunks * (1 + backward)
    idle = ranks - 1 + (chunks - 1) * max(0, ranks - microbatches)
    expected = idle / (chunks * microbatches)
    assert bubble_ratio(order, ideal, 1, backward) == pytest.approx(expected, abs=1e-12)
    assert peak_in_flight_microbatches(order) == (chunks * microbatches,) * ranks


@given(st.integers(1, 9), st.integers(0, 20))
def test_zb_v_has_no_bubble_and_the_memory_of_1f1b(ranks: int, additional: int) -> None:
    """Qi et al. 2023, section 6: with F = I = W no bubble, and 1F1B's memory.

    The first microbatch reaches rank r after r passes; with 2 p - 1 microbatches or more the rank then runs its
    6 m passes (F, I, W of both chunks) without gaps, and the last rank ends p - 1 passes after the first. Before
    its first backward rank r runs 2 (p - r) - 1 forwards down, r both down and up, and the one up that turns
    around: 2 p halves of a stage, the p microbatches of 1F1B's first rank.
    """
    microbatches = 2 * ranks - 1 + additional
    order = ZeroBubbleV().order(ranks, microbatches)
    run = dry_run(order, forward=1, backward=2, weight=1)
    assert [(rank_ends[0], rank_ends[-1]) for rank_ends in run.end_times] == [
        (rank + 1, rank + 6 * microbatches) for rank in range(ranks)
    ]
    assert peak_in_flight_microbatches(order) == (2 * ranks,) * ranks


@given(st.integers(1, 9), st.integers(1, 30))
def test_activations_in_flight(ranks: int, microbatches: int) -> None:
    """GPipe keeps all microbatches; 1F1B p - r on rank r, one more than its warm-up."""
    assert peak_in_flight_microbatches(GPipe().order(ranks, microbatches)) == (microbatches,) * ranks
    assert peak_in_flight_microbatches(OneFOneB().order(ranks, microbatches)) == tuple(
        min(ranks - rank, microbatches) for rank in range(ranks)
    )


@given(st.integers(1, 6), st.integers(1, 4), st.integers(2, 5))
def test_interleaved_has_its_warmup_and_one_more_in_flight(ranks: int, rounds: int, chunks: int) -> None:
    """Warm-up of (v - 1) p + 2 (p - 1 - r) chunk passes (Narayanan et al. 2021), and never more than all m v."""
    peaks = peak_in_flight_microbatches(Interleaved(chunks).order(ranks, rounds * ranks))
    total_passes = rounds * ranks * chunks
    assert peaks == tuple(min((chunks - 1) * ranks + 2 * (ranks - 1 - rank) + 1, total_passes) for rank in range(ranks))


@given(st.integers(1, 5), st.integers(2, 4), st.data())
def test_rounds_of_more_microbatches_than_ranks_are_warm_up_not_bubble(
    ranks: int, chunks: int, data: st.DataObject
) -> None:
    """Llama 3's flexible N: (v - 1) N + 2 (p - 1 - r) forwards first, and (p - 1)/(v m) of bubble as for N = p."""
    group_size = data.draw(st.integers(ranks, 2 * ranks + 2))
    microbatches = group_size * data.draw(st.integers(1, 3)) + data.draw(st.sampled_from([0, ranks]))
    assume(microbatches % group_size == 0 or microbatches % group_size >= ranks)
    schedule = Interleaved(chunks, group_size)
    order, total = schedule.order(ranks, microbatches), chunks * microbatches
    validate_order(order, placement=schedule.placement(ranks), microbatches=microbatches)
    assert peak_in_flight_microbatches(order) == tuple(
        min((chunks - 1) * group_size + 2 * (ranks - 1 - rank) + 1, total) for rank in range(ranks)
    )
    if microbatches % group_size == 0:
        assert bubble_ratio(order, 3 * total, 1, 2) == pytest.approx((ranks - 1) / total, abs=1e-12)


@pytest.mark.parametrize(("ranks", "chunks", "microbatches"), [(4, 2, 8), (16, 8, 16), (3, 4, 7)])
def test_one_round_of_all_microbatches_has_the_forwards_of_breadth_first(
    ranks: int, chunks: int, microbatches: int
) -> None:
    one_round, breadth_first = (
        schedule.order(ranks, microbatches) for schedule in (Interleaved(chunks, microbatches), BreadthFirst(chunks))
    )
    for ours, theirs in zip(one_round, breadth_first, strict=True):
        assert [action for action in ours if action.kind is F] == [action for action in theirs if action.kind is F]
    assert Interleaved(2, 4).order(4, 12) == Interleaved(2).order(4, 12)


@pytest.mark.parametrize("group_size", [3, 7, 12])
def test_rounds_with_fewer_microbatches_than_ranks_are_refused(group_size: int) -> None:
    """The last round has 9 mod N microbatches; 5 leaves 4 for it, 9 is one round."""
    with pytest.raises(InputError, match=f"microbatch_group_size {group_size} .*; 5 and 9 would do"):
        Interleaved(2, group_size).order(4, 9)


def test_one_rank_has_no_bubble() -> None:
    for chosen in (GPipe(), OneFOneB(), Interleaved(3), BreadthFirst(3), ZeroBubbleV()):
        assert dry_run(chosen.order(1, 4)).makespan == 4 * chosen.placement(1).max_chunks * 3


def test_stages_are_numbered_through_the_model() -> None:
    order = Interleaved(2).order(2, 2)
    assert [{action.stage for action in actions} for actions in order] == [{0, 2}, {1, 3}]
    assert [action.microbatch for action in order[0] if action.kind is ActionKind.FORWARD] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("ranks", "microbatches", "answer"), [(4, 9, "8 and 10 microbatches fit"), (8, 17, "16 and 18 microbatches fit")]
)
def test_interleaved_names_the_nearest_legal_microbatches(ranks: int, microbatches: int, answer: str) -> None:
    with pytest.raises(InputError, match=answer):
        Interleaved(2).order(ranks, microbatches)


@pytest.mark.parametrize("chosen", [GPipe(), OneFOneB(), Interleaved(2), BreadthFirst(2), ZeroBubbleV()])
@pytest.mark.parametrize(("ranks", "microbatches"), [(0, 4), (4, 0), (2, -1)])
def test_nothing_to_schedule_is_refused(chosen: Schedule, ranks: int, microbatches: int) -> None:
    with pytest.raises(InputError, match="1 is the fewest"):
        chosen.order(ranks, microbatches)
