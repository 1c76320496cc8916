"""The nearest published run of a published run is itself, and far ones say in what they differ."""

from pathlib import Path

import pytest

from clustersim.scenario import Scenario
from clustersim.validation.case_scenario import case_uncertainty_model
from clustersim.validation.nearest_run import nearest_run
from clustersim.validation.steps import build_scenario, compare_step, read_steps

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("kind", ["steps", "mixtures", "narrow"])
def test_a_published_run_is_nearest_to_itself(kind: str) -> None:
    case = next(read_step for read_step in read_steps() if case_uncertainty_model(read_step) == kind)
    found = nearest_run(build_scenario(case))
    assert found is not None
    assert found.differences == ()
    assert (found.source, found.description.split(" on ")[0]) == (case.text("source"), case.text("model"))


def test_its_error_is_that_of_validation() -> None:
    case = next(read_step for read_step in read_steps() if read_step.text("case_id") == "nemotron4-340b-6144")
    found, compared = nearest_run(build_scenario(case)), compare_step(case)
    assert found is not None
    assert (found.measured_step_time, found.predicted_step_time) == (compared.measured, compared.predicted)
    assert found.relative_error == compared.error


def test_what_differs_is_told_with_the_largest_amount_first() -> None:
    found = nearest_run(Scenario.load(EXAMPLES / "llama3_405b_16k.yaml", ["cluster.gpus=8192", "layout.dp=64"]))
    assert found is not None
    amounts = [words for words in found.differences if "(here" in words]
    assert amounts and all("GPUs (here 8,192)" not in words or "8,192 GPUs" not in words for words in amounts)
    assert any(words.endswith("tokens (here 8,192)") or words.endswith("GPUs (here 8,192)") for words in amounts)
