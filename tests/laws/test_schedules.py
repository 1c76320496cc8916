"""An order says the same whether it comes from the shelf, from a file or from torch; torch's own orders all run."""

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
from tests.closed_form.fixed_durations import Fixed, Step
from tests.conftest import examples

SMALL: dict[str, Any] = {
    "model": {"preset": "llama-tiny", "layers": 12},
    "cluster": {"name": "dgx-h100", "gpus": 8},
}
TWICE = "dualpipe"  # two pipelines towards each other, which no CSV can say
FIXED = [
    name for name in SCHEDULE_NAMES if not name.endswith("p") and name != TWICE
]  # their order depends on no durations


def plan(pp: int, microbatches: int, schedule: object, **layout: object) -> dict[str, Any]:
    training = {"sequence": 512, "global_batch": microbatches * (8 // pp)}
    return {**SMALL, "layout": {"pp": pp, **layout}, "schedule": schedule, "training": training}


def answer(result: RenderedResult) -> dict[str, Any]:
    """All of an answer but its words, and what is known of an order by its name."""
    told, words = result.to_json(), {"scenario", "simulate_wall_s", "warnings"}
    by_name = {"regimes", "unmeasured", "step_time_band_s", "experience"}
    return {key: told[key] for key in told if key not in words | by_name}


LAYOUTS = st.fixed_dictionaries(
    {"data": st.sampled_from(["ddp", "zero1", "zero2", "fsdp"]), "pipeline_overlap": st.booleans()}
)


@given(st.sampled_from(FIXED), st.sampled_from([2, 4]), st.integers(1, 3), LAYOUTS)
@examples(60)
def test_a_shelfs_order_from_a_file_is_the_shelfs(name: str, pp: int, rounds: int, layout: dict[str, object]) -> None:
    """Step time, parts, memory and all: to the last digit, also once the file is gone and with what changes."""
    rounds += name == "dualpipev"  # two stages on each rank, a microbatch for each at least
    order = build_schedule(name).order(pp, rounds * pp)
    of_shelf = Scenario.from_mapping(plan(pp, rounds * pp, name, **layout))
    with TemporaryDirectory() as folder:
        (Path(folder) / "my.csv").write_text(format_order(order))
        mapping = plan(pp, rounds * pp, {"csv": "my.csv"}, **layout)
        of_file = Scenario.from_mapping(mapping, path=Path(folder) / "plan.yaml")
    expected, found = simulate(of_shelf), simulate(of_file)
    assert answer(found) == answer(expected)
    assert answer(simulate(Scenario.from_mapping(found.to_json()["scenario"]))) == answer(expected)
    change = "training.sequence=1024"
    assert answer(simulate(of_file.with_overrides(change))) == answer(simulate(of_shelf.with_overrides(change)))


@st.composite
def shuffled(draw: st.DrawFn) -> tuple[str, int, int]:
    """An order of the shelf in which some passes of a rank have changed places: CSV, ranks, microbatches."""
    names = [name for name in SCHEDULE_NAMES if name != TWICE]
    name, ranks, rounds = draw(st.sampled_from(names)), draw(st.integers(1, 4)), draw(st.integers(1, 2))
    rounds += name == "dualpipev"  # two stages on each rank, a microbatch for each at least
    rows = [[*map(str, row)] for row in build_schedule(name).order(ranks, ranks * rounds)]
    for _ in range(draw(st.integers(0, 6))):
        row = draw(st.sampled_from(rows))
        one = draw(st.integers(0, len(row) - 1))
        other = draw(st.integers(one, min(one + 3, len(row) - 1)))
        row[one], row[other] = row[other], row[one]
    return "\n".join(map(",".join, rows)), ranks, ranks * rounds


@given(shuffled(), st.booleans())
@examples(200)
def test_whatever_the_rules_accept_runs_and_takes_what_a_dry_run_takes(
    written: tuple[str, int, int], overlap: bool
) -> None:
    """A second for each forward of a layer and half of a backward, messages free: the engine never hangs.

    Where sends are not overlapped some may wait for others, and the step takes as long or longer.
    """
    text, ranks, microbatches = written
    try:
        found = csv_schedule("my.csv", parse_csv(text, "my.csv"))
    except InputError as error:
        assert "my.csv" in str(error)
        return
    stages = len(found.stage_placement.stage_ranks)
    step = Step(stages, Layout(pp=ranks, pipeline_overlap=overlap), found, microbatches)
    taken = step.seconds(Fixed(forward=1.0, backward=1.0, weight=1.0))
    dry = dry_run(found.order(ranks, microbatches), forward=1, backward=2, weight=1).makespan
    assert taken == dry if overlap else taken >= dry


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (4, 8)])
def test_an_order_that_cannot_wait_for_backwards_sends_its_forwards_at_once(pp: int, microbatches: int) -> None:
    """Breadth-first order, sends not overlapped: the next rank needs the last forward before it has any gradient."""
    step = Step(2 * pp, Layout(pp=pp, pipeline_overlap=False), BreadthFirst(2), microbatches)
    taken = step.seconds(Fixed(forward=1.0, backward=2.0))
    assert taken == dry_run(BreadthFirst(2).order(pp, microbatches), forward=1, backward=2).makespan


def torch_rows(name: str, ranks: int, microbatches: int, *, comms: bool = False) -> list[str]:
    """Torch's generator as its `_dump_csv` writes it. comms: with what it communicates, whole backwards merged."""
    visualizer: Any = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    rows = visualizer.get_schedule_ops(name, ranks, microbatches, with_comms=comms)
    return [",".join("" if action is None else str(action) for action in row) for row in rows]


def require_laws(result: RenderedResult) -> None:
    """The breakdown and the critical path sum to the step; one rank of each class says what all of them do."""
    parts = result.breakdown.seconds
    assert np.allclose(parts.sum(axis=1), result.step_time)
    assert (parts >= 0.0).all()
    assert sum(result.to_json()["critical_path_s"].values()) == pytest.approx(result.step_time)
    every = simulate(result.scenario.with_overrides("cost.symmetry=off"))
    assert every.step_time == pytest.approx(result.step_time, rel=1e-9)


SHAPES = [(2, 4), (4, 4), (4, 12)]
SAME = {"GPipe": "gpipe", "Interleaved1F1B": "interleaved", "LoopedBFS": "bfs", "ZBVZeroBubble": "zb-v"}
"""Torch's 1F1B is left to `tests/schedules/test_orders`: its listing numbers forwards of the last rank from 1."""


@pytest.mark.parametrize(("pp", "microbatches"), SHAPES)
@pytest.mark.parametrize("name", SAME)
def test_torchs_order_takes_what_the_shelfs_takes(name: str, pp: int, microbatches: int) -> None:
    rows = {"orders": {"rows": torch_rows(name, pp, microbatches)}}
    found = simulate(Scenario.from_mapping(plan(pp, microbatches, rows)))
    assert answer(found) == answer(simulate(Scenario.from_mapping(plan(pp, microbatches, SAME[name]))))
    require_laws(found)


@pytest.mark.parametrize(("pp", "microbatches"), SHAPES)
def test_torchs_interleaved_zero_bubble_runs_with_zb_h1s_bubble(pp: int, microbatches: int) -> None:
    """No schedule of the shelf is its own; with F = I = W it waits p - 1 passes of a chunk, (p - 1)(F + I - W).

    So it does where torch's runtime has merged halves that follow each other, and gradients pass from halves to whole
    backwards; then the norm is summed as for any backward in halves.
    """
    finish = []
    for comms in (False, True):
        rows = torch_rows("InterleavedZeroBubble", pp, microbatches, comms=comms)
        scenario = Scenario.from_mapping(plan(pp, microbatches, {"orders": {"rows": rows}}))
        order = scenario.schedule.order(pp, microbatches)
        finish.append(dry_run(order, forward=1, backward=2, weight=1).makespan)
        require_laws(simulate(scenario))
    halved, merged = finish
    assert halved == 3 * 2 * microbatches + pp - 1 <= merged


@pytest.mark.parametrize(("name", "pp", "microbatches"), [("DualPipeV", 2, 4), ("ZBVZeroBubble", 4, 8)])
def test_torchs_other_forms_run(name: str, pp: int, microbatches: int) -> None:
    """Pairs of passes that torch may overlap run one after the other; what it communicates is left to lowering."""
    rows = torch_rows(name, pp, microbatches, comms=True)
    assert any("SEND_F" in row for row in rows)
    require_laws(simulate(Scenario.from_mapping(plan(pp, microbatches, {"orders": {"rows": rows}}))))


def test_all_of_the_shelf_is_covered() -> None:
    assert set(FIXED) == {"1f1b", "gpipe", "zb-v", "dualpipev", *CHUNKED_SCHEDULES}
