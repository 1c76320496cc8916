"""Closed-loop test of gap explanation: degrade a cluster through its files, and recover the cause.

Changes are made where a user would make them (accelerator file, cluster ports, fault injection, layout), not
by the causes' own code. Small scenarios, in which each cause matters.
"""

import math
from functools import cache
from itertools import pairwise
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
from clustersim.scenario.changes.catalogue import CATALOGUE, CONTINUOUS_CHANGES
from clustersim.scenario.changes.links import pcie_link_kinds, with_link_bandwidth
from clustersim.validation.explain import GapExplanation, explain_gap
from clustersim.validation.explain_causes import CandidateCause
from clustersim.validation.explain_measurement import MeasuredMfu, parse_measurement, parse_step_time

CONFIG: dict[str, Any] = {
    "model": {"layers": 4, "hidden": 2048, "ffn": 5632, "heads": 16, "vocab": 32000},
    "cluster": {"name": "dgx-h100", "gpus": 16},
    "layout": {"tp": 2, "pp": 2, "dp": 4, "sequence_parallel": True, "tp_comm_overlap": True},
    "training": {
        "sequence": 2048,
        "global_batch": 32,
        "microbatch": 2,
        "recompute": {"layers": 1, "early_stop": False},
    },
    "framework": {"name": "ideal", "launch": "10 us"},
}


def scenario(*overrides: str) -> Scenario:
    return Scenario.from_mapping(CONFIG, overrides)


@cache
def step_time(*overrides: str) -> float:
    return simulate(scenario(*overrides)).step_time


@cache
def explained() -> GapExplanation:
    """All causes of a step that takes 1.3 times as long."""
    return explain_gap(scenario(), 1.3 * step_time())


def accelerator_override(folder: Path, **changes: float | str) -> str:
    """An override: an H100 whose efficiency has other constants; `matmuls` divides the rates of all matmuls."""
    content = yaml.safe_load(data_files.find_file("accelerators", "h100-sxm-80gb").read_text())
    efficiency = content["efficiency"]
    slower = float(changes.pop("matmuls", 1.0))
    for section in ("matmul", "attention_forward", "attention_backward"):
        efficiency[section]["peak_fraction"] /= slower
    shares = efficiency["matmul"]["peak_fraction_by_format"]
    shares.update({dtype: share / slower for dtype, share in shares.items()})
    efficiency.update(changes)
    path = folder / "gpu.yaml"
    path.write_text(yaml.safe_dump(content))
    return f"cluster.accelerator={path}"


def explain_by(plan: Scenario, measured: float, name: str) -> CandidateCause:
    """One cause, which alone is tried."""
    continuous = [change for change in CONTINUOUS_CHANGES if change.name == name]
    discrete = [change for change in CATALOGUE if change.name == name]
    explained = explain_gap(plan, measured, continuous=continuous, discrete=discrete, outside=False).causes
    assert [candidate_cause.name for candidate_cause in explained] == [name]
    return explained[0]


def recover_cause(name: str, *overrides: str) -> CandidateCause:
    """What a cause comes to for the plain scenario, if what was measured is that with overrides."""
    return explain_by(scenario(), step_time(*overrides), name)


@pytest.mark.parametrize("times", [1.31, 3.0, 0.9])
def test_a_matmul_slowdown_is_recovered(times: float, tmp_path: Path) -> None:
    cause = recover_cause("matmuls", accelerator_override(tmp_path, matmuls=times))
    assert cause.explains
    assert cause.strength == pytest.approx(times, rel=0.01)


def test_a_memory_slowdown_is_recovered(tmp_path: Path) -> None:
    cause = recover_cause("memory_bound_kernels", accelerator_override(tmp_path, memory_bandwidth_fraction=0.88 / 1.7))
    assert cause.strength == pytest.approx(1.7, rel=0.01)


@pytest.mark.parametrize(
    ("name", "link", "times"),
    [("network", "nic.bandwidth=400 Gbit/s", 2.7), ("nvlink", "nvlink.bandwidth=450 GB/s", 4.0)],
)
def test_a_bandwidth_fraction_is_recovered(name: str, link: str, times: float) -> None:
    key, _, bandwidth = link.partition("=")
    amount, unit = bandwidth.split()
    cause = recover_cause(name, f"cluster.node.{key}={float(amount) / times} {unit}")
    assert cause.explains
    assert cause.strength == pytest.approx(times, rel=0.01)
    assert f"{100 / times:.3g} %" in cause.description


def test_the_speed_of_a_slow_gpu_is_recovered() -> None:
    """GPU 8 of 16 is the one in the middle, that the cause slows, too."""
    cause = recover_cause("one_slow_gpu", "degradations.slow={gpu: 8, speed: 0.71}")
    assert cause.strength == pytest.approx(1 / 0.71, rel=0.01)
    assert "0.71 of its speed" in cause.description


def test_jitter_is_recovered() -> None:
    cause = recover_cause("jitter", "degradations.jitter=3 %")
    assert cause.strength == pytest.approx(0.03, rel=0.01)


def test_the_launch_interval_of_a_slow_host_is_recovered(tmp_path: Path) -> None:
    content = yaml.safe_load(data_files.find_file("frameworks", "pytorch").read_text())
    content["host"] |= {"launch": "90 us", "backward_launch": "180 us"}
    slow = tmp_path / "slow.yaml"
    slow.write_text(yaml.safe_dump(content))
    content["host"] |= {"launch": "10 us", "backward_launch": "20 us"}
    quick = tmp_path / "quick.yaml"
    quick.write_text(yaml.safe_dump(content))
    measured = step_time(f"framework={slow}")
    cause = explain_by(scenario(f"framework={quick}"), measured, "cpu_bound_launch")
    assert cause.strength == pytest.approx(90e-6, rel=0.01)
    assert "every 90 us" in cause.description


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("data_parallel_overlap", "layout.data.ddp.overlap"),
        ("tp_comm_overlap", "layout.tp_comm_overlap"),
        ("overlap_p2p_comm", "layout.overlap_p2p_comm"),
        ("fused_kernels", "training.fused"),
    ],
)
def test_a_disabled_switch_explains_the_full_gap(name: str, key: str) -> None:
    cause = recover_cause(name, f"{key}=false")
    assert cause.explains
    assert cause.strength is None
    assert cause.gap_share == pytest.approx(1.0)
    assert cause.effort == 0.0  # so that it comes first


def test_an_enabled_switch_explains_a_shorter_step() -> None:
    measured = step_time()
    cause = explain_by(scenario("layout.tp_comm_overlap=false"), measured, "tp_comm_overlap")
    assert cause.gap_share == pytest.approx(1.0)


def test_cuda_graphs_explain_a_shorter_step_that_waits_for_launches() -> None:
    """Small layers: the host launches for longer than the GPU computes, and a run with graphs is measured."""
    waiting = ["framework=megatron", "training.sequence=256", "training.microbatch=1"]
    measured = simulate(scenario(*waiting, "framework.cuda_graphs=true")).step_time
    assert measured < 0.97 * simulate(scenario(*waiting)).step_time
    causes = explain_gap(scenario(*waiting), measured, continuous=()).causes
    graphs = next(cause for cause in causes if cause.name == "cuda_graphs")
    assert graphs.explains
    assert graphs.gap_share == pytest.approx(1.0)


def test_configured_stragglers_may_be_absent() -> None:
    healthy = step_time()
    cause = explain_by(scenario("degradations.slow={gpu: 3, speed: 0.8}"), healthy, "stragglers")
    assert cause.gap_share == pytest.approx(1.0)


def test_a_slower_step_is_explained_only_by_slowing_causes() -> None:
    explanation = explain_gap(scenario("layout.tp_comm_overlap=false"), 2 * step_time())
    assert {"data_parallel_overlap", "overlap_p2p_comm", "one_slow_gpu"} <= {cause.name for cause in explanation.causes}
    assert "tp_comm_overlap" not in {candidate_cause.name for candidate_cause in explanation.causes}
    single_gpu = Scenario.from_mapping({**CONFIG, "cluster": {"name": "dgx-h100", "gpus": 1}, "layout": {}})
    names = {item.name for item in explain_gap(single_gpu, 1.2 * simulate(single_gpu).step_time).causes}
    assert names == {
        *("matmuls", "memory_bound_kernels", "cpu_bound_launch"),
        *("fused_kernels", "flash_attention", "newest_flash_attention", "recompute", "idle"),
        *("more_accumulation", "no_autocast"),
    }


def test_causes_are_sorted_by_one_score() -> None:
    """Steps of plausibility, of the size of a change and of the distance from the gap add up; the lowest is first."""

    def score(cause: CandidateCause) -> int:
        distance = 0.0 if cause.explains else abs(cause.gap_share - 1.0)
        size_steps = sum(math.exp(cause.effort) > limit for limit in (1.25, 2.0, 4.0))
        distance_steps = sum(distance > limit for limit in (0.25, 0.5, 0.625, 0.75, 0.875, 1.0))
        return cause.plausibility.value + size_steps + distance_steps

    scores = [score(cause) for cause in explained().causes]
    assert scores == sorted(scores)
    assert len(set(scores)) > 2
    for first, second in pairwise(explained().causes):
        assert score(first) < score(second) or first.explains or not second.explains


@pytest.mark.slow
def test_a_frequent_cause_of_most_of_the_gap_comes_before_any_slow_kernels() -> None:
    """PCIe shared by 4 GPUs, and 10 % that is something else: no size of it matches, but it is the likeliest."""
    measured = 1.1 * step_time("cluster.node.nvlink.bandwidth=15.75 GB/s")
    causes = explain_gap(scenario(), measured).causes
    names = [cause.name for cause in causes]
    assert names.index("no_nvlink") < min(names.index("matmuls"), names.index("memory_bound_kernels"))


def test_a_gap_between_two_sizes_of_a_link_is_explained() -> None:
    sizes = [step_time(f"cluster.node.nvlink.bandwidth={63 / sharing} GB/s") for sharing in (2, 4)]
    cause = explain_by(scenario(), sum(sizes) / 2, "no_nvlink")
    assert cause.explains
    assert abs(cause.gap_share - 1.0) > 0.02


@pytest.mark.parametrize(("factor", "effort"), [(5, 0.0), (16, math.log(2))])
def test_more_accumulation_is_recovered(factor: int, effort: float) -> None:
    """A default of 5, which nobody counted (karpathy/nanoGPT, issue 110); beyond 8 it is less often found."""
    cause = recover_cause("more_accumulation", f"training.global_batch={factor * CONFIG['training']['global_batch']}")
    assert cause.gap_share == pytest.approx(1.0)
    assert f"{factor} times" in cause.description
    assert cause.effort == pytest.approx(effort)


def test_matmuls_in_fp32_are_recovered() -> None:
    assert recover_cause("no_autocast", "training.precision.compute=fp32").gap_share == pytest.approx(1.0)


def test_layers_that_are_not_compiled_are_recovered() -> None:
    compiled = Scenario.from_mapping({**CONFIG, "framework": {"name": "pytorch", "torch_compile": True}})
    eager = Scenario.from_mapping({**CONFIG, "framework": "pytorch"})
    cause = explain_by(compiled, simulate(eager).step_time, "not_compiled")
    assert cause.gap_share == pytest.approx(1.0)


def test_no_peer_access_is_a_cause_without_nvlink_alone() -> None:
    cards = {**CONFIG, "cluster": {"name": "pcie-node", "gpus": 8}, "layout": {"dp": 8}}
    plan = Scenario.from_mapping(cards)
    slow = with_link_bandwidth(plan, pcie_link_kinds(plan), 0.25)
    cause = explain_by(plan, simulate(slow).step_time, "no_peer_access")
    assert cause.gap_share == pytest.approx(1.0)
    assert "4 GPUs" in cause.description
    assert "no_peer_access" not in {one.name for one in explained().causes}


def test_a_full_memory_makes_the_allocator_a_cause() -> None:
    result = simulate(scenario())
    memory = result.peak_memory / 0.97
    full = scenario(f"cluster.accelerator={{like: h100-sxm-80gb, memory: {memory:.0f} B}}")
    seconds = 1.5 * simulate(full).step_time
    causes = explain_gap(full, seconds, continuous=(), discrete=()).causes
    assert [cause.name for cause in causes] == ["allocator", "idle"]
    assert "97%" in causes[0].description


def test_sockets_over_one_port_are_recovered_with_the_port_s_rate() -> None:
    """The commonest cause between nodes: far below a tenth of the NICs' bandwidth, at which continuous causes end."""
    for rate in (25, 100):
        cause = recover_cause(
            "nccl_on_sockets", f"cluster.node.nic={{per_node: 1, bandwidth: {rate} Gbit/s, network: tcp}}"
        )
        assert cause.explains
        assert cause.gap_share == pytest.approx(1.0)
        assert f"{rate} Gbit/s" in cause.description
    first = explain_gap(scenario(), cause.step_time).causes[0]
    assert first.name == "nccl_on_sockets"


def test_one_nic_is_recovered() -> None:
    assert recover_cause("one_nic", "cluster.node.nic.per_node=1").gap_share == pytest.approx(1.0)


def test_a_slow_node_is_recovered() -> None:
    cause = recover_cause("one_slow_node", "degradations.slow={node: 1, speed: 0.8}")
    assert cause.strength == pytest.approx(1 / 0.8, rel=0.01)


def test_pcie_in_place_of_nvlink_is_its_ratio() -> None:
    """450 GB/s of NVLink, 63 of PCIe 5 on a DGX H100."""
    measured = step_time("cluster.node.nvlink.bandwidth=63 GB/s")
    assert explain_by(scenario(), measured, "no_nvlink").gap_share == pytest.approx(1.0, rel=0.02)


def test_gpus_that_share_a_host_link_have_their_part_of_it() -> None:
    measured = step_time("cluster.node.nvlink.bandwidth=15.75 GB/s")
    cause = explain_by(scenario(), measured, "no_nvlink")
    assert cause.gap_share == pytest.approx(1.0, rel=0.02)
    assert "4 GPUs" in cause.description


def test_a_higher_zero_stage_is_recovered() -> None:
    """Gradients are reduced in every microbatch; the report that names this: EleutherAI/gpt-neox, issue 965."""
    layout = {"dp": 16, "data": "zero1"}
    plan = Scenario.from_mapping({**CONFIG, "layout": layout, "framework": "ideal"}, ["training.global_batch=128"])
    for stage in (2, 3):
        measured = simulate(plan.with_overrides(f"layout.data=zero{stage}")).step_time
        cause = explain_by(plan, measured, "sharded_further")
        assert cause.gap_share == pytest.approx(1.0)
        assert f"ZeRO-{stage}" in cause.description


def test_free_choice_of_experts_makes_a_step_longer() -> None:
    content = {
        **CONFIG,
        "model": {**CONFIG["model"], "experts": {"count": 16, "top_k": 2, "ffn": 2048}},
        "layout": {"dp": 16, "ep": 8},
    }
    plan = Scenario.from_mapping(content)
    cause = explain_by(plan, 1.5 * simulate(plan).step_time, "natural_routing")
    assert cause.gap_share > 0.0
    assert "vary by 40%" in cause.description
    assert "natural_routing" not in {one.name for one in explained().causes}


@pytest.mark.parametrize(("times", "is_cause"), [(1.2, True), (15.0, True), (25.0, False), (0.9, False)])
def test_time_outside_the_step_is_a_cause_up_to_95_percent_of_it(times: float, is_cause: bool) -> None:
    causes = explain_gap(scenario(), times * step_time(), continuous=(), discrete=()).causes
    assert [cause.name for cause in causes] == ["idle"] * is_cause
    assert all(cause.strength == pytest.approx((times - 1) * step_time()) for cause in causes)


def test_an_insufficient_cause_reports_its_limit() -> None:
    plain = scenario()
    cause = explain_by(plain, 5.0 * simulate(plain).step_time, "network")
    assert not cause.explains
    assert cause.strength == 10.0
    assert cause.description.startswith("even with NICs and switches at 10 %")
    assert 0.0 < cause.gap_share < 1.0


@pytest.mark.parametrize(
    ("bound", "likely", "inside", "word"),
    [
        ("inside 50%", True, True, "as expected"),
        ("inside 90%", False, True, "questionable"),
        ("outside", False, False, "not to be expected"),
    ],
)
def test_a_measured_time_is_judged_by_two_intervals(bound: str, likely: bool, inside: bool, word: str) -> None:
    """Faster than predicted, so that the measured MFU is above the predicted one (such as 61 % against 41 %)."""
    result = simulate(scenario())
    (low, _), (likely_low, _) = result.step_time_interval, result.likely_step_time_interval
    assert low < likely_low < result.step_time
    measured = {"inside 50%": likely_low * 1.01, "inside 90%": likely_low * 0.99, "outside": low * 0.99}[bound]
    explanation = explain_gap(scenario(), measured, continuous=(), discrete=())
    assert (explanation.is_likely, explanation.is_inside_interval) == (likely, inside)
    assert word in explanation.verdict
    report = explanation.to_json()
    mfu_low, mfu_high = report["mfu_likely_interval"]
    assert (mfu_low <= report["mfu_measured"] <= mfu_high) is likely
    assert report["mfu_interval"][0] < mfu_low < report["mfu_expected"] < mfu_high < report["mfu_interval"][1]


def test_no_gap_needs_no_cause() -> None:
    plain = scenario()
    explanation = explain_gap(plain, simulate(plain).step_time * 1.0005)
    assert explanation.causes == ()
    assert explanation.is_inside_interval
    assert explanation.notes == ("There is no gap to explain.",)


def test_the_lower_bound_is_the_busiest_rank_s_matmuls_at_peak() -> None:
    """One rank, nothing recomputed: 6 FLOP per token and weight of a product (the logits' too), and flash attention.

    Attention: 4 FLOP forward, 10 backward (which computes scores again) per score and element of the head dimension;
    causal scores are the part `causal_factor` of tokens x sequence x heads.
    """
    training = {"sequence": 2048, "global_batch": 2}
    content = {**CONFIG, "layout": {}, "training": training, "cluster": {"name": "dgx-h100", "gpus": 1}}
    result = simulate(Scenario.from_mapping(content))
    weights = 4 * (4 * 2048**2 + 3 * 2048 * 5632) + 2048 * 32000
    causal_share = causal_factor(
        AttentionShape(batch=1, heads=16, kv_heads=16, query=2048, key=2048, head_dim=128, causal=True)
    )
    attention = 4 * 14 * 2048 * 2048 * 2048 * causal_share
    flops = 2 * (6 * 2048 * weights + attention)
    explanation = explain_gap(result.scenario, result.step_time)
    assert explanation.lower_bound == pytest.approx(flops / 989e12)


def test_a_step_below_the_lower_bound_has_no_cause() -> None:
    plain = scenario()
    lower_bound = explain_gap(plain, simulate(plain).step_time).lower_bound
    explanation = explain_gap(plain, 0.9 * lower_bound)
    assert explanation.is_below_lower_bound
    assert explanation.causes == ()
    assert "another than the file says" in explanation.notes[0]
    above = explain_gap(plain, 1.01 * lower_bound)
    assert not above.is_below_lower_bound
    assert above.notes[0].startswith("No single cause")


def test_causes_scale_measured_kernels_like_modelled_ones(tmp_path: Path) -> None:
    """A record of every product; the run's products took 1.4 times as long."""

    def single_sample(seconds: float) -> TimeStatistics:
        return TimeStatistics(seconds, seconds, seconds, 1)

    def write_kernel_record(name: str, times: float) -> str:
        kernel_records = [
            KernelSample(
                distinct_kernel.name,
                distinct_kernel.kind,
                distinct_kernel.dtype,
                distinct_kernel.shape,
                distinct_kernel.flops,
                distinct_kernel.bytes,
                distinct_kernel.launches,
                single_sample(times * distinct_kernel.flops / 500e12),
            )
            for distinct_kernel in distinct_kernels(scenario())
            if distinct_kernel.kind in TENSOR_CORE_KINDS and distinct_kernel.shape is not None
        ]
        conditions = MeasurementConditions("2026-11-20", "none", "made up")
        write_record(
            CalibrationRecord(DeviceInfo("h100-sxm-80gb", "a GPU"), conditions, tuple(kernel_records)), tmp_path / name
        )
        return f"cost.record={tmp_path / name}"

    measured = step_time(write_kernel_record("run.json", 1.4))
    cause = explain_by(scenario(write_kernel_record("plan.json", 1.0)), measured, "matmuls")
    assert cause.strength == pytest.approx(1.4, rel=0.01)


@pytest.mark.parametrize("text", ["4.2", "", "soon", "0 s", "-3 s", "1e999 s", "nan s", "4 GiB"])
def test_invalid_times_are_rejected(text: str) -> None:
    with pytest.raises(InputError, match=r"'4\.2 s' or '850 ms'"):
        parse_step_time(text)


def test_times_have_units_with_or_without_a_space() -> None:
    assert parse_step_time("4.2s") == parse_step_time("4.2 s") == 4.2
    assert parse_step_time("850ms") == pytest.approx(0.85)


@pytest.mark.parametrize("text", ["38%", " 38 % ", "38% MFU", "38 %MFU", "0.38 mfu"])
def test_mfu_is_told_from_a_time(text: str) -> None:
    assert parse_measurement(text) == MeasuredMfu(0.38)
    assert parse_measurement("850ms") == parse_step_time("850ms")


@pytest.mark.parametrize("text", ["0%", "-3%", "100%", "380 %", "nan%", "1e999 MFU", "38 MFU", "MFU", "%", "so% MFU"])
def test_impossible_mfus_are_rejected(text: str) -> None:
    with pytest.raises(InputError, match=r"is not an MFU .* above 0% and below 100%"):
        parse_measurement(text)


@pytest.mark.parametrize("sequence", [2048, 65536], ids=["attention counts in full", "causal attention counts"])
def test_mfu_is_the_step_time_that_has_it(sequence: int) -> None:
    plan = scenario(f"training.sequence={sequence}", "training.microbatch=1")
    result = simulate(plan)
    shown = 0.8 * result.leading_mfu.value
    explanation = explain_gap(plan, MeasuredMfu(shown), continuous=(), discrete=(), outside=False)
    assert explanation.measured == pytest.approx(result.step_time / 0.8)
    assert explanation.mfu_of(explanation.measured) == pytest.approx(shown)
    causal = result.leading_mfu.is_causal
    assert causal is (sequence > 2048)
    read_as, other = ("causal attention", "as a full matrix") if causal else ("as a full matrix", "causal attention")
    before, after = explanation.conversion.split(";")
    assert read_as in before
    assert other in after
    assert explanation.to_json()["conversion"] == explanation.conversion
    in_seconds = explain_gap(plan, explanation.measured, continuous=(), discrete=(), outside=False)
    assert in_seconds.conversion == ""
    assert in_seconds.verdict == explanation.verdict


@pytest.mark.parametrize("times", [1e-4, 1e4])
def test_implausible_times_are_rejected(times: float) -> None:
    plain = scenario()
    with pytest.raises(InputError, match="1,000 times apart"):
        explain_gap(plain, times * simulate(plain).step_time)


def test_measured_seconds_are_above_zero() -> None:
    with pytest.raises(InputError, match="above zero"):
        explain_gap(scenario(), float("nan"))
