"""What-if: every outcome is that of the scenario written by hand, and what is not tried says why."""

import math
from dataclasses import replace

import pytest

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
from clustersim.planning.what_if import run_what_ifs
from clustersim.planning.what_if_cases import WHAT_IF_CASES, ChangedScenario, WhatIfCase
from clustersim.program.task import CollectiveType
from clustersim.results.memory_check import check
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.what_if import WhatIf, WhatIfOutcome
from clustersim.scenario import Scenario
from clustersim.scenario.changes.links import network_link_kinds, with_link_bandwidth
from clustersim.scenario.changes.training import with_microbatch_size
from clustersim.schedules.csv_format import format_order
from clustersim.schedules.one_f_one_b import OneFOneB
from clustersim.simulation import simulate
from tests.small_pipeline import pipeline, simulated

LARGER = ("training.microbatch=2", "training.recompute={layers: 1}")


def result_of(*overrides: str) -> SimulationResult:
    return simulated(*LARGER, *overrides)


def cases_of(result: SimulationResult, budget: float = math.inf) -> dict[str, WhatIf]:
    return {case.name: case for case in run_what_ifs(result, budget).cases}


def tried(case: WhatIf) -> WhatIfOutcome:
    assert case.outcome is not None, case.note
    return case.outcome


@pytest.fixture(scope="module")
def plain() -> SimulationResult:
    return result_of()


@pytest.fixture(scope="module")
def cases(plain: SimulationResult) -> dict[str, WhatIf]:
    return cases_of(plain)


def test_an_order_that_is_written_down_is_for_its_own_microbatches() -> None:
    """Eight in the scenario (16 sequences, two replicas): twice as many are left out with the reason."""
    of = simulated("schedule=1f1b").scenario
    rows = format_order(OneFOneB().order(of.layout.pp, of.microbatch_count)).splitlines()
    found = cases_of(simulated(f"schedule={{orders: {{rows: {rows}}}}}"))
    case = found["twice_the_microbatches"]
    assert case.outcome is None
    assert case.note == (
        f"schedule: written order is for {of.microbatch_count} microbatches, but each replica has {2 * of.microbatch_count}; "
        f"training.global_batch {of.microbatch_count} x dp x training.microbatch fits"
    )
    assert tried(found["products_faster"]).step_time < simulated("schedule=1f1b").step_time


def test_all_cases_of_the_shelf_are_answered_in_its_order(plain: SimulationResult) -> None:
    asked = [case.name for case in WHAT_IF_CASES if case.is_applicable(plain.scenario)]
    assert [case.name for case in run_what_ifs(plain, math.inf).cases] == asked


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("twice_the_microbatches", ["training.global_batch=32"]),
        ("half_the_microbatch", ["training.microbatch=1"]),
        ("slow_rank", ["disturbances.slow={gpu: 12, speed: 0.9}"]),
        ("no_recompute", ["training.recompute=none"]),
        ("full_recompute", ["training.recompute=full"]),
    ],
)
def test_an_outcome_is_that_of_the_scenario_as_a_user_would_write_it(
    plain: SimulationResult, cases: dict[str, WhatIf], name: str, overrides: list[str]
) -> None:
    outcome, written = tried(cases[name]), result_of(*overrides)
    assert outcome.step_time == written.step_time
    assert outcome.baseline_step_time == plain.step_time
    assert outcome.tokens_per_s_per_gpu == pytest.approx(written.tokens_per_second / written.rank_count)
    assert (outcome.peak_memory, outcome.fits_in_memory) == (written.peak_memory, written.fits_in_memory)
    assert cases[name].note == ""


def test_slower_links_and_faster_kernels_go_the_way_that_they_must_here(cases: dict[str, WhatIf]) -> None:
    assert tried(cases["node_links_less"]).step_time_difference > 0.0  # tensor-parallel collectives are exposed
    assert tried(cases["network_less"]).step_time_difference >= 0.0
    assert tried(cases["network_twice"]).step_time_difference <= 0.0
    faster = tried(cases["products_faster"])
    assert -1.0 / 11.0 < faster.slowdown_ratio < 0.0  # at most what all of the step would gain


def test_more_tokens_take_longer_and_are_not_worse(cases: dict[str, WhatIf]) -> None:
    outcome = tried(cases["twice_the_microbatches"])
    assert outcome.step_time_difference > 0.0
    assert outcome.token_ratio == 2.0
    assert outcome.slowdown_seconds == pytest.approx(outcome.step_time / 2 - outcome.baseline_step_time)
    assert outcome.slowdown_seconds < 0.0 < outcome.speedup  # twice the microbatches, the same bubble
    assert (1.0 + outcome.slowdown_ratio) * (1.0 + outcome.speedup) == pytest.approx(1.0)


def test_without_nvlink_the_links_inside_a_node_are_those_of_pcie() -> None:
    shared = ["cluster={name: pcie-node, gpus: 8}", "layout={tp: 8}", "training.global_batch=2"]
    outcome = tried(cases_of(result_of(*shared))["node_links_less"])
    assert 0.0 < outcome.slowdown_ratio < 1.0 / 9.0  # at most what all of the step would lose


@pytest.mark.parametrize(
    ("overrides", "reasons"),
    [
        (
            ["layout={}", "cluster.gpus=1", "training.microbatch=1", "training.recompute=none"],
            {
                "network_less": "all ranks are on one node",
                "network_twice": "all ranks are on one node",
                "node_links_less": "no NVLink or PCIe is used",
                "half_the_microbatch": "a microbatch of 1 sequence has no half",
                "slow_rank": "there is one rank",
                "hybrid_sharding": "weights are not fully sharded",
                "no_recompute": "nothing is recomputed now",
                "cuda_graphs": "no GPU waits for its host",
                "no_offload": "nothing is on the host now",
                "no_overheads": "nothing is done beside the model now",
            },
        ),
        (
            ["training.microbatch=3", "training.global_batch=18", "training.recompute=full"],
            {
                "half_the_microbatch": "a microbatch of 3 sequences has no half",
                "hybrid_sharding": "weights are not fully sharded",
                "full_recompute": "all layers are recomputed now",
                "cuda_graphs": "no GPU waits for its host",
                "no_offload": "nothing is on the host now",
                "no_overheads": "nothing is done beside the model now",
            },
        ),
    ],
)
def test_what_cannot_be_says_why(overrides: list[str], reasons: dict[str, str]) -> None:
    found = cases_of(result_of(*overrides))
    assert {name: case.note for name, case in found.items() if case.outcome is None} == reasons


def test_a_change_that_is_illegal_gives_the_sentence_that_the_file_would_get(
    plain: SimulationResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        what_if,
        "WHAT_IF_CASES",
        (
            WhatIfCase(
                "five", "microbatches of 5", lambda each: ChangedScenario(with_microbatch_size(each.scenario, 5))
            ),
        ),
    )
    with pytest.raises(InputError) as refused:
        result_of("training.microbatch=5")
    (case,) = run_what_ifs(plain, math.inf).cases
    assert case.outcome is None
    assert case.note == str(refused.value).removeprefix("small: ")


def test_what_takes_longer_than_is_set_aside_is_left_out_and_says_so(plain: SimulationResult) -> None:
    slow = replace(plain, wall_seconds=60.0)
    found = run_what_ifs(slow, budget=5.0)
    assert not found.simulated
    assert all("simulating it takes some" in case.note for case in found.skipped if case.name == "node_links_less")
    assert any("2 min 0 s" in case.note or "120 s" in case.note for case in found.skipped)


def test_cases_are_tried_until_the_time_is_used_up(plain: SimulationResult, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr(what_if, "perf_counter", lambda: float(next(clock)))
    found = run_what_ifs(replace(plain, wall_seconds=0.5), budget=5.0)
    assert [case.name for case, _ in found.simulated] == ["network_less", "network_twice"]
    # which cannot be, however long they took
    cannot = ("hybrid_sharding", "cuda_graphs", "no_offload", "no_overheads")
    late = [case for case in found.skipped if case.name not in cannot]
    assert late
    assert all(case.note.startswith("left out: ") for case in late)


def test_a_change_that_makes_the_simulation_slow_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clustersim.scenario.validation_rules.warnings.WARN_DESYNC_TP_TASKS", 100)
    shared = simulate(pipeline(*LARGER, "cost.network=shared"))  # of its own: what is warned of is patched
    found = cases_of(shared, budget=1000.0)
    assert [name for name, case in found.items() if "left out, as it takes long: disturbances put" in case.note] == [
        "slow_rank"
    ]
    assert tried(cases_of(shared)["slow_rank"]).step_time_difference > 0.0  # asked for in any case


@pytest.fixture(scope="module")
def measured(plain: SimulationResult) -> SimulationResult:
    """Two collectives were measured."""
    calls = [CollectiveCall(CollectiveType.ALL_REDUCE, payload, 2, 1) for payload in (1e5, 1e8)]
    rows = tuple(CollectiveSample(call, TimeStatistics(1.0, 1.0, 1.0, 5)) for call in calls)  # seconds: far too long
    conditions = MeasurementConditions(date="2026-01-01", command="", method="")
    record = CalibrationRecord(DeviceInfo("h100-sxm-80gb", "gpu"), conditions, collectives=rows)
    return simulate(replace(plain.scenario, cost=replace(plain.scenario.cost, record=record)))


def test_measured_collectives_do_not_count_as_an_effect_of_the_links(
    plain: SimulationResult, measured: SimulationResult
) -> None:
    assert measured.step_time > 2.0 * plain.step_time
    found = cases_of(measured)
    links, kernels = tried(found["node_links_less"]), tried(found["slow_rank"])
    assert links.baseline_step_time < 0.5 * measured.step_time
    assert 0.0 < links.slowdown_ratio < 0.1
    assert "modelled before and after" in found["node_links_less"].note
    assert kernels.baseline_step_time == measured.step_time
    assert found["slow_rank"].note == ""


def test_the_slow_rank_is_of_the_stage_for_which_the_others_wait(
    plain: SimulationResult, cases: dict[str, WhatIf]
) -> None:
    """The last one has the head; a slow GPU anywhere else costs less, and one that is slow already is not taken."""
    assert cases["slow_rank"].description == "one rank at 0.9x speed: GPU 12, stage 3"
    worst = tried(cases["slow_rank"]).step_time
    elsewhere = [result_of(f"disturbances.slow={{gpu: {gpu}, speed: 0.9}}").step_time for gpu in (0, 4, 8)]
    assert max(elsewhere) - plain.step_time < 0.5 * (worst - plain.step_time)
    again = cases_of(result_of("disturbances.slow={gpu: 12, speed: 0.5}"))
    assert again["slow_rank"].description.endswith(": GPU 13, stage 3")
    flat = cases_of(result_of("layout={tp: 2, dp: 8}"))
    assert flat["slow_rank"].description.endswith(": GPU 0")


def test_faster_nics_come_with_the_pcie_that_would_bound_them() -> None:
    """Data parallelism across nodes alone: twice the bandwidth is worth it only where PCIe is as fast as the NICs."""
    overrides = ["layout={dp: 16, data: zero1}", "model={preset: llama3-8b, layers: 2}", "training.sequence=512"]
    result = result_of(*overrides, "training.microbatch=1", "training.recompute=none")
    twice = cases_of(result)["network_twice"]
    assert twice.description == "network links at 2x bandwidth, PCIe too"
    alone = simulate(with_link_bandwidth(result.scenario, network_link_kinds(result.scenario), 2.0)).step_time
    assert alone - tried(twice).baseline_step_time > 0.5 * tried(twice).step_time_difference
    assert tried(twice).slowdown_ratio < -0.01


def test_the_time_of_what_is_compared_with_is_part_of_what_a_case_takes(measured: SimulationResult) -> None:
    """A second for the base without measured collectives, and one for the case."""
    slow = replace(measured, wall_seconds=1.0)
    found = {case.name: case for case in run_what_ifs(slow, budget=1.5).cases}
    assert "simulating it takes some 2 s" in found["network_less"].note
    assert found["products_faster"].outcome is not None
    found = {case.name: case for case in run_what_ifs(slow, budget=60.0).cases}
    assert found["network_less"].outcome is not None


def test_weights_are_cut_over_as_few_ranks_as_fit() -> None:
    """Of Llama 3 8B's 18 bytes a parameter 2 GPUs of 32 GB cannot hold halves."""
    plan = {
        "model": "llama3-8b",
        "cluster": {"name": "dgx-v100", "gpus": 16},
        "layout": {"data": "fsdp"},
        "training": {"sequence": 512, "global_batch": 16, "precision": "fp16", "recompute": "full"},
    }
    by_hand = [
        Scenario.from_mapping(plan, overrides=[f"layout.data={{hsdp: {{shard: {shard}}}}}"]) for shard in (2, 4, 8)
    ]
    smallest = next(scenario for scenario in by_hand if check(scenario).fits)
    case = cases_of(simulate(Scenario.from_mapping(plan)))["hybrid_sharding"]
    assert smallest is not by_hand[0]
    assert f"over {smallest.layout.data.shard_size} of 16" in case.description
    assert tried(case).step_time == simulate(smallest).step_time


def test_what_is_not_fully_sharded_is_not_cut_otherwise(cases: dict[str, WhatIf]) -> None:
    assert cases["hybrid_sharding"].note == "weights are not fully sharded"


def test_graphs_make_a_step_shorter_where_gpus_wait_for_their_hosts() -> None:
    """As long as it is on a host that launches as fast as it launches a graph."""
    waiting = {"model": "gpt2-small", "cluster": {"name": "dgx-h100", "gpus": 1}}
    training = {"sequence": 128, "global_batch": 1}
    result = simulate(Scenario.from_mapping({**waiting, "training": training}))
    outcome = cases_of(result)["cuda_graphs"]
    captured = simulate(Scenario.from_mapping({**waiting, "training": training, "framework": {"cuda_graphs": True}}))
    assert tried(outcome).step_time == captured.step_time < result.step_time
    assert cases_of(captured)["cuda_graphs"].note == "passes are captured now"


MIXTURE = (
    "model={preset: mixtral-8x7b, layers: 4}",
    "training.microbatch=1",
    "training.recompute=none",
    "layout={tp: 1, pp: 2, dp: 8, data: zero1, ep: 4}",
)


@pytest.fixture(scope="module")
def mixed() -> dict[str, WhatIf]:
    return cases_of(simulated(*MIXTURE))


@pytest.mark.parametrize(
    ("name", "words", "overrides"),
    [
        ("other_dispatcher", "deepep, not alltoall", ["layout.dispatcher=deepep"]),
        ("other_loads", "drawn, with a variation of 0.3 (seed 0)", ["training.expert_load=0.3"]),
    ],
)
def test_another_dispatcher_or_load_is_the_scenario_that_names_it(
    mixed: dict[str, WhatIf], name: str, words: str, overrides: list[str]
) -> None:
    assert words in mixed[name].description
    assert tried(mixed[name]).step_time == simulated(*MIXTURE, *overrides).step_time


def test_experts_inside_a_node_are_tried_across_nodes_and_back() -> None:
    """Stages of 16 ranks on two nodes: 8 experts are on one node's, with each cut in two on both nodes'."""
    layout = "layout={tp: 2, pp: 1, dp: 8, data: zero1, sequence_parallel: true, ep: %d, etp: 2}"
    near, far = ([*MIXTURE[:3], layout % ep, "training.global_batch=64"] for ep in (4, 8))
    inside, across = (cases_of(simulated(*item)) for item in (near, far))
    assert "ep 8, not 4" in inside["experts_across"].description
    assert tried(inside["experts_across"]).step_time == simulated(*far).step_time
    assert inside["experts_inside"].note == "tokens stay inside their NVLink domain now"
    assert "ep 4, not 8" in across["experts_inside"].description
    assert tried(across["experts_inside"]).step_time == simulated(*near).step_time
    assert tried(across["experts_inside"]).step_time_difference < 0.0


def test_racks_send_tokens_as_racks_do() -> None:
    rack = ("cluster={name: gb200-nvl72, gpus: 16}",)
    assert "hybridep, not alltoall" in cases_of(simulated(*MIXTURE, *rack))["other_dispatcher"].description


def test_a_dispatcher_of_its_own_is_tried_against_the_library(mixed: dict[str, WhatIf]) -> None:
    assert mixed["other_dispatcher"].outcome is not None
    found = cases_of(simulated(*MIXTURE, "layout.dispatcher=deepep"))["other_dispatcher"]
    assert "alltoall, not deepep" in found.description
    assert tried(found).step_time_difference == pytest.approx(-tried(mixed["other_dispatcher"]).step_time_difference)


def test_what_parts_change_by_sums_to_what_the_work_takes_longer(cases: dict[str, WhatIf]) -> None:
    outcomes = [case.outcome for case in cases.values() if case.outcome is not None]
    assert len(outcomes) > 5
    for outcome in outcomes:
        assert sum(outcome.category_changes.values()) == pytest.approx(
            outcome.slowdown_seconds, abs=1e-9 * outcome.baseline_step_time
        )
