"""A schedule is the same built in, from a CSV file or from torch; all of torch's schedules run."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim import RenderedResult, Scenario, simulate
from clustersim.common.errors import InputError
from clustersim.parallel.layout import Layout
from clustersim.schedules.breadth_first import BreadthFirst
from clustersim.schedules.csv_format import format_order, parse_csv
from clustersim.schedules.csv_schedule import csv_schedule
from clustersim.schedules.registry import CHUNKED_SCHEDULES, SCHEDULE_NAMES, build_schedule
from clustersim.schedules.validation import dry_run
from tests.closed_form.fixed_durations import FixedDurations, Step
from tests.conftest import examples

SMALL: dict[str, Any] = {
    "model": {"preset": "llama-tiny", "layers": 12},
    "cluster": {"name": "dgx-h100", "gpus": 8},
}
BIDIRECTIONAL = "dualpipe"  # bidirectional pipelines, which the CSV format cannot express
FIXED_ORDER_NAMES = [
    name for name in SCHEDULE_NAMES if not name.endswith("p") and name != BIDIRECTIONAL
]  # their order does not depend on durations


def schedule_mapping(pp: int, microbatches: int, schedule: object, **layout: object) -> dict[str, Any]:
    training = {"sequence": 512, "global_batch": microbatches * (8 // pp)}
    return {**SMALL, "layout": {"pp": pp, **layout}, "schedule": schedule, "training": training}


def comparable_json(result: RenderedResult) -> dict[str, Any]:
    """All of a result but its texts, and what depends on the name of the schedule."""
    values, text_keys = result.to_json(), {"scenario", "simulate_wall_s", "warnings"}
    name_keys = {"strata", "unmeasured", "step_time_interval_s", "likely_step_time_interval_s", "interval_basis"}
    return {key: values[key] for key in values if key not in text_keys | name_keys}


LAYOUT_MAPPINGS = st.fixed_dictionaries(
    {"data": st.sampled_from(["ddp", "zero1", "zero2", "fsdp"]), "overlap_p2p_comm": st.booleans()}
)


@given(st.sampled_from(FIXED_ORDER_NAMES), st.sampled_from([2, 4]), st.integers(1, 3), LAYOUT_MAPPINGS)
@examples(60)
def test_a_built_in_schedule_from_a_csv_file_is_the_same(
    name: str, pp: int, rounds: int, layout: dict[str, object]
) -> None:
    """Step time, categories and memory, exactly; also once the file is deleted, and after a change of a key."""
    rounds += name == "dualpipev"  # two stages on each rank, a microbatch for each at least
    order = build_schedule(name).order(pp, rounds * pp)
    built_in = Scenario.from_mapping(schedule_mapping(pp, rounds * pp, name, **layout))
    with TemporaryDirectory() as folder:
        (Path(folder) / "my.csv").write_text(format_order(order))
        mapping = schedule_mapping(pp, rounds * pp, {"csv": "my.csv"}, **layout)
        from_file = Scenario.from_mapping(mapping, path=Path(folder) / "plan.yaml")
    expected, result = simulate(built_in), simulate(from_file)
    assert comparable_json(result) == comparable_json(expected)
    assert comparable_json(simulate(Scenario.from_mapping(result.to_json()["scenario"]))) == comparable_json(expected)
    change = "training.sequence=1024"
    assert comparable_json(simulate(from_file.with_overrides(change))) == comparable_json(
        simulate(built_in.with_overrides(change))
    )


@st.composite
def shuffled_orders(draw: st.DrawFn) -> tuple[str, int, int]:
    """A built-in order with some passes of a rank swapped: CSV text, ranks, microbatches."""
    names = [name for name in SCHEDULE_NAMES if name != BIDIRECTIONAL]
    name, ranks, rounds = draw(st.sampled_from(names)), draw(st.integers(1, 4)), draw(st.integers(1, 2))
    rounds += name == "dualpipev"  # two stages on each rank, a microbatch for each at least
    rank_orders = [[*map(str, rank_order)] for rank_order in build_schedule(name).order(ranks, ranks * rounds)]
    for _ in range(draw(st.integers(0, 6))):
        rank_order = draw(st.sampled_from(rank_orders))
        first = draw(st.integers(0, len(rank_order) - 1))
        second = draw(st.integers(first, min(first + 3, len(rank_order) - 1)))
        rank_order[first], rank_order[second] = rank_order[second], rank_order[first]
    return "\n".join(map(",".join, rank_orders)), ranks, ranks * rounds


@given(shuffled_orders(), st.booleans())
@examples(200)
def test_every_valid_order_runs_and_takes_its_dry_run_time(case: tuple[str, int, int], overlap: bool) -> None:
    """One second for each forward of a layer and half of a backward, messages free: the engine never deadlocks.

    Where sends are not overlapped some may wait for others, and the step takes as long or longer.
    """
    text, ranks, microbatches = case
    try:
        custom = csv_schedule("my.csv", parse_csv(text, "my.csv"))
    except InputError as error:
        assert "my.csv" in str(error)
        return
    stages = len(custom.stage_placement.stage_ranks)
    step = Step(stages, Layout(pp=ranks, overlap_p2p_comm=overlap), custom, microbatches)
    step_seconds = step.step_seconds(FixedDurations(forward=1.0, backward=1.0, weight=1.0))
    dry_run_seconds = dry_run(custom.order(ranks, microbatches), forward=1, backward=2, weight=1).makespan
    assert step_seconds == dry_run_seconds if overlap else step_seconds >= dry_run_seconds


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (4, 8)])
def test_breadth_first_sends_forwards_immediately_without_overlap(pp: int, microbatches: int) -> None:
    """Breadth-first order, sends not overlapped: the next rank needs the last forward before it has any gradient."""
    step = Step(2 * pp, Layout(pp=pp, overlap_p2p_comm=False), BreadthFirst(2), microbatches)
    step_seconds = step.step_seconds(FixedDurations(forward=1.0, backward=2.0))
    assert step_seconds == dry_run(BreadthFirst(2).order(pp, microbatches), forward=1, backward=2).makespan


def torch_order_lines(name: str, ranks: int, microbatches: int, *, comms: bool = False) -> list[str]:
    """Torch's generated order as its `_dump_csv` writes it. comms: with communication, full backwards merged."""
    visualizer: Any = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    rank_orders = visualizer.get_schedule_ops(name, ranks, microbatches, with_comms=comms)
    return [",".join("" if action is None else str(action) for action in rank_order) for rank_order in rank_orders]


def assert_invariants(result: RenderedResult) -> None:
    """Assert that the breakdown and the critical path sum to the step, and that folding changes nothing."""
    seconds = result.breakdown.seconds
    assert np.allclose(seconds.sum(axis=1), result.step_time)
    assert (seconds >= 0.0).all()
    assert sum(result.to_json()["critical_path_s"].values()) == pytest.approx(result.step_time)
    unfolded_result = simulate(result.scenario.with_overrides("cost.symmetry=off"))
    assert unfolded_result.step_time == pytest.approx(result.step_time, rel=1e-9)


SHAPES = [(2, 4), (4, 4), (4, 12)]
TORCH_EQUIVALENTS = {"GPipe": "gpipe", "Interleaved1F1B": "interleaved", "LoopedBFS": "bfs", "ZBVZeroBubble": "zb-v"}
"""Torch's 1F1B is left to `tests/schedules/test_orders`: its listing numbers forwards of the last rank from 1."""


@pytest.mark.parametrize(("pp", "microbatches"), SHAPES)
@pytest.mark.parametrize("name", TORCH_EQUIVALENTS)
def test_torchs_schedules_equal_the_built_in_ones(name: str, pp: int, microbatches: int) -> None:
    schedule_value = {"orders": {"rows": torch_order_lines(name, pp, microbatches)}}
    result = simulate(Scenario.from_mapping(schedule_mapping(pp, microbatches, schedule_value)))
    assert comparable_json(result) == comparable_json(
        simulate(Scenario.from_mapping(schedule_mapping(pp, microbatches, TORCH_EQUIVALENTS[name])))
    )
    assert_invariants(result)


@pytest.mark.parametrize(("pp", "microbatches"), SHAPES)
def test_torchs_interleaved_zero_bubble_runs_with_zb_h1s_bubble(pp: int, microbatches: int) -> None:
    """No built-in schedule equals it; with F = I = W it waits p - 1 passes of a chunk, (p - 1)(F + I - W).

    So it does where torch's runtime has merged consecutive halves, and gradients pass from halves to full
    backwards; then the norm is reduced as for any backward in halves.
    """
    finish = []
    for comms in (False, True):
        lines = torch_order_lines("InterleavedZeroBubble", pp, microbatches, comms=comms)
        scenario = Scenario.from_mapping(schedule_mapping(pp, microbatches, {"orders": {"rows": lines}}))
        order = scenario.schedule.order(pp, microbatches)
        finish.append(dry_run(order, forward=1, backward=2, weight=1).makespan)
        assert_invariants(simulate(scenario))
    halved, merged = finish
    assert halved == 3 * 2 * microbatches + pp - 1 <= merged


@pytest.mark.parametrize(("name", "pp", "microbatches"), [("DualPipeV", 2, 4), ("ZBVZeroBubble", 4, 8)])
def test_torchs_schedules_with_communication_run(name: str, pp: int, microbatches: int) -> None:
    """Overlapped pairs run sequentially; torch's communication actions are replaced by the lowering's."""
    lines = torch_order_lines(name, pp, microbatches, comms=True)
    assert any("SEND_F" in line for line in lines)
    assert_invariants(simulate(Scenario.from_mapping(schedule_mapping(pp, microbatches, {"orders": {"rows": lines}}))))


def test_all_fixed_order_schedules_are_covered() -> None:
    assert set(FIXED_ORDER_NAMES) == {"1f1b", "gpipe", "zb-v", "dualpipev", *CHUNKED_SCHEDULES}
