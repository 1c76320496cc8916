"""Does the cause come back that made a step longer? A closed loop: change a machine by what its files say, explain it.

What is changed is written where a user would write it (an accelerator's file, a cluster's ports, disturbances, the
layout), not by the causes' own code. Small scenarios, in which each cause matters.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustersim import Scenario, simulate
from clustersim.build import distinct_kernels
from clustersim.common import data_files
from clustersim.common.errors import InputError
from clustersim.cost.calibration_record import (
    CalibrationRecord,
    DeviceInfo,
    KernelSample,
    MeasurementConditions,
    TimeStatistics,
)
from clustersim.cost.record_file import write_record
from clustersim.model.attention import causal_factor
from clustersim.model.kernels import TENSOR_CORE_KINDS, AttentionShape
from clustersim.validation.explain import CandidateCause, explain_gap, parse_step_time
from clustersim.validation.explain_continuous import CONTINUOUS_CAUSES
from clustersim.validation.explain_switches import SWITCHES

SCENARIO: dict[str, Any] = {
    "model": {"layers": 4, "hidden": 2048, "ffn": 5632, "heads": 16, "vocab": 32000},
    "cluster": {"name": "dgx-h100", "gpus": 16},
    "layout": {"tp": 2, "pp": 2, "dp": 4, "sequence_parallel": True, "tensor_overlap": True},
    "training": {
        "sequence": 2048,
        "global_batch": 32,
        "microbatch": 2,
        "recompute": {"layers": 1, "early_stop": False},
    },
}


def scenario(*overrides: str) -> Scenario:
    return Scenario.from_mapping(SCENARIO, overrides)


@cache
def step_time(*overrides: str) -> float:
    return simulate(scenario(*overrides)).step_time


def accelerator(folder: Path, **changes: float | str) -> str:
    """An override: an H100 whose efficiency has other constants; `products` divides the rates of all products."""
    content = yaml.safe_load(data_files.find_file("accelerators", "h100-sxm-80gb").read_text())
    efficiency = content["efficiency"]
    slower = float(changes.pop("products", 1.0))
    for part in ("matmul", "attention_forward", "attention_backward"):
        efficiency[part]["share"] /= slower
    shares = efficiency["matmul"]["shares"]
    shares.update({dtype: share / slower for dtype, share in shares.items()})
    efficiency.update(changes)
    path = folder / "gpu.yaml"
    path.write_text(yaml.safe_dump(content))
    return f"cluster.accelerator={path}"


def blamed(plain: Scenario, measured: float, name: str) -> CandidateCause:
    """One cause, which alone is tried."""
    causes = [continuous_cause for continuous_cause in CONTINUOUS_CAUSES if continuous_cause.name == name]
    switches = [framework_switch for framework_switch in SWITCHES if framework_switch.name == name]
    found = explain_gap(plain, measured, causes=causes, switches=switches).causes
    assert [candidate_cause.name for candidate_cause in found] == [name]
    return found[0]


def found_again(name: str, *overrides: str) -> CandidateCause:
    """What a cause comes to for the plain scenario, if what was measured is that with overrides."""
    return blamed(scenario(), step_time(*overrides), name)


@pytest.mark.parametrize("times", [1.31, 3.0, 0.9])
def test_the_factor_by_which_products_are_slower_or_faster_comes_back(times: float, tmp_path: Path) -> None:
    found = found_again("matmuls", accelerator(tmp_path, products=times))
    assert found.explains
    assert found.strength == pytest.approx(times, rel=0.01)


def test_the_factor_by_which_memory_is_slower_comes_back(tmp_path: Path) -> None:
    found = found_again("memory_bound_kernels", accelerator(tmp_path, memory=0.88 / 1.7))
    assert found.strength == pytest.approx(1.7, rel=0.01)


@pytest.mark.parametrize(
    ("name", "link", "times"),
    [("network", "nic.bandwidth=400 Gbit/s", 2.7), ("nvlink", "nvlink.bandwidth=450 GB/s", 4.0)],
)
def test_the_part_of_the_bandwidth_that_is_left_comes_back(name: str, link: str, times: float) -> None:
    key, _, bandwidth = link.partition("=")
    number, unit = bandwidth.split()
    found = found_again(name, f"cluster.node.{key}={float(number) / times} {unit}")
    assert found.explains
    assert found.strength == pytest.approx(times, rel=0.01)
    assert f"{100 / times:.3g} %" in found.description


def test_the_speed_of_one_slow_gpu_comes_back() -> None:
    """GPU 8 of 16 is the one in the middle, that the cause slows, too."""
    found = found_again("one_slow_gpu", "disturbances.slow={gpu: 8, speed: 0.71}")
    assert found.strength == pytest.approx(1 / 0.71, rel=0.01)
    assert "0.71 of its speed" in found.description


def test_the_deviation_of_jitter_comes_back() -> None:
    found = found_again("jitter", "disturbances.jitter=3 %")
    assert found.strength == pytest.approx(0.03, rel=0.01)


def test_the_interval_of_a_slow_host_comes_back(tmp_path: Path) -> None:
    content = yaml.safe_load(data_files.find_file("frameworks", "pytorch").read_text())
    content["host"] |= {"launch": "90 us", "backward_launch": "180 us"}
    slow = tmp_path / "slow.yaml"
    slow.write_text(yaml.safe_dump(content))
    content["host"] |= {"launch": "10 us", "backward_launch": "20 us"}
    quick = tmp_path / "quick.yaml"
    quick.write_text(yaml.safe_dump(content))
    measured = step_time(f"framework={slow}")
    found = blamed(scenario(f"framework={quick}"), measured, "cpu_bound_launch")
    assert found.strength == pytest.approx(90e-6, rel=0.01)
    assert "every 90 us" in found.description


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("data_parallel_overlap", "layout.data.ddp.overlap"),
        ("tensor_overlap", "layout.tensor_overlap"),
        ("pipeline_overlap", "layout.pipeline_overlap"),
        ("fused_kernels", "training.fused"),
    ],
)
def test_a_switch_that_is_off_explains_all_of_the_gap(name: str, key: str) -> None:
    found = found_again(name, f"{key}=false")
    assert found.explains
    assert found.strength is None
    assert found.gap_share == pytest.approx(1.0)
    assert found.effort == 0.0  # so that it comes first


def test_a_switch_that_should_be_on_explains_a_step_that_is_shorter() -> None:
    measured = step_time()
    found = blamed(scenario("layout.tensor_overlap=false"), measured, "tensor_overlap")
    assert found.gap_share == pytest.approx(1.0)


def test_the_scenarios_own_stragglers_may_not_have_been_there() -> None:
    healthy = step_time()
    found = blamed(scenario("disturbances.slow={gpu: 3, speed: 0.8}"), healthy, "stragglers")
    assert found.gap_share == pytest.approx(1.0)


def test_only_what_can_make_a_step_longer_is_blamed_for_a_longer_one() -> None:
    longer = explain_gap(scenario("layout.tensor_overlap=false"), 2 * step_time())
    assert {"data_parallel_overlap", "pipeline_overlap", "one_slow_gpu"} <= {cause.name for cause in longer.causes}
    assert "tensor_overlap" not in {candidate_cause.name for candidate_cause in longer.causes}
    alone = Scenario.from_mapping({**SCENARIO, "cluster": {"name": "dgx-h100", "gpus": 1}, "layout": {}})
    names = {item.name for item in explain_gap(alone, 1.2 * simulate(alone).step_time).causes}
    assert names == {
        *("matmuls", "memory_bound_kernels", "cpu_bound_launch"),
        *("fused_kernels", "flash_attention", "newest_flash_attention", "recompute"),
    }


def test_what_explains_the_gap_comes_first_and_the_smallest_change_before_larger_ones() -> None:
    explanation = explain_gap(scenario(), 1.3 * step_time())
    first = [cause.effort for cause in explanation.causes if cause.explains]
    rest = explanation.causes[len(first) :]
    assert first == sorted(first)
    assert not any(candidate_cause.explains for candidate_cause in rest)
    distances = [abs(item.gap_share - 1.0) for item in rest]
    assert distances == sorted(distances)


def test_a_cause_that_is_too_weak_says_what_its_limit_comes_to() -> None:
    plain = scenario()
    found = blamed(plain, 5.0 * simulate(plain).step_time, "network")
    assert not found.explains
    assert found.strength == 10.0
    assert found.description.startswith("even with NICs and switches at 10 %")
    assert 0.0 < found.gap_share < 1.0


def test_no_gap_needs_no_cause() -> None:
    plain = scenario()
    explanation = explain_gap(plain, simulate(plain).step_time * 1.0005)
    assert explanation.causes == ()
    assert explanation.is_inside_interval
    assert explanation.notes == ("There is no gap to explain.",)


def test_the_floor_is_the_products_of_the_busiest_rank_at_the_peak() -> None:
    """One rank, nothing recomputed: 6 FLOP per token and weight of a product (the logits' too), and flash attention.

    Attention: 4 FLOP forward, 10 backward (which computes scores again) per score and element of the head dimension;
    causal scores are the part `causal_factor` of tokens x sequence x heads.
    """
    training = {"sequence": 2048, "global_batch": 2}
    content = {**SCENARIO, "layout": {}, "training": training, "cluster": {"name": "dgx-h100", "gpus": 1}}
    result = simulate(Scenario.from_mapping(content))
    weights = 4 * (4 * 2048**2 + 3 * 2048 * 5632) + 2048 * 32000
    part = causal_factor(
        AttentionShape(batch=1, heads=16, kv_heads=16, query=2048, key=2048, head_dim=128, causal=True)
    )
    attention = 4 * 14 * 2048 * 2048 * 2048 * part
    flops = 2 * (6 * 2048 * weights + attention)
    explanation = explain_gap(result.scenario, result.step_time)
    assert explanation.lower_bound == pytest.approx(flops / 989e12)


def test_a_step_below_the_floor_has_no_cause_but_another_configuration() -> None:
    plain = scenario()
    floor = explain_gap(plain, simulate(plain).step_time).lower_bound
    explanation = explain_gap(plain, 0.9 * floor)
    assert explanation.is_below_lower_bound
    assert explanation.causes == ()
    assert "another than the file says" in explanation.notes[0]
    above = explain_gap(plain, 1.01 * floor)
    assert not above.is_below_lower_bound
    assert above.notes[0].startswith("No single cause")


def test_causes_change_what_was_measured_as_they_change_the_model(tmp_path: Path) -> None:
    """A record of every product; the run's products took 1.4 times as long."""

    def once(seconds: float) -> TimeStatistics:
        return TimeStatistics(seconds, seconds, seconds, 1)

    def record(name: str, times: float) -> str:
        rows = [
            KernelSample(
                distinct_kernel.name, distinct_kernel.kind, distinct_kernel.dtype, distinct_kernel.shape, distinct_kernel.flops, distinct_kernel.bytes, distinct_kernel.launches,
                once(times * distinct_kernel.flops / 500e12),
            )
            for distinct_kernel in distinct_kernels(scenario())
            if distinct_kernel.kind in TENSOR_CORE_KINDS and distinct_kernel.shape is not None
        ]  # fmt: skip
        conditions = MeasurementConditions("2026-11-20", "none", "made up")
        write_record(CalibrationRecord(DeviceInfo("h100-sxm-80gb", "a GPU"), conditions, tuple(rows)), tmp_path / name)
        return f"cost.record={tmp_path / name}"

    measured = step_time(record("run.json", 1.4))
    found = blamed(scenario(record("plan.json", 1.0)), measured, "matmuls")
    assert found.strength == pytest.approx(1.4, rel=0.01)


@pytest.mark.parametrize("text", ["4.2", "", "soon", "0 s", "-3 s", "1e999 s", "nan s", "4 GiB"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"'4\.2 s' or '850 ms'"):
        parse_step_time(text)


def test_times_have_units_with_or_without_a_space() -> None:
    assert parse_step_time("4.2s") == parse_step_time("4.2 s") == 4.2
    assert parse_step_time("850ms") == pytest.approx(0.85)


@pytest.mark.parametrize("times", [1e-4, 1e4])
def test_times_that_cannot_be_meant_are_refused(times: float) -> None:
    plain = scenario()
    with pytest.raises(InputError, match="1,000 times apart"):
        explain_gap(plain, times * simulate(plain).step_time)


def test_measured_seconds_are_above_zero() -> None:
    with pytest.raises(InputError, match="above zero"):
        explain_gap(scenario(), float("nan"))
