"""Replicas over several sites, and links that are slow where no exchange waits for them."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustersim.cli.check import check_scenario
from clustersim.reliability.inner_steps import replica_groups
from clustersim.reliability.link_cuts import LinkCuts
from clustersim.reliability.local_training import LocalTraining, simulate_local_training
from clustersim.reliability.replica_places import replica_places, replica_scenarios
from clustersim.results.outer_rounds import OuterRounds
from clustersim.results.site_traffic import site_traffic
from clustersim.scenario import Scenario
from clustersim.simulation import simulate


def scenario(
    folder: Path, *overrides: str, sites: str = "abcd", last_link: str = "100 Gbit/s", **diloco: Any
) -> Scenario:
    """A model of 8 layers on a chain of sites of one node."""
    bandwidths = ["100 Gbit/s", "100 Gbit/s", last_link]
    content = {
        "sites": [{"name": name, "cluster": "dgx-h100", "gpus": 8} for name in sites],
        "links": [
            {"source": source, "target": target, "bandwidth": bandwidth, "round_trip": "20 ms"}
            for source, target, bandwidth in zip(sites, sites[1:], bandwidths, strict=False)
        ],
    }
    path = folder / "chain.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return Scenario.from_mapping(
        {
            "model": {"preset": "llama3-8b", "layers": 8},
            "cluster": {"path": str(path)},
            "layout": {"tp": 4, "dp": 8, "data": "zero1"},
            "training": {"sequence": 4096, "global_batch": 32, "microbatch": 1, "precision": "bf16"},
            "diloco": {"inner_steps": 10} | diloco,
        },
        overrides,
    )


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> OuterRounds:
    """Two replicas of two sites each."""
    return simulate_local_training(scenario(tmp_path_factory.mktemp("halves"), replicas=2))


def test_a_replica_over_two_sites_steps_in_step_over_their_link(tmp_path: Path, halves: OuterRounds) -> None:
    plan = scenario(tmp_path, replicas=2)
    assert [slot.sites for slot in replica_places(plan)] == [("a", "b"), ("c", "d")]
    alone = simulate(next(replica_scenarios(plan)))
    assert halves.inner_step_time == pytest.approx(alone.step_time)
    inner = {(link.source, link.target): 10 * link.sent_bytes for link in site_traffic(alone)}
    carried = {(link.source, link.target): link.sent_bytes for link in halves.links}
    assert carried["a", "b"] >= inner["a", "b"] > 0.0
    assert carried["b", "c"] == pytest.approx(carried["c", "b"])
    assert carried["b", "c"] < carried["a", "b"]  # the exchange alone


def test_replicas_of_one_site_are_the_case_of_as_many_as_sites(tmp_path: Path) -> None:
    one_each, four = (simulate_local_training(scenario(tmp_path, **keys)) for keys in ({}, {"replicas": 4}))
    assert one_each.to_json() == four.to_json()


def test_equal_sites_are_simulated_once_unless_something_distinguishes_them(tmp_path: Path) -> None:
    for override, simulated in (
        ("steps=1", {(0,)}),
        ("degradations.slow=[{gpu: 9, speed: 0.5}]", {(0,), (1,), (2,), (3,)}),
    ):
        plan = scenario(tmp_path, override)
        groups = replica_groups(plan, replica_places(plan), list(replica_scenarios(plan)))
        assert {group.simulated for group in groups} == simulated


def test_replicas_that_share_a_site_share_its_network(tmp_path: Path) -> None:
    """Two replicas of 12 GPUs in three sites of 8: both have half of the second site."""
    plan = scenario(tmp_path, "layout.dp=6", "training.global_batch=24", sites="abc", replicas=2)
    slots, replicas = replica_places(plan), list(replica_scenarios(plan))
    assert [slot.sites for slot in slots] == [("a", "b"), ("b", "c")]
    assert [group.replicas for group in replica_groups(plan, slots, replicas)] == [(0, 1)]
    assert min(LocalTraining(plan).step_times) >= simulate(replicas[0]).step_time * (1.0 - 1e-9)


def test_a_cut_inside_stops_a_replica_and_one_between_only_its_exchange(tmp_path: Path, halves: OuterRounds) -> None:
    failures = "{any: null, cut: {rate: 1 per wan-week, failure_domain: site, detection: 1 min, repair: 6 h}}"
    plan = scenario(tmp_path, f"reliability={{preset: rsc-2, spares: 0, failures: {failures}}}", replicas=2)
    cuts = LinkCuts(plan, halves, 0, 86400.0)
    assert [len(list(zip(range(3), cuts.severing_cuts(0, replica), strict=False))) for replica in range(2)] == [3, 3]
    outages = simulate_local_training(plan, days=100.0, runs=4).outages
    assert outages is not None
    down = 6 / (7 * 24)
    assert outages.replicas == pytest.approx((1.0 - down, 1.0 - down), abs=0.02)
    assert outages.waiting < min(outages.replicas)


def test_a_slow_link_outside_the_quorum_delays_nobody(tmp_path: Path) -> None:
    """Site d behind 1 Gbit/s: a quorum of three goes on as if d were not there, all four wait for it."""
    fast, slow = (
        simulate_local_training(scenario(tmp_path, last_link=bandwidth, quorum=3))
        for bandwidth in ("100 Gbit/s", "1 Gbit/s")
    )
    assert [replica.is_waited_for for replica in slow.replicas] == [True, True, True, False]
    assert slow.round_seconds == pytest.approx(fast.round_seconds)
    assert slow.replica_utilization(slow.replicas[3]) == pytest.approx(slow.utilization)
    assert all(link.busy <= 1.0 + 1e-9 for link in slow.links)
    everyone = simulate_local_training(scenario(tmp_path, last_link="1 Gbit/s"))
    assert everyone.round_seconds > 10 * slow.round_seconds


def test_a_smaller_quorum_is_never_slower(tmp_path: Path) -> None:
    training = LocalTraining(scenario(tmp_path, quorum=4))
    settings = [scenario(tmp_path, quorum=quorum).diloco for quorum in (4, 3, 2, 1)]
    seconds = [training.rounds(quorum).round_seconds for quorum in settings if quorum is not None]
    assert seconds == sorted(seconds, reverse=True)


def test_tensor_parallelism_across_sites_is_warned_with_what_it_costs(tmp_path: Path) -> None:
    """Ranks are two sites apart here: messages of every layer wait for half of the round trips of two links."""
    plan = scenario(tmp_path, "diloco=null", "layout.order=[dp, tp, cp, pp]", "layout.dp=16", "layout.tp=2")
    crossings = [warning for warning in plan.warnings if "crosses" in warning]
    assert crossings
    assert all("tp 2 crosses" in warning and "layout.order" in warning for warning in crossings)
    assert "from a to c" in crossings[0] and "20 ms more" in crossings[0]
    within = scenario(tmp_path, "diloco=null", "layout.order=[tp, cp, pp, dp]")
    assert not any("crosses" in warning for warning in within.warnings)


def test_check_names_what_crosses_within_replicas_and_between_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(dict(scenario(tmp_path, replicas=2).raw_mapping)), encoding="utf-8")
    assert check_scenario(path, [])
    printed = capsys.readouterr().out
    assert "dp groups cross between a and b" in printed
    assert "outer gradients cross between b and c" in printed
    assert "outer gradients cross between a and b" not in printed


def test_suggestions_of_replicas_are_in_the_files_terms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each suggested change of the whole job is legal, and fits."""
    plan = scenario(tmp_path, "model={preset: llama3-8b}", "layout.tp=1", "layout.dp=32", "layout.data=ddp")
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(dict(plan.raw_mapping)), encoding="utf-8")
    assert not check_scenario(path, [])
    suggested = [
        line.partition(" would fit")[0] for line in capsys.readouterr().out.splitlines() if "would fit" in line
    ]
    assert suggested
    for line in suggested:
        assert check_scenario(path, shlex.split(line.partition("--set")[2].replace("--set", "")))
