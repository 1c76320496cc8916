"""Every validation rule refuses its violations, and the dry run computes times."""

import pytest

from clustersim.common.errors import InputError
from clustersim.program.placement import looped_placement
from clustersim.schedules.breadth_first import BreadthFirst
from clustersim.schedules.gpipe import GPipe
from clustersim.schedules.interleaved import Interleaved
from clustersim.schedules.one_f_one_b import OneFOneB
from clustersim.schedules.schedule import Schedule
from clustersim.schedules.validation import dry_run, runs_with_paired_sends, validate_order
from tests.schedules.pipeline_orders import parse_order, peak_in_flight_microbatches

VALID_ORDER = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
SPLIT_BACKWARD_ORDER = "0F0,0F1,0I0,0W0,0B1\n1F0,1I0,1F1,1B1,1W0\n"


@pytest.mark.parametrize("text", [VALID_ORDER, SPLIT_BACKWARD_ORDER])
def test_a_valid_order_is_accepted(text: str) -> None:
    validate_order(parse_order(text), placement=looped_placement(2), microbatches=2)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("0F0,0F1,1B0,0B1\n1F0,1B0,1F1,1B1\n", "rank 0, step 2: 1B0 is not of this rank's stages 0"),
        ("0F0,0F2,0B0,0B2\n1F0,1B0,1F2,1B2\n", "rank 0, step 1: 0F2 is not of microbatches 0 to 1"),
        ("0F0,0F0,0B0,0B1\n1F0,1B0,1F1,1B1\n", "rank 0, step 1: 0F0 runs a second time"),
        ("0F0,0B0\n1F0,1B0,1F1,1B1\n", "rank 0 has no 0F1"),
        ("0F0,0F1,0B0,0I1\n1F0,1B0,1F1,1B1\n", "rank 0 has no 0W1"),
        ("0F0,0F1,0B0,0I0,0W0\n1F0,1B0,1F1,1B1\n", r"rank 0 has 0B0 and 0I0.*whole, or in two halves"),
        ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n", "rank 0 has neither 0B1 nor 0I1 and 0W1"),
        ("0F0,0B1,0F1,0B0\n1F0,1B0,1F1,1B1\n", "rank 0, step 1: 0B1 runs before 0F1"),
        ("0F0,0F1,0W0,0I0,0B1\n1F0,1B0,1F1,1B1\n", "rank 0, step 2: 0W0 runs before 0I0"),
        (
            "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n",
            r"^schedule deadlocks: rank 0, step 1 \(0B0\) waits for 1B0.*rank 1, step 0 \(1F1\) waits for 0F1$",
        ),
    ],
)
def test_violations_are_reported_with_rank_and_action(text: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        validate_order(parse_order(text), placement=looped_placement(2), microbatches=2)


def test_activations_in_flight_are_counted() -> None:
    assert peak_in_flight_microbatches(parse_order(VALID_ORDER)) == (2, 1)


def test_activations_are_freed_by_weight_gradients_not_by_input_gradients() -> None:
    assert peak_in_flight_microbatches(parse_order("0F0,0I0,0F1,0W0,0B1\n")) == (2,)
    assert peak_in_flight_microbatches(parse_order("0F0,0I0,0W0,0F1,0B1\n")) == (1,)


def test_the_dry_run_waits_for_adjacent_stages() -> None:
    """F = 1, b = 2. Rank 1 starts when 0F0 ends at 1; 0B0 waits for 1B0's end at 4; 1F1 starts at 4."""
    assert dry_run(parse_order(VALID_ORDER)).end_times == ((1, 2, 6, 9), (2, 4, 5, 7))


def test_split_backwards_send_gradients_earlier() -> None:
    """1I0 ends at 3, not 4, so 0I0 may start then."""
    assert dry_run(parse_order("0F0,0I0,0W0\n1F0,1I0,1W0\n")).end_times == ((1, 4, 5), (2, 3, 4))


@pytest.mark.parametrize(
    ("schedule", "runs"), [(OneFOneB(), True), (Interleaved(2), True), (BreadthFirst(2), False), (GPipe(), False)]
)
def test_sends_may_be_paired_where_no_rank_depends_on_the_earlier_one(schedule: Schedule, *, runs: bool) -> None:
    """Where all forwards come first, the next rank needs the last one's output before it runs any backward."""
    assert runs_with_paired_sends(schedule.order(4, 8)) == runs


def test_an_order_without_actions_takes_no_time() -> None:
    assert dry_run(((), ())).makespan == 0.0
