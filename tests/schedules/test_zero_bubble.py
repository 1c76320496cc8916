"""ZB-1p and ZB-2p: the published bubbles, with equal and with profiled costs, and the memory limit."""

from collections.abc import Sequence
from itertools import accumulate, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.errors import InputError
from clustersim.program.action import Action, ActionKind, PipelineOrder
from clustersim.program.placement import looped_placement
from clustersim.schedules.csv_format import format_order
from clustersim.schedules.one_f_one_b import OneFOneB
from clustersim.schedules.schedule import PassCosts, Schedule
from clustersim.schedules.validation import dry_run, validate_order
from clustersim.schedules.zero_bubble import ZeroBubble
from tests.schedules.pipeline_orders import parse_order, peak_in_flight_microbatches

F, I, W = ActionKind.FORWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT  # noqa: E741 - their letters
COSTS = st.builds(PassCosts, st.floats(0.5, 2), st.floats(0.5, 3), st.floats(0.1, 3), st.floats(0.2, 1.5))
SHAPES = [st.integers(1, 2), st.integers(1, 7), st.integers(1, 20)]


def longest_rank_seconds(order: PipelineOrder, costs: PassCosts, message: float = 0.0) -> float:
    """Seconds of the rank that takes longest, from its first pass to its last; messages take `message`."""
    seconds = {F: costs.forward, I: costs.input_gradient, W: costs.weight_gradient}
    end_times: dict[Action, float] = {}
    done_counts, free_times, first_starts = [0] * len(order), [0.0] * len(order), [0.0] * len(order)
    while any(count < len(actions) for count, actions in zip(done_counts, order, strict=True)):
        for rank, actions in enumerate(order):
            while done_counts[rank] < len(actions):
                action = actions[done_counts[rank]]
                source = action.stage + {F: -1, I: 1, W: len(order)}[action.kind]
                source_action = action._replace(stage=source)
                if 0 <= source < len(order) and source_action not in end_times:
                    break
                start = max(free_times[rank], end_times[source_action] + message if 0 <= source < len(order) else 0.0)
                first_starts[rank] = start if done_counts[rank] == 0 else first_starts[rank]
                free_times[rank] = end_times[action] = start + seconds[action.kind]
                done_counts[rank] += 1
    return max(end - start for start, end in zip(first_starts, free_times, strict=True))


def bubble_seconds(schedule: ZeroBubble, ranks: int, microbatches: int, message: float = 0.0) -> float:
    """Idle seconds of the rank that takes longest."""
    costs = schedule.costs
    work = microbatches * (costs.forward + costs.input_gradient + costs.weight_gradient)
    return longest_rank_seconds(schedule.order(ranks, microbatches), costs, message) - work


@given(st.integers(1, 9), st.integers(1, 30))
def test_equal_passes_have_the_papers_bubbles(ranks: int, microbatches: int) -> None:
    """Table 2 with F = I = W = 1: (p - 1)(F + I - W) = p - 1 for ZB-H1, (p - 1)(F + I - 2 W) = 0 for ZB-H2.

    With few microbatches no order does better than 2 p - 1 - m: the last rank begins at p - 1 and has m forwards and m
    input gradients to run before the last gradient can go up the p - 1 ranks to the first, which still has that
    microbatch's weight gradient to run: 2 (p - 1) + 2 m + 1 in all, of which 3 m is work.
    """
    startup_bubble = 2 * ranks - 1 - microbatches
    assert bubble_seconds(ZeroBubble(1), ranks, microbatches) == max(ranks - 1, startup_bubble)
    assert bubble_seconds(ZeroBubble(2), ranks, microbatches) == max(0, startup_bubble)


@pytest.mark.parametrize(
    ("schedule", "shape", "message", "printed"),
    [
        (ZeroBubble(2, PassCosts(18.522, 18.086, 9.337, 0.366)), (8, 24), 0.601, 0.0433),
        (ZeroBubble(2, PassCosts(29.802, 29.428, 19.530, 0.432)), (8, 32), 0.577, 0.0022),
        (ZeroBubble(2, PassCosts(29.935, 29.621, 19.388, 0.432)), (8, 64), 0.535, 0.0010),
        (ZeroBubble(2, PassCosts(11.307, 11.254, 8.101, 0.432)), (16, 64), 0.379, 0.0054),
        (ZeroBubble(2, PassCosts(11.325, 11.308, 8.109, 0.432)), (16, 128), 0.378, 0.0028),
        (ZeroBubble(2, PassCosts(10.408, 10.204, 7.703, 0.432)), (32, 128), 0.408, 0.0029),
        (ZeroBubble(1, PassCosts(29.718, 29.444, 19.927, 0.432)), (8, 24), 0.527, 0.1323),
        (ZeroBubble(1, PassCosts(29.935, 29.621, 19.388, 0.432)), (8, 64), 0.535, 0.0554),
        (ZeroBubble(1, PassCosts(11.347, 11.248, 8.132, 0.432)), (16, 48), 0.377, 0.1397),
        (ZeroBubble(1, PassCosts(11.307, 11.254, 8.101, 0.432)), (16, 64), 0.379, 0.1088),
        (ZeroBubble(1, PassCosts(10.419, 10.207, 7.715, 0.432)), (32, 96), 0.408, 0.1421),
        (ZeroBubble(1, PassCosts(10.408, 10.204, 7.703, 0.432)), (32, 128), 0.408, 0.1106),
    ],
)
def test_profiled_passes_have_the_papers_bubble_rates(
    schedule: ZeroBubble, shape: tuple[int, int], message: float, printed: float
) -> None:
    """Qi et al. 2023: the rates of the orders that its scheduler finds, and the costs (ms) of passes and messages.

    Without flash attention a layer keeps 34 s b h + 5 a s s b bytes, of which 32 s b h wait for W (section 2.3): with
    s 1024 and h / a of 96 or 128 these are 0.366 or 0.432 of them.
    """
    idle_seconds, costs = bubble_seconds(schedule, *shape, message), schedule.costs
    work = shape[1] * (costs.forward + costs.input_gradient + costs.weight_gradient)
    assert idle_seconds / (idle_seconds + work) == pytest.approx(printed, abs=0.0025)


@given(*SHAPES, COSTS)
def test_every_order_is_valid_and_survives_its_text_form(
    memory: int, ranks: int, microbatches: int, costs: PassCosts
) -> None:
    order = ZeroBubble(memory, costs).order(ranks, microbatches)
    validate_order(order, placement=looped_placement(ranks), microbatches=microbatches)
    assert parse_order(format_order(order)) == order


@given(*SHAPES, COSTS)
def test_no_rank_exceeds_its_memory_limit(memory: int, ranks: int, microbatches: int, costs: PassCosts) -> None:
    """In activations of p microbatches (1F1B's first rank), or twice as many.

    Where the deferred bytes of a microbatch exceed its kept bytes, a rank with p microbatches in flight exceeds
    the limit by the difference with its first input gradient, and never more: then a weight gradient runs first.
    """
    change = {F: 1.0, I: costs.pending_memory_ratio - 1.0, W: -costs.pending_memory_ratio}
    for actions in ZeroBubble(memory, costs).order(ranks, microbatches):
        peak = max(accumulate(change[action.kind] for action in actions))
        assert peak <= memory * ranks + max(0.0, costs.pending_memory_ratio - 1.0) + 1e-9


@given(st.integers(2, 7), st.integers(1, 20))
def test_equal_passes_keep_at_most_p_or_2p_microbatches(ranks: int, microbatches: int) -> None:
    for memory in (1, 2):
        order = ZeroBubble(memory).order(ranks, microbatches)
        validate_order(order, placement=looped_placement(ranks), microbatches=microbatches)
        assert max(peak_in_flight_microbatches(order)) <= memory * ranks


def finish_seconds(schedule: Schedule, ranks: int, microbatches: int, costs: PassCosts) -> float:
    backward, weight = costs.input_gradient + costs.weight_gradient, costs.weight_gradient
    order = schedule.order(ranks, microbatches)
    return dry_run(order, forward=costs.forward, backward=backward, weight=weight).max_rank_span + costs.forward


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (4, 4), (4, 12), (8, 24)])
@pytest.mark.parametrize("memory", [1, 2])
def test_split_backwards_take_less_time_at_usual_costs(memory: int, ranks: int, microbatches: int) -> None:
    for gradient, weight in product((0.8, 1.0, 1.25, 1.5), (0.5, 0.75, 1.0)):
        costs = PassCosts(1.0, gradient, weight, 0.75)
        split_seconds = finish_seconds(ZeroBubble(memory, costs), ranks, microbatches, costs)
        assert split_seconds < finish_seconds(OneFOneB(), ranks, microbatches, costs)


@pytest.mark.parametrize(("ranks", "microbatches"), [(0, 4), (4, 0)])
def test_nothing_to_schedule_is_refused(ranks: int, microbatches: int) -> None:
    with pytest.raises(InputError, match="1 is the fewest"):
        ZeroBubble(1).order(ranks, microbatches)


def action_kinds(actions: Sequence[Action]) -> str:
    return "".join(action.kind.value for action in actions)


def test_figure_3_zb_h1_on_four_ranks() -> None:
    """Qi et al. 2023, figure 3 top: weight gradients are deferred by as many microbatches as the rank's index."""
    order = ZeroBubble(1).order(4, 8)
    assert action_kinds(order[0]).startswith("FFFFIWFIWFIWF")
    assert action_kinds(order[3]).startswith("FIFIFIFIWFIW")
