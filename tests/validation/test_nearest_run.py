"""The nearest published run of a published run is itself, and far ones say in what they differ."""

from pathlib import Path

import pytest

from clustersim.scenario import Scenario
from clustersim.validation.case_scenario import case_uncertainty_model
from clustersim.validation.nearest_run import nearest_run
from clustersim.validation.steps import build_scenario, compare_step, read_steps

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("kind", ["dense", "moe", "low_precision"])
def test_a_published_run_is_nearest_to_itself(kind: str) -> None:
    case = next(read_step for read_step in read_steps() if case_uncertainty_model(read_step) == kind)
    nearest = nearest_run(build_scenario(case))
    assert nearest is not None
    assert nearest.differences == ()
    assert (nearest.source, nearest.description.split(" on ")[0]) == (case.text("source"), case.text("model"))


def test_the_run_of_the_same_job_is_nearest_whatever_its_quality() -> None:
    """Llama 3 405B as it ran on 16,384 GPUs, of which the paper leaves some settings open."""
    nearest = nearest_run(Scenario.load(EXAMPLES / "llama3_405b_16k.yaml"))
    assert nearest is not None
    assert (nearest.source, nearest.measured_step_time, nearest.differences) == ("llama3", 6.49362, ())


def test_its_error_is_that_of_validation() -> None:
    case = next(read_step for read_step in read_steps() if read_step.text("case_id") == "nemotron4-340b-6144")
    nearest, compared = nearest_run(build_scenario(case)), compare_step(case)
    assert nearest is not None
    assert (nearest.measured_step_time, nearest.predicted_step_time) == (compared.measured, compared.predicted)
    assert nearest.relative_error == compared.error


def test_differences_are_sorted_by_amount() -> None:
    nearest = nearest_run(Scenario.load(EXAMPLES / "llama3_405b_16k.yaml", ["cluster.gpus=4096", "layout.dp=32"]))
    assert nearest is not None
    amounts = [label for label in nearest.differences if "(here" in label]
    assert amounts and all("GPUs (here 4,096)" not in label or "4,096 GPUs" not in label for label in amounts)
    assert any(label.endswith("tokens (here 8,192)") or label.endswith("GPUs (here 4,096)") for label in amounts)
