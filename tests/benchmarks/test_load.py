import pytest

from clustersim import Scenario
from tests.benchmarks.load import FIGURES, LOADS, Load, LoadMeasurement, figures_by_name, measure, table_lines

QUICK = {"model": "llama-tiny", "cluster": {"name": "dgx-h100", "gpus": 8}, "layout": {"dp": 8}, "steps": 3,
         "training": {"sequence": 256, "global_batch": 8}, "degradations": {"jitter": "1%"}}  # fmt: skip


@pytest.mark.parametrize("name", LOADS)
def test_loads_are_valid_and_have_targets(name: str) -> None:
    scenario = Scenario.from_mapping(LOADS[name].mapping())
    assert scenario.layout.world_size == scenario.cluster.gpu_count
    assert LOADS[name].first_measured.keys() <= FIGURES.keys()


def test_a_command_is_measured_and_held_against_its_target() -> None:
    load = Load(lambda: dict(QUICK), ("run", "{plan}", "--json", "{folder}/run.json"), {"cpu_seconds": 1e6})
    measured = measure(load)
    assert measured.cpu_seconds > 0.1
    assert measured.peak_bytes > 4e7
    assert measured.step_spread is not None
    assert 0.0 < measured.step_spread < 0.1  # jittered steps vary
    assert figures_by_name({"x": measured}).keys() == {"x_seconds", "x_cpu_seconds", "x_peak_bytes", "x_step_spread"}


def test_the_table_says_which_targets_are_met() -> None:
    measured = {"gpus_1m": LoadMeasurement(1.0, 1.0, 4.6e9), "jitter_10_steps": LoadMeasurement(1.0, 1.0, 3.7e9, 0.01)}
    _, first, second = table_lines(measured)
    assert first.endswith("9.3 -> 4.6 GB, at most 4.65: met")
    assert second.endswith("7.2 -> 3.7 GB, at most 3.6: NOT MET; steps 1.00% apart")
