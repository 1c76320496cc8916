"""What-if: every outcome is that of the scenario with overrides, and skipped cases give their reason."""

import math
import shlex
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.errors import InputError
from clustersim.cost.calibration_record import (
    CalibrationRecord,
    CollectiveCall,
    CollectiveSample,
    DeviceInfo,
    MeasurementConditions,
    TimeStatistics,
)
from clustersim.planning import what_if
from clustersim.planning.what_if import possible_gain, run_what_ifs
from clustersim.program.placement import Placement
from clustersim.program.task import CollectiveType
from clustersim.results.memory_check import peak_memory_use, required_headroom
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.time_losses import MIN_LOSS_SHARE
from clustersim.results.what_if import WhatIf, WhatIfOutcome, WhatIfReport
from clustersim.scenario import Scenario
from clustersim.scenario.changes.catalogue import changes_for
from clustersim.scenario.changes.catalogue.remedies_pipeline import balanced_layer_counts
from clustersim.scenario.changes.links import network_link_kinds, with_link_bandwidth
from clustersim.scenario.changes.scenario_change import ChangeSubject, ChangeUse, ScenarioChange, apply_setter
from clustersim.scenario.changes.step_losses import StepLoss
from clustersim.scenario.changes.training import with_microbatch_size
from clustersim.schedules.csv_format import format_order
from clustersim.schedules.one_f_one_b import OneFOneB
from clustersim.simulation import simulate
from tests.sentences import parts
from tests.small_pipeline import pipeline_scenario, simulate_pipeline

LARGER_MICROBATCH = ("training.microbatch=2", "training.recompute={layers: 1}")


def simulate_with(*overrides: str) -> SimulationResult:
    return simulate_pipeline(*LARGER_MICROBATCH, *overrides)


def what_if_cases(result: SimulationResult, budget: float = math.inf) -> dict[str, WhatIf]:
    return {case.name: case for case in run_what_ifs(result, budget).cases}


def what_if_case(result: SimulationResult, name: str) -> WhatIf:
    """One of the cases; the others are not simulated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(what_if, "changes_for", lambda use: [item for item in changes_for(use) if item.name == name])
        return what_if_cases(result)[name]


def require_outcome(case: WhatIf) -> WhatIfOutcome:
    assert case.outcome is not None, case.note
    return case.outcome


@pytest.fixture(scope="module")
def baseline() -> SimulationResult:
    return simulate_with()


@pytest.fixture(scope="module")
def cases(baseline: SimulationResult) -> dict[str, WhatIf]:
    return what_if_cases(baseline)


def test_a_listed_order_is_only_for_its_microbatch_count() -> None:
    """Eight in the scenario (16 sequences, two replicas): twice as many are skipped with the reason."""
    scenario = simulate_pipeline("schedule=1f1b").scenario
    order_lines = format_order(OneFOneB().order(scenario.layout.pp, scenario.microbatch_count)).splitlines()
    cases = what_if_cases(simulate_pipeline(f"schedule={{orders: {{rows: {order_lines}}}}}"))
    case = cases["twice_the_microbatches"]
    assert case.outcome is None
    count = scenario.microbatch_count
    assert parts(
        f"schedule: ... {count} microbatches ... {2 * count}: "
        f"training.global_batch ... {count} x dp x training.microbatch"
    ).match(case.note)
    assert require_outcome(cases["products_faster"]).step_time < simulate_pipeline("schedule=1f1b").step_time


def test_remedies_come_first_those_that_can_win_most_before_others(
    baseline: SimulationResult, cases: dict[str, WhatIf]
) -> None:
    """Simulated ones before those that were not; hypothetical changes follow in the catalogue's order."""
    names = [*cases]
    remedies, hypothetical = (
        [change for change in changes_for(use) if change.is_relevant(baseline.scenario)]
        for use in (ChangeUse.REMEDY, ChangeUse.WHAT_IF)
    )
    assert names[len(remedies) :] == [change.name for change in hypothetical]
    assert sorted(names[: len(remedies)]) == sorted(change.name for change in remedies)
    gains = {change.name: possible_gain(change, baseline.losses) for change in remedies}
    simulated = [name for name in names[: len(remedies)] if cases[name].outcome is not None]
    assert simulated == names[: len(simulated)]
    assert [gains[name] for name in simulated] == sorted((gains[name] for name in simulated), reverse=True)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("twice_the_microbatches", ["training.global_batch=32"]),
        ("half_the_microbatch", ["training.microbatch=1"]),
        ("slow_rank", ["degradations.slow={gpu: 12, speed: 0.9}"]),
        ("less_recompute", ["training.recompute=none"]),
        ("full_recompute", ["training.recompute=full"]),
    ],
)
def test_an_outcome_matches_the_scenario_with_overrides(
    baseline: SimulationResult, cases: dict[str, WhatIf], name: str, overrides: list[str]
) -> None:
    outcome, expected = require_outcome(cases[name]), simulate_with(*overrides)
    assert outcome.step_time == expected.step_time
    assert outcome.baseline_step_time == baseline.step_time
    assert outcome.tokens_per_s_per_gpu == pytest.approx(expected.tokens_per_second / expected.rank_count)
    assert (outcome.peak_memory, outcome.fits_in_memory) == (expected.peak_memory, expected.fits_in_memory)
    assert cases[name].note == ""


def test_slower_links_and_faster_kernels_have_the_expected_sign(cases: dict[str, WhatIf]) -> None:
    assert (
        require_outcome(cases["node_links_less"]).step_time_difference > 0.0
    )  # tensor-parallel collectives are exposed
    assert require_outcome(cases["network_less"]).step_time_difference >= 0.0
    assert require_outcome(cases["network_twice"]).step_time_difference <= 0.0
    faster = require_outcome(cases["products_faster"])
    assert -1.0 / 11.0 < faster.slowdown_ratio < 0.0  # at most the gain if the full step were matmuls


def test_more_tokens_lengthen_the_step_and_raise_throughput(cases: dict[str, WhatIf]) -> None:
    outcome = require_outcome(cases["twice_the_microbatches"])
    assert outcome.step_time_difference > 0.0
    assert outcome.token_ratio == 2.0
    assert outcome.slowdown_seconds == pytest.approx(outcome.step_time / 2 - outcome.baseline_step_time)
    assert outcome.slowdown_seconds < 0.0 < outcome.speedup  # twice the microbatches, the same bubble
    assert (1.0 + outcome.slowdown_ratio) * (1.0 + outcome.speedup) == pytest.approx(1.0)


def test_without_nvlink_the_node_links_are_pcie() -> None:
    shared = ["cluster={name: pcie-node, gpus: 8}", "layout={tp: 8}", "training.global_batch=2"]
    outcome = require_outcome(what_if_case(simulate_with(*shared), "node_links_less"))
    assert 0.0 < outcome.slowdown_ratio < 1.0 / 9.0  # at most the loss if the full step were node links


@pytest.mark.parametrize(
    ("overrides", "reasons"),
    [
        (
            ["layout={}", "cluster.gpus=1", "training.microbatch=1", "training.recompute=none"],
            {
                "network_less": "all ranks are on one node",
                "network_twice": "all ranks are on one node",
                "node_links_less": "no NVLink or PCIe is used",
                "slow_rank": "there is one rank",
                "no_overheads": "there are no overheads outside the model now",
            },
        ),
        (
            ["training.microbatch=3", "training.global_batch=18", "training.recompute=full"],
            {
                "full_recompute": "all layers are recomputed now",
                "no_overheads": "there are no overheads outside the model now",
            },
        ),
    ],
)
def test_inapplicable_cases_give_their_reason(overrides: list[str], reasons: dict[str, str]) -> None:
    cases = what_if_cases(simulate_with(*overrides))
    skipped = {name: case.note for name, case in cases.items() if case.outcome is None and not case.addresses}
    assert skipped == reasons


def test_an_illegal_change_gives_the_error_message_of_a_scenario_file_without_suggestions(
    baseline: SimulationResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    five = ScenarioChange(
        "five",
        "microbatches of 5",
        ChangeSubject.BATCH,
        ChangeUse.WHAT_IF,
        apply_setter(lambda scenario: with_microbatch_size(scenario, 5)),
    )
    monkeypatch.setattr(what_if, "changes_for", lambda use: (five,) if use is ChangeUse.WHAT_IF else ())
    with pytest.raises(InputError) as refused:
        simulate_with("training.microbatch=5")
    (case,) = run_what_ifs(baseline, math.inf).cases
    assert case.outcome is None
    assert str(refused.value).removeprefix("small: ").startswith(f"{case.note}; ")


def test_the_budget_is_of_simulations_and_the_same_on_every_machine(baseline: SimulationResult) -> None:
    """Three small simulations for each kind of change, whatever they took; the rest says that it was not tried."""
    slow, fast = (replace(baseline, wall_seconds=seconds) for seconds in (60.0, 1e-3))
    reports = [run_what_ifs(result, 3 * what_if._MIN_COST) for result in (slow, fast)]
    assert reports[0].to_json() == reports[1].to_json()
    remedies, hypothetical = (
        [case for case in reports[0].cases if bool(case.addresses) is is_remedy] for is_remedy in (True, False)
    )
    for cases in (remedies, hypothetical):
        assert sum(case.outcome is not None for case in cases) <= 3
        assert any("budget of simulations" in case.note for case in cases)


def test_a_case_that_slows_the_simulation_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clustersim.scenario.validation_rules.warnings.WARN_DESYNC_TP_TASKS", 100)
    shared = simulate(
        pipeline_scenario(*LARGER_MICROBATCH, "cost.network=shared")
    )  # not cached: the warning threshold is patched
    cases = what_if_cases(shared, budget=1e9)
    assert [name for name, case in cases.items() if "not tried, as it takes long: degradations put" in case.note] == [
        "slow_rank"
    ]
    assert require_outcome(what_if_case(shared, "slow_rank")).step_time_difference > 0.0  # without a budget it is run


@pytest.fixture(scope="module")
def measured_collectives(baseline: SimulationResult) -> SimulationResult:
    """A result with two measured collectives."""
    calls = [CollectiveCall(CollectiveType.ALL_REDUCE, payload, 2, 1) for payload in (1e5, 1e8)]
    samples = tuple(CollectiveSample(call, TimeStatistics(1.0, 1.0, 1.0, 5)) for call in calls)  # seconds: far too long
    conditions = MeasurementConditions(date="2026-01-01", command="", method="")
    record = CalibrationRecord(DeviceInfo("h100-sxm-80gb", "gpu"), conditions, collectives=samples)
    return simulate(replace(baseline.scenario, cost=replace(baseline.scenario.cost, record=record)))


def test_measured_collectives_do_not_count_as_an_effect_of_the_links(
    baseline: SimulationResult, measured_collectives: SimulationResult
) -> None:
    assert measured_collectives.step_time > 2.0 * baseline.step_time
    cases = what_if_cases(measured_collectives)
    links, kernels = require_outcome(cases["node_links_less"]), require_outcome(cases["slow_rank"])
    assert links.baseline_step_time < 0.5 * measured_collectives.step_time
    assert 0.0 < links.slowdown_ratio < 0.1
    assert "modelled before and after" in cases["node_links_less"].note
    assert kernels.baseline_step_time == measured_collectives.step_time
    assert cases["slow_rank"].note == ""


def test_the_slow_rank_is_on_the_bottleneck_stage(baseline: SimulationResult, cases: dict[str, WhatIf]) -> None:
    """The last stage has the head; a slow GPU on another costs less, and one that is slow already is not selected."""
    assert cases["slow_rank"].description == "one rank at 0.9x speed: GPU 12, stage 3"
    worst = require_outcome(cases["slow_rank"]).step_time
    elsewhere = [simulate_with(f"degradations.slow={{gpu: {gpu}, speed: 0.9}}").step_time for gpu in (0, 4, 8)]
    assert max(elsewhere) - baseline.step_time < 0.5 * (worst - baseline.step_time)
    already_slow = what_if_case(simulate_with("degradations.slow={gpu: 12, speed: 0.5}"), "slow_rank")
    assert already_slow.description.endswith(": GPU 13, stage 3")
    flat = what_if_case(simulate_with("layout={tp: 2, dp: 8}"), "slow_rank")
    assert flat.description.endswith(": GPU 0")


def test_faster_nics_include_the_pcie_that_would_limit_them() -> None:
    """Data parallelism across nodes only: twice the bandwidth helps only if PCIe is as fast as the NICs."""
    overrides = ["layout={dp: 16, data: zero1}", "model={preset: llama3-8b, layers: 2}", "training.sequence=512"]
    result = simulate_with(*overrides, "training.microbatch=1", "training.recompute=none")
    twice = what_if_case(result, "network_twice")
    assert twice.description == "network links at 2x bandwidth, PCIe too"
    nics_only = simulate(with_link_bandwidth(result.scenario, network_link_kinds(result.scenario), 2.0)).step_time
    assert nics_only - require_outcome(twice).baseline_step_time > 0.5 * require_outcome(twice).step_time_difference
    assert require_outcome(twice).slowdown_ratio < -0.01


def test_hybrid_sharding_uses_the_smallest_shard_size_that_fits() -> None:
    """2 GPUs of 32 GB cannot hold the 18 bytes per parameter of half of Llama 3 8B in halves, with the headroom."""
    plan = {
        "model": {"preset": "llama3-8b", "layers": 16},
        "cluster": {"name": "dgx-v100", "gpus": 16},
        "layout": {"data": "fsdp"},
        "training": {"sequence": 512, "global_batch": 16, "precision": "fp16", "recompute": "full"},
    }
    by_hand = [
        Scenario.from_mapping(plan, overrides=[f"layout.data={{hsdp: {{shard: {shard}}}}}"]) for shard in (2, 4, 8)
    ]
    smallest = next(
        scenario for scenario in by_hand if peak_memory_use(scenario).leaves_headroom(required_headroom(scenario, None))
    )
    case = what_if_case(simulate(Scenario.from_mapping(plan)), "hybrid_sharding")
    assert smallest is not by_hand[0]
    assert f"over {smallest.layout.data.shard_size} of 16" in case.description
    assert require_outcome(case).step_time == simulate(smallest).step_time


def test_changes_of_what_a_scenario_lacks_are_no_cases(cases: dict[str, WhatIf]) -> None:
    assert not {"hybrid_sharding", "other_dispatcher", "no_offload", "fused_kernels"} & {*cases}


def test_cuda_graphs_shorten_launch_bound_steps() -> None:
    """The outcome equals the step of a scenario with CUDA graphs."""
    launch_bound = {"model": "gpt2-small", "cluster": {"name": "dgx-h100", "gpus": 1}, "framework": "megatron"}
    result = simulate(Scenario.from_mapping({**launch_bound, "training": {"sequence": 128, "global_batch": 1}}))
    outcome = what_if_case(result, "cuda_graphs")
    captured = simulate(result.scenario.with_overrides("framework.cuda_graphs=true"))
    assert require_outcome(outcome).step_time == captured.step_time < result.step_time
    assert "cuda_graphs" not in what_if_cases(captured)


MOE = (
    "model={preset: mixtral-8x7b, layers: 4}",
    "training.microbatch=1",
    "training.recompute=none",
    "layout={tp: 1, pp: 2, dp: 8, data: zero1, ep: 4}",
)


@pytest.fixture(scope="module")
def moe_cases() -> dict[str, WhatIf]:
    return what_if_cases(simulate_pipeline(*MOE))


@pytest.mark.parametrize(
    ("name", "expected_text", "overrides"),
    [
        ("other_dispatcher", "deepep, not alltoall", ["layout.dispatcher=deepep"]),
        (  # two experts per rank, whose tokens together vary by 0.3
            "other_loads",
            "drawn, with a variation of 0.424 of each expert's (seed 0)",
            [f"training.expert_load={0.3 * math.sqrt(2)!r}"],
        ),
    ],
)
def test_dispatcher_and_load_cases_match_the_scenario_with_overrides(
    moe_cases: dict[str, WhatIf], name: str, expected_text: str, overrides: list[str]
) -> None:
    assert expected_text in moe_cases[name].description
    assert require_outcome(moe_cases[name]).step_time == simulate_pipeline(*MOE, *overrides).step_time


def test_expert_groups_within_nodes_are_tried_across_nodes_and_back() -> None:
    """Stages of 16 ranks on two nodes: with etp 2, ep 4 is within one node, ep 8 on both."""
    layout = "layout={tp: 2, pp: 1, dp: 8, data: zero1, sequence_parallel: true, ep: %d, etp: 2}"
    near, far = ([*MOE[:3], layout % ep, "training.global_batch=64"] for ep in (4, 8))
    within_cases, across_cases = (what_if_cases(simulate_pipeline(*item)) for item in (near, far))
    assert "ep 8, not 4" in within_cases["experts_across"].description
    assert require_outcome(within_cases["experts_across"]).step_time == simulate_pipeline(*far).step_time
    assert "experts_inside" not in within_cases
    assert "ep 4, not 8" in across_cases["experts_inside"].description
    assert require_outcome(across_cases["experts_inside"]).step_time == simulate_pipeline(*near).step_time
    assert require_outcome(across_cases["experts_inside"]).step_time_difference < 0.0


def test_nvl72_clusters_try_hybridep() -> None:
    rack = ("cluster={name: gb200-nvl72, gpus: 16}",)
    assert "hybridep, not alltoall" in what_if_case(simulate_pipeline(*MOE, *rack), "other_dispatcher").description


def test_whole_passes_are_captured_with_hybridep_where_it_is_at_home() -> None:
    """Without it the sizes of experts' kernels are known to the host alone; DGX have no such kernels."""
    relevant = {"cuda_graphs_hybridep"}
    scenario = Scenario.from_mapping(LAUNCH_BOUND_MOE)

    def names(*overrides: str) -> set[str]:
        changed = scenario.with_overrides(*overrides)
        return {change.name for change in changes_for(ChangeUse.REMEDY) if change.is_relevant(changed)}

    assert relevant <= names() and not relevant & names("cluster.name=dgx-h100")
    assert "cuda_graphs" in names("layout.dispatcher=hybridep")
    assert not relevant & names("layout.dispatcher=hybridep")
    assert not relevant & names("layout.ep=1")
    case = what_if_case(simulate(scenario), "cuda_graphs_hybridep")
    assert case.overrides == ("layout.dispatcher=hybridep", "framework.cuda_graphs=true")


def test_binding_ranks_is_tried_where_it_is_not_known() -> None:
    """Launches take the most that sources say without binding; dense models' are not known to change."""
    scenario = Scenario.from_mapping(LAUNCH_BOUND_MOE)
    bound = scenario.with_overrides("framework.numa_binding=true")
    ratio = max(scenario.cluster.accelerator.unbound_launch_ratios)
    assert scenario.framework.launch_seconds == pytest.approx(ratio * bound.framework.launch_seconds)
    case = what_if_case(simulate(scenario), "numa_binding")
    assert case.overrides == ("framework.numa_binding=true",)
    assert require_outcome(case).step_time == simulate(bound).step_time
    (change,) = (change for change in changes_for(ChangeUse.REMEDY) if change.name == "numa_binding")
    assert not change.is_relevant(bound)
    assert not change.is_relevant(scenario.with_overrides("model=llama3-8b", "layout.ep=1"))


def test_deepep_is_tried_against_alltoall(moe_cases: dict[str, WhatIf]) -> None:
    assert moe_cases["other_dispatcher"].outcome is not None
    case = what_if_case(simulate_pipeline(*MOE, "layout.dispatcher=deepep"), "other_dispatcher")
    assert "alltoall, not deepep" in case.description
    assert require_outcome(case).step_time_difference == pytest.approx(
        -require_outcome(moe_cases["other_dispatcher"]).step_time_difference
    )


def test_loss_changes_sum_to_the_slowdown(cases: dict[str, WhatIf]) -> None:
    outcomes = [case.outcome for case in cases.values() if case.outcome is not None]
    assert len(outcomes) > 5
    for outcome in outcomes:
        assert outcome.ideal_change + sum(outcome.loss_changes.values()) == pytest.approx(
            outcome.slowdown_seconds, abs=1e-9 * outcome.baseline_step_time
        )


LAUNCH_BOUND_MOE = {
    "model": {"preset": "qwen3-235b-a22b", "layers": 16},
    "cluster": {"name": "gb300-nvl72", "gpus": 512},
    "layout": {"pp": 4, "ep": 32, "data": "zero1"},
    "training": {"sequence": 4096, "global_batch": 1024},
    "framework": "megatron",
}
FSDP = {
    "model": {"preset": "llama3-8b", "layers": 8},
    "cluster": {"name": "dgx-h100", "gpus": 32},
    "layout": {"data": "fsdp"},
    "training": {"sequence": 2048, "global_batch": 32, "recompute": "full"},
}
TENSOR = {
    "model": {"preset": "llama3-70b", "layers": 8},
    "cluster": {"name": "dgx-h100", "gpus": 32},
    "layout": {"tp": 8, "pp": 2, "overlap_p2p_comm": False, "async_tensor_model_parallel_allreduce": False},
    "training": {"sequence": 4096, "global_batch": 16, "fused": False, "attention": "standard"},
    "framework": "megatron",
}
CUT_EXPERTS = {
    "model": {"preset": "mixtral-8x7b", "layers": 8},
    "cluster": {"name": "dgx-h100", "gpus": 32},
    "layout": {
        "tp": 4,
        "pp": 2,
        "ep": 2,
        "etp": 4,
        "data": {"ddp": {"overlap": True}},
        "sequence_parallel": True,
        "overlap_p2p_comm": True,
    },
    "training": {"sequence": 4096, "global_batch": 32},
    "framework": "megatron",
}
JOBS = {"launch-bound": LAUNCH_BOUND_MOE, "fsdp": FSDP, "tensor": TENSOR, "cut experts": CUT_EXPERTS}
SLOW_JOBS = ("launch-bound", "fsdp", "cut experts")


@pytest.fixture(scope="module", params=["tensor", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_JOBS)])
def job(request: pytest.FixtureRequest) -> SimulationResult:
    return simulate(Scenario.from_mapping(JOBS[request.param], default_name=request.param))


@pytest.fixture(scope="module")
def job_report(job: SimulationResult) -> WhatIfReport:
    return run_what_ifs(job, math.inf)


def test_no_remedy_wins_more_than_the_losses_that_it_addresses(
    job: SimulationResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So those that are not tried, since they can win little, would win little."""
    monkeypatch.setattr(what_if, "MIN_LOSS_SHARE", -1.0)
    remedies = {change.name: change for change in changes_for(ChangeUse.REMEDY)}
    tried = run_what_ifs(job, math.inf).tried_settings
    assert len(tried) >= 4
    for case in tried:
        gain = -require_outcome(case).slowdown_ratio
        assert gain <= possible_gain(remedies[case.name], job.losses) + MIN_LOSS_SHARE, case.description


def test_every_outcome_is_that_of_the_arguments_that_are_shown(job: SimulationResult, job_report: WhatIfReport) -> None:
    improvements = [case for case, _ in job_report.improvements]
    assert improvements
    for case in (*improvements, *filter(None, [job_report.combined])):
        flags = shlex.split(case.arguments)
        assert flags[::2] == ["--set"] * len(case.overrides)
        changed = simulate(job.scenario.with_overrides(*flags[1::2]))
        assert changed.step_time == require_outcome(case).step_time
        assert changed.fits_in_memory


def test_improvements_together_are_better_than_each(job_report: WhatIfReport) -> None:
    if (combined := job_report.combined) is None:
        return
    kept_formats = [outcome for case, outcome in job_report.improvements if not case.changes_numerics]
    assert require_outcome(combined).slowdown_ratio < min(outcome.slowdown_ratio for outcome in kept_formats)
    assert 2 <= len(combined.description.split("; ")) <= 3


def test_a_mixture_that_waits_for_launches_is_told_cuda_graphs() -> None:
    report = run_what_ifs(simulate(Scenario.from_mapping(LAUNCH_BOUND_MOE)))
    best, outcome = report.improvements[0]
    assert "--set framework.cuda_graphs=" in best.arguments
    assert outcome.slowdown_ratio < -0.15


def test_a_framework_without_graphs_is_told_one_that_has_them() -> None:
    launch_bound = {"model": "gpt2-small", "cluster": {"name": "dgx-h100", "gpus": 1}, "framework": "megatron-2021"}
    result = simulate(Scenario.from_mapping({**launch_bound, "training": {"sequence": 128, "global_batch": 1}}))
    case = what_if_case(result, "cuda_graphs")
    assert case.overrides == ("framework.name=megatron", "framework.cuda_graphs=true")
    assert "megatron-2021 captures none" in case.description


def test_uneven_stages_of_dualpipe_are_rebalanced() -> None:
    """DeepSeek-V3's further-token layer is on the rank with the logits; other ranks take over some of its layers."""
    plan = {
        "model": {"preset": "deepseek-v3", "mtp_layers": 1},
        "cluster": {"name": "dgx-h800", "gpus": 2048},
        "layout": {"pp": 16, "ep": 64, "data": "zero1", "dispatcher": "deepep"},
        "schedule": "dualpipe",
        "training": {"sequence": 4096, "global_batch": 15360, "precision": "fp8-blockwise"},
    }
    result = simulate(Scenario.from_mapping(plan))
    imbalance = result.losses.seconds[StepLoss.IMBALANCE]
    assert imbalance > 0.1 * result.step_time
    case = what_if_case(result, "balanced_stages")
    outcome = require_outcome(case)
    assert outcome.loss_changes[StepLoss.IMBALANCE] < -0.4 * imbalance
    assert outcome.slowdown_ratio < -0.1


@given(
    counts=st.lists(st.integers(1, 6), min_size=2, max_size=8),
    extra=st.lists(st.floats(0.0, 4.0), min_size=8, max_size=8),
)
def test_balanced_partitions_keep_the_layers_and_shorten_the_longest(counts: list[int], extra: list[float]) -> None:
    """Ranks with one stage each and layers of a second; what the ends have in addition stays."""
    placement = Placement(tuple(range(len(counts))))
    ends = [extra[rank] if rank in (0, len(counts) - 1) and len(counts) > 4 else 0.0 for rank in range(len(counts))]
    work = [layers + more for layers, more in zip(counts, ends, strict=True)]
    balanced = balanced_layer_counts(counts, work, placement, sum(counts))
    assert sum(balanced) == sum(counts)
    longest = max(layers + more for layers, more in zip(balanced, ends, strict=True))
    assert longest <= max(work) + 1e-9
    lowest_possible = sum(work) / len(counts)
    assert longest < max(lowest_possible, *ends) + 1.0 + 1e-9
    capped = balanced_layer_counts(counts, work, placement, max(counts))
    assert max(capped) <= max(counts)
