"""Which published run is of a scenario's job, and is the packaged table what predictions give?"""

from math import exp
from pathlib import Path

import pytest

from clustersim.scenario import Scenario
from clustersim.uncertainty.reference_runs import Job, read_reference_runs, reference_run, to_cells
from clustersim.validation.steps import compare_step, read_steps

FLAGSHIP = Path(__file__).parents[2] / "examples" / "llama3_405b_16k.yaml"


def test_the_flagship_is_the_published_job() -> None:
    run = reference_run(Scenario.load(FLAGSHIP))
    assert run is not None
    assert (run.case_id, run.measured, run.tflops_per_gpu) == ("llama3-T4-16384-cp1", 6.49362, 400)


@pytest.mark.parametrize(
    "change", ["training.microbatch=2", "training.recompute=full", "schedule.interleaved.chunks=4"]
)
def test_runs_of_a_job_may_differ_in_how_they_pass(change: str) -> None:
    assert reference_run(Scenario.load(FLAGSHIP, [change])) is not None


@pytest.mark.parametrize(
    "changes",
    [
        ["layout.data=zero1"],
        ["layout.tp=4", "layout.dp=256"],
        ["training.sequence=4096"],
        ["model={preset: llama3-405b, layers: 127}"],
        ["cluster.fabric.spine.oversubscription=3"],
        ["cluster.name=dgx-h100"],
        ["degradations.slow=[{gpus: 3, speed: 0.9}]"],
        ["degradations.jitter=1%"],
        ["cost.network=uncontended"],
    ],
    ids=lambda changes: changes[0].split("=")[0],
)
def test_another_job_or_other_conditions_are_not_what_was_measured(changes: list[str]) -> None:
    assert reference_run(Scenario.load(FLAGSHIP, changes)) is None


def test_the_table_survives_its_cells() -> None:
    runs = read_reference_runs()
    assert len({run.case_id for run in runs}) == len(runs)
    assert all(Job.from_cells(to_cells(run)) == run.job for run in runs)


def test_the_table_has_the_errors_of_todays_predictions() -> None:
    """Of Llama 3's rows, which no constant has seen."""
    cases = {case.text("case_id"): case for case in read_steps()}
    rows = [run for run in read_reference_runs() if run.source == "llama3"]
    assert len(rows) == 3
    for run in rows:
        comparison = compare_step(cases[run.case_id])
        assert comparison.predicted is not None
        assert exp(run.log_error) == pytest.approx(comparison.measured / comparison.predicted, abs=1e-3)
