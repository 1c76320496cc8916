"""Suggestions to make a scenario fit: applied as overrides they are legal, and the peak is the stated one."""

from typing import Any

import pytest

from clustersim import Scenario
from clustersim.common.units import format_bytes
from clustersim.results.memory_check import check, peak_memory, peak_memory_use, required_headroom


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


def overrides(suggestion: str) -> list[str]:
    """`a=1 with b=2 c=3 would fit (...)` as overrides."""
    changes, sign, _ = suggestion.partition(" would fit (")
    assert sign, suggestion
    return changes.replace(" with ", " ").split()


@pytest.mark.parametrize("name", CASES)
def test_each_suggestion_is_legal_and_has_the_stated_peak(name: str) -> None:
    oom_scenario = CASES[name]
    report = check(oom_scenario)
    assert not report.fits
    assert 1 <= len(report.suggestions) <= 4
    for suggestion in report.suggestions:
        changed = oom_scenario.with_overrides(*overrides(suggestion))
        assert check(changed).fits
        assert f"({format_bytes(peak_memory(changed))} of " in suggestion


@pytest.mark.parametrize("name", CASES)
def test_suggestions_keep_the_gpus_and_the_batch(name: str) -> None:
    oom_scenario = CASES[name]
    for suggestion in check(oom_scenario).suggestions:
        changed = oom_scenario.with_overrides(*overrides(suggestion))
        assert changed.layout.world_size == oom_scenario.layout.world_size
        assert changed.training.global_batch == oom_scenario.training.global_batch


@pytest.mark.parametrize("name", CASES)
def test_two_changes_are_suggested_only_if_no_single_one_leaves_the_headroom(name: str) -> None:
    """Neither change of a pair leaves it if applied alone; together they do, and so does every single change."""
    suggestions = check(CASES[name]).suggestions
    assert any(" with " in suggestion for suggestion in suggestions) == (name == "two changes")
    for suggestion in suggestions:
        assert leaves_headroom(CASES[name].with_overrides(*overrides(suggestion)))
        first, sign, second = suggestion.partition(" would fit")[0].partition(" with ")
        if sign:
            assert not leaves_headroom(CASES[name].with_overrides(first))
            assert not leaves_headroom(CASES[name].with_overrides(*second.split()))


def leaves_headroom(changed: Scenario) -> bool:
    return peak_memory_use(changed).leaves_headroom(required_headroom(changed, None))


def test_a_scenario_that_fits_has_no_suggestions() -> None:
    report = check(scenario("llama2-7b", 64, {"tp": 8, "dp": 8}))
    assert report.fits
    assert report.suggestions == ()


def test_no_fitting_change_is_reported() -> None:
    """A trillion parameters: 18 TB of weights, gradients and states do not fit 8 x 80 GiB with any change."""
    report = check(scenario("megatron-1t", 8, {"tp": 8}))
    assert report.suggestions == (
        "no single change of recomputation, sharding, degrees or offload fits; use more GPUs or a smaller model",
    )
