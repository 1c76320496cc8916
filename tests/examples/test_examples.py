"""Every example runs, is short, and says what it promises."""

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clustersim import Scenario, simulate
from clustersim.model.training import FullRecompute
from clustersim.results.memory_check import check
from clustersim.scenario.changes.expert_parallel import ep_fits_domains

EXAMPLES = Path(__file__).parents[2] / "examples"
SCENARIOS = sorted(EXAMPLES.glob("*.yaml"))
SCRIPTS = sorted(EXAMPLES.glob("*.py"))


Printed = Callable[..., str]


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Printed:
    """What a script prints that is run with some options, as by python; a warning is an error."""

    def run(script: str, *options: str) -> str:
        monkeypatch.setattr(sys, "argv", [script, *options])
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        said = capsys.readouterr()
        assert said.err == ""
        return said.out

    return run


@pytest.mark.parametrize("path", [*SCENARIOS, *SCRIPTS], ids=lambda path: path.name)
def test_an_example_is_under_sixty_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 60


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.name)
def test_a_scenario_fits_and_its_parts_sum_to_the_step(path: Path) -> None:
    answer = simulate(Scenario.load(path)).to_json()
    assert answer["fits"]
    assert sum(answer["breakdown_s"].values()) == pytest.approx(answer["step_time_s"])
    assert 0 < answer["mfu"] <= answer["hfu"] < 1


def test_the_405b_example_is_the_run_that_it_says_and_recomputes_no_more_than_it_must() -> None:
    scenario = Scenario.load(EXAMPLES / "llama3_405b_16k.yaml")
    layout, training = scenario.layout, scenario.training
    assert (layout.tp, layout.pp, layout.dp, scenario.cluster.gpu_count) == (8, 16, 128, 16384)
    assert (training.sequence, training.global_batch, training.microbatch) == (8192, 2048, 1)
    assert training.recompute == FullRecompute(layers=1)
    assert not check(scenario.with_overrides("training.recompute=none")).fits
    assert not check(scenario.with_overrides("training.recompute=selective")).fits


def test_the_405b_example_folds_to_its_pipeline_ranks_on_a_shared_network_too() -> None:
    """Pods hold three stages each, so that stages differ in what their messages meet, but replicas do not."""
    result = simulate(Scenario.load(EXAMPLES / "llama3_405b_16k.yaml", ["cost.network=shared"]))
    assert (result.rank_count, result.simulated_rank_count) == (16384, 16)


def test_deepseek_v3_is_the_papers_layout_and_takes_more_gpu_hours_than_the_papers_fp8() -> None:
    """arXiv:2412.19437, table 1: 180 K H800 GPU hours for each trillion tokens; products in bf16 take at most twice."""
    result = simulate(Scenario.load(EXAMPLES / "deepseek_v3.yaml"))
    layout, training = result.scenario.layout, result.scenario.training
    assert (layout.tp, layout.pp, layout.ep, result.rank_count) == (1, 16, 64, 2048)
    assert (training.global_batch, training.sequence) == (15360, 4096)
    hours = result.to_json()["gpu_hours_per_trillion_tokens"]
    assert hours == pytest.approx(1e12 / result.tokens_per_second * 2048 / 3600)
    assert 180e3 < hours < 360e3
    assert any("loads of experts" in model_limitation for model_limitation in result.model_limitations)


@pytest.mark.parametrize("name", ["mixtral_8x22b", "qwen3_235b"])
def test_tokens_of_the_smaller_mixtures_stay_on_nvlink(name: str) -> None:
    scenario = Scenario.load(EXAMPLES / f"{name}.yaml")
    assert ep_fits_domains(scenario, scenario.layout.ep)
    assert not ep_fits_domains(Scenario.load(EXAMPLES / "deepseek_v3.yaml"), 64)


def test_data_parallel_scaling_says_whether_it_is_near_linear_and_why(printed: Printed) -> None:
    lines = printed("ddp_scaling.py").splitlines()
    verdicts = [line for line in lines if "linear: at 1,024 GPUs" in line]
    assert len(verdicts) == 2
    assert sum(bool(re.match(r" +[\d,]+ +[\d,]+ +[\d.]+ s", line)) for line in lines) == 16


def test_zero_states_are_the_papers(printed: Printed) -> None:
    # Rajbhandari et al. 2020, figure 1: 16 bytes, 4 + 12/64, 2 + 14/64 and 16/64 for each of 7.5e9 parameters
    table = printed("zero_memory.py")
    states = [float(number) for number in re.findall(r"^\w+ +([\d.]+) GB", table, re.MULTILINE)]
    assert states == pytest.approx([120, 31.4, 16.6, 1.9], rel=0.02)


def test_bubbles_shrink_with_microbatches_and_chunks_as_the_textbook_says(printed: Printed) -> None:
    rows = re.findall(r"^ +(\d+)  (.+?) +([\d.]+)% +([\d.]+)%$", printed("bubble.py"), re.MULTILINE)
    assert len(rows) == 16
    for _, _, bubble, textbook in rows:
        assert float(bubble) == pytest.approx(float(textbook), abs=1.6)  # percent of the step


def test_what_fits_names_the_number_of_gpus_or_says_that_none_is_enough(printed: Printed) -> None:
    lines = printed("what_fits.py").splitlines()
    assert len(lines) == 6
    assert all("fits on " in line or "does not fit: even " in line for line in lines)


def test_one_slow_gpu_costs_as_much_as_its_node_and_less_on_a_stage_with_less_to_do(
    printed: Printed, tmp_path: Path
) -> None:
    """The seven others of the node are its tensor-parallel group: they wait for it in any case. Two replicas here."""
    text = printed("stragglers.py", "--gpus", "256", "--html", str(tmp_path / "page.html"))
    rows = re.findall(r"^(\S.*?) +[\d.]+ s +([\d.]+)% +[\d.]+ s +(\d+) +(\d+)$", text, re.MULTILINE)
    longer = {name: float(percent) for name, percent, *_ in rows}
    ranks = {name: (int(slow), int(simulated)) for name, _, slow, simulated in rows}
    assert longer.pop("healthy") == 0
    assert min(longer.values()) > 0
    assert longer["one slow node, middle stage"] == pytest.approx(longer["one slow GPU, middle stage"], abs=0.011)
    assert longer["one slow GPU, first stage"] < longer["one slow GPU, middle stage"] < 11.2  # 1 / 0.9
    assert ranks["one slow GPU, middle stage"][0] == 1
    assert ranks["one slow node, middle stage"][0] == 8
    assert ranks["1 % jitter of every kernel"] == (0, 256)
    assert "What stragglers cost" in (tmp_path / "page.html").read_text(encoding="utf-8")
