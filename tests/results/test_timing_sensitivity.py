"""The spread of chaotic steps: rounding is told apart from what a step is sensitive to."""

from dataclasses import replace
from typing import Any

import pytest

from clustersim.results import timing_sensitivity as module
from clustersim.results.timing_sensitivity import TimingSensitivity, timing_sensitivity
from clustersim.scenario import Scenario
from clustersim.simulation import simulate, simulate_with_spread

QUIET = {
    "model": "llama3-8b",
    "cluster": {"name": "dgx-h100", "gpus": 32},
    "layout": {"dp": 32},
    "training": {"sequence": 8192, "global_batch": 32},
    "framework": "ideal",
}
CHAOTIC: dict[str, Any] = {
    # tensor-parallel groups over nodes, whose flows meet those of others on hashed routes of small leaves
    "model": {
        "family": "llama", "layers": 2, "hidden": 512, "heads": 8, "head_dim": 64, "kv_heads": 4, "ffn": 128,
        "vocab": 4096, "block": "parallel_norms", "positions": "alibi", "norm": "layernorm",
    },
    "cluster": {
        "name": "dgx-h100",
        "fabric": {"ecmp": "hashed", "leaf": {"nodes": 2}, "spine": {"units": 2}, "core": {"pods": 16}},
        "gpus": 128,
    },
    "layout": {
        "tp": 4, "dp": 32, "order": ["dp", "tp", "pp", "cp"], "sequence_parallel": True,
        "data": {"hsdp": {"shard": 16, "all_reduce": "last_microbatch"}},
    },
    "schedule": "gpipe",
    "training": {
        "sequence": 1024, "global_batch": 192, "microbatch": 1, "loss": "vocab_parallel", "optimizer": "adam",
        "lora": {"rank": 16, "base": "nf4"}, "overheads": {"grouping": "streams"},
    },
}  # fmt: skip


def test_spread_is_from_the_fastest_to_the_slowest_run() -> None:
    assert timing_sensitivity(2.0, (2.02, 1.98, 2.0)) == TimingSensitivity(pytest.approx(0.99), pytest.approx(1.01))
    assert timing_sensitivity(2.0, (2.02,)) == TimingSensitivity(1.0, pytest.approx(1.01))
    assert timing_sensitivity(2.0, ()) is None
    assert timing_sensitivity(2.0, (2.0 + 1e-9,)) is None  # a step that follows its kernels is not chaotic


def test_a_step_without_many_shared_links_is_not_run_again() -> None:
    result = simulate_with_spread(Scenario.from_mapping(QUIET))
    assert result.perturbed_step_times == ()
    assert result.to_json()["timing_sensitivity"] is None


def test_kernels_of_perturbed_runs_are_slower_by_parts_in_a_trillion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_DELAYED_OPERATIONS", 0)
    scenario = Scenario.from_mapping(QUIET)
    result = simulate_with_spread(scenario)
    assert len(result.perturbed_step_times) == module.RUN_COUNT
    changes = [time / result.step_time - 1.0 for time in result.perturbed_step_times]
    # the step is mostly kernels, and no longer than all of it being kernels
    assert changes == [pytest.approx(run * 0.9e-12, abs=run * 0.3e-12) for run in (1, 2, 3)]
    assert result.timing_sensitivity is None


def test_the_interval_contains_every_time_of_a_chaotic_step() -> None:
    quiet = simulate(Scenario.from_mapping(QUIET))
    chaotic = replace(quiet, perturbed_step_times=(0.99 * quiet.step_time, 1.02 * quiet.step_time))
    assert chaotic.relative_interval.low == pytest.approx(0.99 * quiet.relative_interval.low)
    assert chaotic.relative_interval.high == pytest.approx(1.02 * quiet.relative_interval.high)
    likely = [0.99 * quiet.relative_interval.likely[0], 1.02 * quiet.relative_interval.likely[1]]
    assert list(chaotic.relative_interval.likely) == pytest.approx(likely)
    assert chaotic.to_json()["timing_sensitivity"] == pytest.approx([0.99, 1.02])


def test_jittered_steps_are_not_perturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_DELAYED_OPERATIONS", 0)
    scenario = Scenario.from_mapping(QUIET | {"degradations": {"jitter": {"std": "1 %", "seed": 1}}})
    assert simulate_with_spread(scenario).perturbed_step_times == ()


@pytest.mark.slow
def test_a_chaotic_step_says_by_how_much() -> None:
    """Operation by operation is another order of summation: it moves the step as a perturbation does."""
    scenario = Scenario.from_mapping(CHAOTIC)
    result = simulate_with_spread(scenario)
    sensitivity = result.timing_sensitivity
    assert sensitivity is not None
    assert module.MIN_REPORTED_SPREAD <= sensitivity.spread < 0.02
    fine = simulate(scenario.changed({"cost.coalesce": False})).step_time / result.step_time
    assert 1e-9 < abs(fine - 1.0) < 0.02
    unperturbed = replace(result, perturbed_step_times=())
    assert result.relative_interval.low == pytest.approx(unperturbed.relative_interval.low * sensitivity.low)
    assert result.relative_interval.high == pytest.approx(unperturbed.relative_interval.high * sensitivity.high)
