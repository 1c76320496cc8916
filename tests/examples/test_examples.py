"""Examples run, are short, and print what they describe."""

import re
import runpy
import sys
from collections.abc import Callable
from math import log
from pathlib import Path

import pytest

from clustersim import Scenario, simulate
from clustersim.model.training import NoRecompute
from clustersim.parallel.data_parallel_strategy import FullyShard
from clustersim.parallel.layer_partition import partition_layers
from clustersim.report.rendered_result import RenderedResult
from clustersim.scenario.changes.expert_parallel import ep_fits_domains

EXAMPLES = Path(__file__).parents[2] / "examples"
SCENARIOS = sorted(EXAMPLES.glob("*.yaml"))
SCRIPTS = sorted(EXAMPLES.glob("*.py"))


ScriptRunner = Callable[..., str]


@pytest.fixture
def run_script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> ScriptRunner:
    """Runs a script with options as `python` does and returns its output; warnings are errors."""

    def run(script: str, *options: str) -> str:
        monkeypatch.setattr(sys, "argv", [script, *options])
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out

    return run


@pytest.mark.parametrize("path", [*SCENARIOS, *SCRIPTS], ids=lambda path: path.name)
def test_an_example_is_under_sixty_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 60


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.name)
def test_example_scenario_fits_and_breakdown_sums_to_step(path: Path) -> None:
    result_json = simulate(Scenario.load(path)).to_json()
    assert result_json["fits"]
    assert sum(result_json["breakdown_s"].values()) == pytest.approx(result_json["step_time_s"])
    assert 0 < result_json["mfu"] <= result_json["hfu"] < 1


@pytest.fixture(scope="module")
def flagship() -> RenderedResult:
    return simulate(Scenario.load(EXAMPLES / "llama3_405b_16k.yaml"))


def test_llama3_405b_is_laid_out_as_the_paper_ran_it(flagship: RenderedResult) -> None:
    """arXiv:2407.21783, table 4 and section 3.3: the first and the last chunk hold only the embedding and the head."""
    layout, training = flagship.scenario.layout, flagship.scenario.training
    assert (layout.tp, layout.cp, layout.pp, layout.dp, flagship.rank_count) == (8, 1, 16, 128, 16384)
    assert (training.sequence, training.global_batch, training.recompute) == (8192, 2048, NoRecompute())
    assert isinstance(layout.data, FullyShard)
    assert not layout.data.reshards_parameters(is_pipelined=True)
    assert layout.deallocate_pipeline_outputs and layout.overlap_p2p_comm
    stages = partition_layers(layout.layers_per_stage, 126, flagship.scenario.placement)
    assert (stages[0], *set(stages[1:-1]), stages[-1]) == (0, 1, 0)


def test_llama3_405b_is_as_fast_as_measured_and_fits_as_it_did(flagship: RenderedResult) -> None:
    """400 TFLOP/s per GPU, by whichever convention of attention's FLOP (the paper does not say), in 80 GB."""
    answer = flagship.to_json()
    causal = answer["model_tflops_per_gpu"] * answer["mfu_causal"] / answer["mfu"]
    assert answer["model_tflops_per_gpu"] == pytest.approx(400, rel=0.05)
    assert causal == pytest.approx(400, rel=0.05)
    assert answer["step_time_s"] == pytest.approx(6.5, rel=0.05)
    assert answer["fits"] and answer["peak_memory_bytes"] < 80 * 2**30


def test_llama3_405b_has_the_interval_of_a_measured_run(flagship: RenderedResult) -> None:
    """No wider than without the published run, which it contains and names."""
    low, high = flagship.step_time_interval
    without = flagship.uncertainty.interval_without_reference
    run = flagship.to_json()["published_run"]
    assert low <= run["measured_s"] <= high
    assert (run["model_tflops_per_gpu"], run["quality"]) == (400, "C")
    assert log(high / low) <= log(without.high / without.low)
    assert "measured at this size" in flagship.interval_description and "400 TFLOP/s" in flagship.interval_description


def test_llama3_405b_symmetry_on_a_shared_network() -> None:
    """Pods hold three stages each, so contention differs between stages but not between replicas."""
    result = simulate(Scenario.load(EXAMPLES / "llama3_405b_16k.yaml", ["cost.network=shared"]))
    assert (result.rank_count, result.simulated_rank_count) == (16384, 16)


def test_deepseek_v3_layout_and_bf16_gpu_hours() -> None:
    """arXiv:2412.19437, table 1: 180 K H800 GPU hours per trillion tokens in FP8; bf16 matmuls take at most twice."""
    result = simulate(Scenario.load(EXAMPLES / "deepseek_v3.yaml"))
    layout, training = result.scenario.layout, result.scenario.training
    assert (layout.tp, layout.pp, layout.ep, result.rank_count) == (1, 16, 64, 2048)
    assert (training.global_batch, training.sequence) == (15360, 4096)
    hours = result.to_json()["gpu_hours_per_trillion_tokens"]
    assert hours == pytest.approx(1e12 / result.tokens_per_second * 2048 / 3600)
    assert 180e3 < hours < 360e3
    assert any("loads of experts" in limitation for limitation in result.model_limitations)


@pytest.mark.parametrize("name", ["mixtral_8x22b", "qwen3_235b"])
def test_smaller_moe_examples_keep_ep_on_nvlink(name: str) -> None:
    scenario = Scenario.load(EXAMPLES / f"{name}.yaml")
    assert ep_fits_domains(scenario, scenario.layout.ep)
    assert not ep_fits_domains(Scenario.load(EXAMPLES / "deepseek_v3.yaml"), 64)


def test_ddp_scaling_example(run_script: ScriptRunner) -> None:
    lines = run_script("ddp_scaling.py").splitlines()
    verdicts = [line for line in lines if "linear: at 1,024 GPUs" in line]
    assert len(verdicts) == 2
    assert sum(bool(re.match(r" +[\d,]+ +[\d,]+ +[\d.]+ s", line)) for line in lines) == 16


def test_zero_memory_example_equals_the_paper(run_script: ScriptRunner) -> None:
    # Rajbhandari et al. 2020, figure 1: 16 bytes, 4 + 12/64, 2 + 14/64 and 16/64 for each of 7.5e9 parameters
    table = run_script("zero_memory.py")
    states = [float(text) for text in re.findall(r"^\w+ +([\d.]+) GB", table, re.MULTILINE)]
    assert states == pytest.approx([120, 31.4, 16.6, 1.9], rel=0.02)


def test_bubble_example_equals_the_textbook(run_script: ScriptRunner) -> None:
    table_rows = re.findall(r"^ +(\d+)  (.+?) +([\d.]+)% +([\d.]+)%$", run_script("bubble.py"), re.MULTILINE)
    assert len(table_rows) == 16
    for _, _, bubble, textbook in table_rows:
        assert float(bubble) == pytest.approx(float(textbook), abs=1.6)  # percent of the step


@pytest.mark.slow
def test_what_fits_example(run_script: ScriptRunner) -> None:
    lines = run_script("what_fits.py").splitlines()
    assert len(lines) == 6
    assert all("fits on " in line or "does not fit: even " in line for line in lines)


def test_stragglers_example(run_script: ScriptRunner, tmp_path: Path) -> None:
    """The other seven GPUs of the node are in the slow GPU's TP group and wait anyway. Two replicas here."""
    text = run_script("stragglers.py", "--gpus", "256", "--html", str(tmp_path / "page.html"))
    table_rows = re.findall(r"^(\S.*?) +[\d.]+ s +([\d.]+)% +[\d.]+ s +(\d+) +(\d+)$", text, re.MULTILINE)
    slowdown_percent = {name: float(percent) for name, percent, *_ in table_rows}
    ranks = {name: (int(slow), int(simulated)) for name, _, slow, simulated in table_rows}
    assert slowdown_percent.pop("healthy") == 0
    assert min(slowdown_percent.values()) > 0
    assert slowdown_percent["one slow node, middle stage"] == pytest.approx(
        slowdown_percent["one slow GPU, middle stage"], abs=0.011
    )
    assert (
        slowdown_percent["one slow GPU, first stage"] < slowdown_percent["one slow GPU, middle stage"] < 11.2
    )  # 1 / 0.9
    assert ranks["one slow GPU, middle stage"][0] == 1
    assert ranks["one slow node, middle stage"][0] == 8
    assert ranks["1 % jitter of every kernel"] == (0, 256)
    assert "What stragglers cost" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_two_sites_in_step_and_apart(run_script: ScriptRunner) -> None:
    """Slower links are slower for both, and DiLoCo needs less of them."""
    _, *lines = run_script("sites.py").splitlines()
    in_step, apart = zip(*(map(float, re.findall(r"([\d.]+)%", line)) for line in lines), strict=True)
    assert list(in_step) == sorted(in_step)
    assert list(apart) == sorted(apart)
    assert all(together < alone for together, alone in zip(in_step, apart, strict=True))
