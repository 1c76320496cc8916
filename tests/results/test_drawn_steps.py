"""Steps with other documents: each is the step of its seed, and the output says how their times spread."""

from typing import Any

import numpy as np
import pytest

from clustersim import Scenario, simulate
from clustersim.cli.run import simulate_and_report
from clustersim.common.errors import ClusterSimError
from clustersim.report.run_page import run_page


def scenario(**documents: Any) -> Scenario:
    """Four replicas of a small model that wait for each other in every layer."""
    model = {"layers": 2, "hidden": 1024, "heads": 8, "ffn": 4096, "vocab": 32000}
    training = {"sequence": 16384, "global_batch": 4, "documents": {"mean": 2000, "sigma": 1.5, **documents}}
    cluster, layout = {"name": "dgx-h100", "gpus": 4}, {"data": "fsdp"}
    return Scenario.from_mapping({"model": model, "cluster": cluster, "layout": layout, "training": training})


def test_draws_are_the_steps_of_the_next_seeds() -> None:
    drawn = simulate(scenario(draws=3, seed=5))
    assert drawn.drawn_step_times == tuple(simulate(scenario(seed=5 + draw)).step_time for draw in range(3))
    assert drawn.step_time == drawn.drawn_step_times[0]
    percentiles = drawn.to_json()["drawn_documents"]["distribution_s"]
    assert percentiles["p50"] == np.median(drawn.drawn_step_times)
    assert percentiles["min"] < percentiles["max"]


def test_one_draw_is_no_distribution() -> None:
    result = simulate(scenario())
    assert result.drawn_step_times == ()
    assert "drawn_documents" not in result.to_json()


def test_documents_of_one_length_take_the_same_time_in_every_draw() -> None:
    times = simulate(scenario(mean=16384, sigma=0, draws=3)).drawn_step_times
    assert len(set(times)) == 1


def test_terminal_and_page_show_the_spread(capsys: pytest.CaptureFixture[str]) -> None:
    from clustersim.cli.outputs import Outputs

    built = scenario(draws=3)
    simulate_and_report(built, (), Outputs())
    assert "3 draws of documents: min" in capsys.readouterr().out
    assert "Steps with other documents" in run_page(simulate(built))


def test_draws_are_counted_from_one() -> None:
    with pytest.raises(ClusterSimError, match="draws"):
        scenario(draws=0)
