"""Suggestions to make a scenario fit: applied as overrides they are legal, and the peak is the stated one."""

import shlex
from functools import cache
from typing import Any

import pytest

from clustersim import Scenario
from clustersim.common import data_files
from clustersim.common.units import format_bytes
from clustersim.results.memory_check import MemoryCheckReport, check, peak_memory, peak_memory_use, required_headroom
from clustersim.results.oom_suggestions import NOTHING_FITS
from clustersim.simulation import simulate
from clustersim.uncertainty.memory_error import fits_surely


def scenario(model: Any, gpus: int, layout: dict[str, Any], **training: Any) -> Scenario:
    return Scenario.from_mapping(
        {
            "model": model,
            "cluster": {"name": "dgx-a100", "gpus": gpus},
            "layout": layout,
            "schedule": training.pop("schedule", "1f1b"),
            "training": {"sequence": 2048, "global_batch": gpus, **training},
            "framework": {"name": "ideal", "launch": "10 us"},
        }
    )


CASES = {
    "more than weights": scenario("llama2-13b", 64, {"dp": 64}),
    "activations": scenario("llama2-7b", 8, {"tp": 8, "dp": 1}, sequence=4096, global_batch=64, microbatch=32),
    "uneven vocabulary": scenario("gpt2-xl", 8, {"dp": 8}, sequence=1024, global_batch=512, microbatch=64),
    "few key/value heads": scenario("qwen2.5-7b", 16, {"dp": 16}),
    "uneven layers": scenario(
        "llama2-13b",
        32,
        {"pp": 2, "dp": 16, "layers_per_stage": [21, 19]},
        schedule="1f1b",
        microbatch=2,
        global_batch=64,
    ),
    "uneven layers, full node": scenario(
        "llama2-70b", 64, {"tp": 8, "pp": 2, "dp": 4, "layers_per_stage": [41, 39]}, global_batch=64
    ),
    "uneven vocabulary, large": scenario({"preset": "llama2-13b", "vocab": 32001}, 64, {"dp": 64}),
    "interleaved": scenario(
        "llama2-70b", 64, {"tp": 4, "pp": 2, "dp": 8}, schedule={"interleaved": {"chunks": 4}}, global_batch=128
    ),
    "recomputed already": scenario("llama2-13b", 64, {"dp": 64}, recompute="full"),
    "cores recomputed": scenario(
        "llama2-13b", 64, {"tp": 8, "dp": 8}, microbatch=16, global_batch=128, recompute="selective"
    ),
    "operations recomputed": scenario(
        "llama2-13b", 64, {"tp": 8, "dp": 8}, microbatch=32, global_batch=256, recompute="selective_op"
    ),
    "two changes": scenario("llama2-70b", 32, {"tp": 8, "dp": 4}, sequence=8192, global_batch=64),
    "one process": scenario("llama2-7b", 8, {"dp": 8, "data": "data_parallel"}),
    "context": scenario("llama2-13b", 32, {"cp": 2, "dp": 16}, sequence=4096, microbatch=2),
    "frozen": scenario("llama2-70b", 8, {"dp": 8}, lora=16, recompute="full"),
    "odd sequence": scenario("llama2-7b", 8, {"tp": 2, "dp": 4}, sequence=2047, global_batch=64, microbatch=16),
}


@cache
def check_case(name: str) -> MemoryCheckReport:
    """The report of a case, which several tests read."""
    return check(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_each_suggestion_is_legal_and_has_the_stated_peak(name: str) -> None:
    oom_scenario, report = CASES[name], check_case(name)
    assert not report.fits
    assert 1 <= len(report.suggestions) <= 4
    for suggestion in report.suggestions:
        changed = oom_scenario.with_overrides(*suggestion.overrides)
        assert check(changed).fits
        assert peak_memory(changed) == suggestion.peak
        words = shlex.split(suggestion.description.partition(" would fit (")[0])
        assert words[1::2] == list(suggestion.overrides)
        assert f"({format_bytes(suggestion.peak)} of " in suggestion.description


@pytest.mark.parametrize("name", CASES)
def test_suggestions_keep_the_gpus_and_the_batch(name: str) -> None:
    oom_scenario = CASES[name]
    for suggestion in check_case(name).suggestions:
        changed = oom_scenario.with_overrides(*suggestion.overrides)
        assert changed.layout.world_size == oom_scenario.layout.world_size
        assert changed.training.global_batch == oom_scenario.training.global_batch


@pytest.mark.parametrize("name", CASES)
def test_two_changes_are_suggested_only_if_no_single_one_leaves_the_headroom(name: str) -> None:
    """Neither change of a pair leaves it if applied alone; together they do, and so does every single change."""
    suggestions = [suggestion.overrides for suggestion in check_case(name).suggestions]
    assert any(map(is_pair, suggestions)) == (name == "two changes")
    for suggestion in suggestions:
        assert leaves_headroom(CASES[name].with_overrides(*suggestion))
        if is_pair(suggestion):
            first, *second = suggestion
            assert not leaves_headroom(CASES[name].with_overrides(first))
            assert not leaves_headroom(CASES[name].with_overrides(*second))


def is_pair(suggestion: tuple[str, ...]) -> bool:
    """Whether all layers are recomputed in addition to another change."""
    first, *others = suggestion
    return first == "training.recompute=full" and any(not other.startswith("training.recompute") for other in others)


def leaves_headroom(changed: Scenario) -> bool:
    return peak_memory_use(changed).leaves_headroom(required_headroom(changed, None))


def test_a_scenario_that_fits_has_no_suggestions() -> None:
    report = check(scenario("llama2-7b", 64, {"tp": 8, "dp": 8}))
    assert report.fits
    assert report.suggestions == ()


NEARLY_FITS = Scenario.from_mapping(
    {
        "model": "llama3-70b",
        "cluster": {"name": "dgx-a100", "gpus": 64},
        "layout": {"tp": 8, "pp": 2, "dp": 4, "sequence_parallel": True, "data": "zero1"},
        "training": {"sequence": 12288, "global_batch": 256},
        "framework": "megatron",
    }
)


def test_what_nearly_fits_is_told_what_fits_surely() -> None:
    """70B on 64 A100 with 5 of 80 GiB left: the memory model errs by more than that."""
    report = check(NEARLY_FITS)
    assert report.fits
    assert not fits_surely(report.fit_probability)
    assert report.suggestions
    for suggestion in report.suggestions:
        changed = check(NEARLY_FITS.with_overrides(*suggestion.overrides))
        assert fits_surely(changed.fit_probability)
    assert simulate(NEARLY_FITS.with_overrides("training.global_batch=8")).oom_suggestions == report.suggestions


def test_a_long_sequence_is_told_context_parallelism() -> None:
    """The inputs of the layers of a million tokens do not fit, even if all else is recomputed."""
    long = NEARLY_FITS.with_overrides(
        "model=llama3-8b", "layout={tp: 8, dp: 8, sequence_parallel: true, data: zero1}", "training.sequence=1048576",
        "training.recompute=full", "training.global_batch=16",
    )  # fmt: skip
    report = check(long)
    assert not report.fits
    assert any(suggestion.overrides[0].startswith("layout.cp=") for suggestion in report.suggestions)


@pytest.mark.parametrize("framework", data_files.list_names("frameworks"))
def test_suggestions_are_what_the_framework_runs(framework: str) -> None:
    """Transformers has no pipeline for training, llm.c no other parallelism than of data."""
    too_large = Scenario.from_mapping(
        {
            "model": "llama2-13b",
            "cluster": {"name": "dgx-a100", "gpus": 16},
            "layout": {"dp": 16},
            "training": {"sequence": 8192, "global_batch": 16},
            "framework": framework,
        }
    )
    supported = too_large.framework.supported_layouts
    for suggestion in check(too_large).suggestions:
        if suggestion == NOTHING_FITS:
            continue
        changed = too_large.with_overrides(*suggestion.overrides)
        degrees = changed.layout.all_degrees
        assert {name for name in ("tp", "cp", "pp", "ep") if degrees[name] > 1} <= set(supported.axes)
        strategies = [override.partition("=")[2] for override in suggestion.overrides if "layout.data" in override]
        assert set(strategies) <= set(supported.strategies(is_pipelined=changed.layout.is_pipelined))


def test_no_fitting_change_is_reported() -> None:
    """A trillion parameters: 18 TB of weights, gradients and states do not fit 8 x 80 GiB with any change."""
    report = check(scenario("megatron-1t", 8, {"tp": 8}))
    assert report.suggestions == (NOTHING_FITS,)
