"""Rounds of local training over sites: what they consist of, and laws."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from clustersim.build import resolved_library
from clustersim.cli.diloco import show_local_training
from clustersim.cli.outputs import Outputs
from clustersim.common.errors import InputError
from clustersim.hardware.sites import SitesFabric
from clustersim.interop.export import export_scenario
from clustersim.interop.registry import EXPORTERS
from clustersim.model.transformer import parameter_count
from clustersim.reliability import simulate_goodput
from clustersim.reliability.link_cuts import LinkCuts
from clustersim.reliability.local_training import LocalTraining, simulate_local_training
from clustersim.reliability.replica_places import replica_scenarios
from clustersim.results.link_volumes import MeteredCollectiveCost
from clustersim.results.memory_check import peak_memory_use
from clustersim.results.outer_rounds import OuterRounds, ReplicaOutages
from clustersim.scenario import Scenario
from clustersim.scenario.diloco import OuterFormat
from clustersim.simulation import simulate

TRAINING = {"sequence": 4096, "global_batch": 64, "microbatch": 1, "precision": "bf16"}
LAYOUT = {"tp": 4, "dp": 8, "data": "zero1"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def scenario(folder: Path, *overrides: str, gpus: tuple[int, ...] = (16, 16), **link: Any) -> Scenario:
    """A model of 8 layers on two sites of two nodes, 10 Gbit/s and 40 ms apart unless `link` says otherwise."""
    between = {"source": "a", "target": "b", "bandwidth": "10 Gbit/s", "round_trip": "40 ms"} | link
    content = {
        "sites": [{"name": name, "cluster": "dgx-h100", "gpus": count} for name, count in zip("ab", gpus, strict=True)],
        "links": [between],
    }
    path = folder / "sites.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    mapping: Mapping[str, Any] = {
        "model": {"preset": "llama3-8b", "layers": 8},
        "cluster": {"path": str(path)},
        "layout": LAYOUT | {"dp": sum(gpus) // 4},
        "training": TRAINING,
        "diloco": {"inner_steps": 10},
    }
    return Scenario.from_mapping(mapping, overrides)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> OuterRounds:
    """The rounds of the scenario without overrides."""
    return simulate_local_training(scenario(tmp_path_factory.mktemp("plain")))


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> OuterRounds:
    """The same, with the settings that reach 90 %."""
    return simulate_local_training(scenario(tmp_path_factory.mktemp("chosen")), utilization=0.9)


@pytest.fixture(scope="module")
def two_fragments(tmp_path_factory: pytest.TempPathFactory) -> OuterRounds:
    """The rounds where halves of the layers are exchanged in turn."""
    return simulate_local_training(scenario(tmp_path_factory.mktemp("fragments"), "diloco.fragments=2"))


def without_diloco(folder: Path, **layout: Any) -> Scenario:
    mapping = dict(scenario(folder).raw_mapping)
    del mapping["diloco"]
    return Scenario.from_mapping(mapping | {"layout": LAYOUT | layout})


def test_an_inner_step_is_that_of_one_site(folder: Path, plain: OuterRounds) -> None:
    """Half of the replicas and half of the batch on a cluster of a site's size."""
    alone = Scenario.from_mapping(
        dict(without_diloco(folder).raw_mapping)
        | {"cluster": {"name": "dgx-h100", "gpus": 16}, "layout": LAYOUT | {"dp": 4}}
        | {"training": TRAINING | {"global_batch": 32}}
    )
    assert [site.step_time for site in plain.replicas] == [simulate(alone).step_time] * 2


def test_a_round_is_steps_exchange_and_outer_step(plain: OuterRounds) -> None:
    parts = 10 * plain.inner_step_time + plain.exposed_seconds + plain.optimizer_seconds
    assert plain.round_seconds == pytest.approx(parts)
    assert plain.exposed_seconds == pytest.approx(plain.exchange_seconds)
    assert plain.utilization == pytest.approx(10 * plain.inner_step_time / parts)
    assert plain.tokens_per_second == pytest.approx(10 * 64 * 4096 / parts)


def test_two_sites_send_what_they_hold_once_in_each_direction(folder: Path, plain: OuterRounds) -> None:
    payload = 4.0 * parameter_count(scenario(folder).model)
    assert [link.sent_bytes for link in plain.links] == pytest.approx([payload] * 2)
    assert plain.exchange_seconds >= payload / 1.25e9 + 2 * 20e-3  # 10 Gbit/s, there and back


@pytest.mark.parametrize("outer_format", list(OuterFormat), ids=lambda outer_format: outer_format.value)
def test_bytes_follow_the_format(folder: Path, outer_format: OuterFormat) -> None:
    rounds = simulate_local_training(scenario(folder, f"diloco.outer_gradients={outer_format.value}"))
    assert rounds.payload == pytest.approx(outer_format.bytes * parameter_count(scenario(folder).model))


def test_one_inner_step_without_momentum_sends_what_data_parallelism_does(folder: Path) -> None:
    """Hierarchical: optimizer states sharded in each site, gradients all-reduced between the sites."""
    synchronous = without_diloco(folder, data={"zero": {"stage": 1, "shard": 4}})
    result = simulate(synchronous)
    fabric = synchronous.cluster.machine
    assert isinstance(fabric, SitesFabric)
    groups = result.program.groups
    volumes = MeteredCollectiveCost(synchronous.cluster.fabric, resolved_library(synchronous), groups)
    sent = 0.0
    for task in (task for task in result.program.programs[0].tasks if getattr(task, "comm_op", None) is not None):
        if task.comm_op.comm_group == "dp_replicate":
            link_volumes = volumes.link_volumes(task.comm_op)
            crosses = link_volumes.link_id == fabric.site_link_ids[0]
            sent += task.comm_op.payload * link_volumes.fraction[crosses].sum()
    gradients = "bf16" if sent < 3.0 * parameter_count(synchronous.model) else "fp32"
    rounds = simulate_local_training(
        scenario(folder, "diloco.inner_steps=1", "diloco.optimizer=sgd", f"diloco.outer_gradients={gradients}")
    )
    assert rounds.links[0].sent_bytes == pytest.approx(sent, rel=1e-3)


def test_with_unlimited_bandwidth_only_steps_remain(folder: Path) -> None:
    far = scenario(folder, bandwidth="1000000 Tbit/s", round_trip="0.001 us")
    rounds = simulate_local_training(far)
    assert rounds.exposed_seconds < 0.05 * rounds.inner_step_time  # the NICs' own time, and launches


@pytest.mark.parametrize(
    "override",
    ["diloco.inner_steps=20", "diloco.outer_gradients=int8", "diloco.overlap=1", "diloco.send=during_backward"],
)
def test_what_raises_utilization(folder: Path, override: str, two_fragments: OuterRounds) -> None:
    changed = simulate_local_training(scenario(folder, "diloco.fragments=2", override))
    assert changed.utilization > two_fragments.utilization


def test_wider_and_shorter_links_are_never_slower(folder: Path, plain: OuterRounds) -> None:
    assert simulate_local_training(scenario(folder, bandwidth="20 Gbit/s")).round_seconds < plain.round_seconds
    assert simulate_local_training(scenario(folder, round_trip="10 ms")).round_seconds < plain.round_seconds


def test_the_needed_bandwidth_reaches_the_utilization(folder: Path) -> None:
    training = LocalTraining(scenario(folder))
    settings = training.scenario.diloco
    assert settings is not None
    factor = training.bandwidth_for(0.9)
    assert factor is not None
    assert training.rounds(settings, factor).utilization == pytest.approx(0.9, abs=3e-3)


def test_no_bandwidth_helps_where_the_transport_limits(folder: Path) -> None:
    limited = scenario(folder, transport={"window": "1 MB"})
    assert LocalTraining(limited).bandwidth_for(0.95) is None


def test_a_smaller_site_has_fewer_replicas_and_less_of_the_batch(folder: Path) -> None:
    rounds = simulate_local_training(scenario(folder, gpus=(16, 48)))
    assert [(site.gpus, site.sequences) for site in rounds.replicas] == [(16, 16), (48, 48)]
    assert max(rounds.replica_utilization(site) for site in rounds.replicas) == rounds.utilization


def test_outer_state_is_sharded_over_a_site(folder: Path, plain: OuterRounds) -> None:
    parameters = parameter_count(scenario(folder).model)
    sgd, host = (
        simulate_local_training(scenario(folder, override))
        for override in ("diloco.optimizer=sgd", "diloco.offload=true")
    )
    assert plain.outer_bytes_per_gpu == pytest.approx(8.0 * parameters / 16)
    assert sgd.outer_bytes_per_gpu == pytest.approx(4.0 * parameters / 16)
    assert (host.outer_bytes_per_gpu, host.host_bytes_per_gpu) == (0.0, plain.outer_bytes_per_gpu)
    assert host.optimizer_seconds > plain.optimizer_seconds


def test_memory_is_that_of_an_inner_step_and_the_outer_state(folder: Path, plain: OuterRounds) -> None:
    alone = peak_memory_use(next(replica_scenarios(scenario(folder))))
    assert plain.peak_memory == pytest.approx(alone.needed + plain.outer_bytes_per_gpu)
    assert plain.fits == (plain.peak_memory <= plain.memory_capacity)


def test_curves_rise_with_bandwidth_and_inner_steps(folder: Path) -> None:
    curves = simulate_local_training(scenario(folder), curves=True).curves
    assert [curve.inner_steps for curve in curves] == [1, 10, 100]
    for curve in curves:
        assert list(curve.utilizations) == sorted(curve.utilizations)
    for fewer, more in pairwise(curves):
        assert all(low <= high for low, high in zip(fewer.utilizations, more.utilizations, strict=True))


def test_choices_have_the_fewest_inner_steps_that_reach_the_utilization(folder: Path, chosen: OuterRounds) -> None:
    training = LocalTraining(scenario(folder))
    assert chosen.choices
    for choice in chosen.choices:
        settings = choice.settings
        fewest = max(settings.overlap + 1, settings.fragments * max(settings.overlap, 1))
        assert choice.rounds.utilization >= 0.9
        assert training.rounds(settings).utilization == choice.rounds.utilization
        if settings.inner_steps > fewest:
            assert training.rounds(replace(settings, inner_steps=settings.inner_steps - 1)).utilization < 0.9
    steps = [choice.settings.inner_steps for choice in chosen.choices]
    assert steps == sorted(steps)
    waited_for = {c.settings.outer_gradients: c.settings.inner_steps for c in chosen.choices if not c.settings.overlap}
    # nothing overlaps: time for the exchange is a ninth of the inner steps, and in proportion to the format's bytes
    assert waited_for[OuterFormat.FP32] > waited_for[OuterFormat.BF16] > waited_for[OuterFormat.INT8]


def test_a_day_of_a_link_is_that_of_its_rounds(chosen: OuterRounds) -> None:
    choice = chosen.choices[0]
    rounds_a_day = 86_400.0 / choice.rounds.round_seconds
    assert choice.bytes_per_day == pytest.approx(rounds_a_day * choice.rounds.payload)
    assert choice.to_json()["inner_steps"] == choice.settings.inner_steps


@pytest.mark.parametrize("utilization", [0.0, 1.0, -0.5])
def test_utilizations_out_of_range_are_refused(folder: Path, utilization: float) -> None:
    with pytest.raises(InputError, match="is not above 0 and below 1"):
        simulate_local_training(scenario(folder), utilization=utilization)


@pytest.mark.parametrize("text", ["0", "100%", "most", "1.5"])
def test_utilizations_that_are_no_share_are_named(folder: Path, text: str) -> None:
    with pytest.raises(InputError, match=f"--utilization {text}: is no share of the time; write such as"):
        show_local_training(folder / "plan.yaml", [], Outputs(), utilization=text)


def test_the_order_of_simulation_changes_nothing(folder: Path) -> None:
    assert simulate_local_training(scenario(folder)).to_json() == simulate_local_training(scenario(folder)).to_json()


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["diloco.overlap=10"], "overlap 10 is not below inner_steps 10"),
        (["diloco.fragments=11"], "11 fragments do not fit in 10 inner steps"),
        (["diloco.fragments=9"], "9 are more than the 8 layers"),
        (["cluster={name: dgx-h100, gpus: 32}"], "is a single site"),
        (["training.global_batch=63"], "no whole microbatches"),
        (["diloco.inner_steps=0"], "inner_steps"),
        (["diloco.outer_gradients=int4"], "did you mean int8"),
    ],
)
def test_mistakes_are_named(folder: Path, overrides: list[str], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        scenario(folder, *overrides)


def test_a_step_of_all_sites_is_refused(folder: Path) -> None:
    for ask in (
        simulate,
        simulate_goodput,
        lambda plan: export_scenario(plan, EXPORTERS["megatron"]),
    ):
        with pytest.raises(InputError, match="clustersim diloco"):
            ask(scenario(folder))
    with pytest.raises(InputError, match="diloco: is missing"):
        simulate_local_training(without_diloco(folder))


def test_the_command_prints_rounds_links_and_what_is_not_simulated(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(dict(scenario(folder).raw_mapping)), encoding="utf-8")
    assert show_local_training(path, [], Outputs(html=str(folder / "rounds.html"), table=True))
    page = (folder / "rounds.html").read_text(encoding="utf-8")
    assert "Utilization against bandwidth" in page
    printed = capsys.readouterr().out
    for part in ("utilization", "Convergence is not simulated", "for 90%", "outer gradients"):
        assert part in printed


def test_sites_of_unlike_speed_wait_for_the_slowest(folder: Path) -> None:
    slow = scenario(folder, "degradations.slow=[{gpu: 20, speed: 0.5}]")
    rounds = simulate_local_training(slow)
    assert (
        rounds.replica_utilization(rounds.replicas[0])
        < rounds.replica_utilization(rounds.replicas[1])
        == rounds.utilization
    )
    assert replace(rounds, replicas=rounds.replicas[:1]).round_seconds < rounds.round_seconds


def test_without_failures_replicas_always_work(folder: Path) -> None:
    plan = scenario(folder, "reliability={preset: rsc-2, failures: {any: null}, checkpoint: {write: async}}")
    outages = simulate_local_training(plan, days=10.0, runs=2).outages
    assert outages is not None
    assert outages.with_quorum == pytest.approx(1.0, abs=1e-3)
    assert outages.waiting == pytest.approx(outages.with_quorum, abs=1e-3)


def test_replicas_that_wait_for_each_other_lose_what_each_of_them_loses(folder: Path) -> None:
    """Independent outages of 6 h about every two days: the product of what each works, or their mean."""
    failures = "{any: null, site: {rate: 3 per site-week, failure_domain: site, detection: 1 min, repair: 6 h}}"
    plan = scenario(folder, f"reliability={{preset: rsc-2, spares: 0, failures: {failures}}}")
    outages = simulate_local_training(plan, days=200.0, runs=10).outages
    assert outages is not None
    first, second = outages.replicas
    assert 0.85 < first < 0.95
    assert outages.with_quorum == pytest.approx((first + second) / 2)
    assert outages.waiting == pytest.approx(first * second, rel=0.02)


CUT = "{any: null, cut: {rate: 2 per wan-week, failure_domain: site, detection: 1 min, repair: 6 h}}"


def cut_outages(folder: Path, *overrides: str) -> ReplicaOutages:
    plan = scenario(folder, f"reliability={{preset: rsc-2, spares: 0, failures: {CUT}}}", *overrides)
    outages = simulate_local_training(plan, days=400.0, runs=10).outages
    assert outages is not None
    assert outages.replicas == pytest.approx((1.0, 1.0), abs=1e-3)  # no replica fails
    return outages


def test_frequent_exchanges_wait_for_the_whole_cut(folder: Path) -> None:
    """Two cuts of 6 h a week; of two equal sites one goes on where rounds do not wait."""
    outages = cut_outages(folder)
    down = 2 * 6 / (7 * 24)
    assert 1.0 - outages.waiting == pytest.approx(down, rel=0.15)
    assert 1.0 - outages.with_quorum == pytest.approx((1.0 - outages.waiting) / 2.0)


def test_a_cut_between_exchanges_costs_nothing(folder: Path, plain: OuterRounds) -> None:
    """With R hours between exchanges a cut of 6 h is waited for from its next one on: 36 / (2 R) hours on average."""
    inner_steps = round(12 * 3600.0 / plain.inner_step_time)
    outages = cut_outages(folder, f"diloco.inner_steps={inner_steps}")
    down = 2 * (6 * 6 / (2 * 12)) / (7 * 24)
    assert 1.0 - outages.waiting == pytest.approx(down, rel=0.25)


def test_a_ring_of_sites_survives_a_cut() -> None:
    rounds = SimpleNamespace(replicas=[SimpleNamespace(sites=(name,), gpus=8) for name in "abc"])
    cuts = LinkCuts(SimpleNamespace(), rounds, 0, 1.0)  # type: ignore[arg-type]
    ring, chain = [("a", "b"), ("b", "c"), ("a", "c")], [("a", "b"), ("b", "c")]
    assert [cuts._absent_replicas(ring, cut) for cut in range(3)] == [frozenset()] * 3
    assert [cuts._absent_replicas(chain, cut) for cut in range(2)] == [{0}, {2}]


@pytest.mark.parametrize("days", [0.0, -1.0, 1e6, float("nan")])
def test_days_out_of_range_are_refused(folder: Path, days: float) -> None:
    with pytest.raises(InputError, match="days"):
        simulate_local_training(scenario(folder), days=days)
