"""Steps over several sites: equal to one cluster where sites are no farther apart, folded as unfolded, never slower."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from clustersim import Scenario, simulate
from clustersim.hardware.cluster import load_cluster
from clustersim.model.transformer import parameter_count
from tests.conftest import examples
from tests.laws.timelines import assert_same_trace

LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas across": {"tp": 4, "pp": 2, "dp": 4, "order": ["tp", "cp", "pp", "dp"], "data": "zero1"},
    "instances across": {
        "tp": 4,
        "pp": 2,
        "dp": 4,
        "order": ["tp", "cp", "pp", "dp"],
        "data": {"zero": {"stage": 1, "shard": 2}},
    },
    "stages across": {"tp": 4, "pp": 2, "dp": 4, "data": "ddp", "overlap_p2p_comm": True},
    "fsdp across": {"dp": 32, "data": "fsdp"},
    "hsdp across": {"dp": 32, "data": {"hsdp": {"shard": 16}}},
}


def scenario(folder: Path, layout: str, sites: int = 2, **link: Any) -> Scenario:
    """Two or four nodes of 8 GPUs in sites, every pair of them linked."""
    names = [f"s{index}" for index in range(sites)]
    between = {"bandwidth": "400 Gbit/s", "round_trip": "20 ms"} | link
    content: dict[str, Any] = {
        "sites": [{"name": name, "cluster": "dgx-h100", "gpus": 32 // sites} for name in names],
        "links": [
            {"source": source, "target": target, **between}
            for index, source in enumerate(names)
            for target in names[index + 1 :]
        ],
    }
    path = folder / f"{sites}.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return Scenario.from_mapping(
        {
            "model": {"preset": "llama3-8b", "layers": 4},
            "cluster": {"path": str(path)} if sites > 1 else {"name": "dgx-h100", "gpus": 32},
            "layout": LAYOUTS[layout],
            "training": {"sequence": 2048, "global_batch": 64, "precision": "bf16"},
        }
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_folded_equals_unfolded(tmp_path: Path, layout: str) -> None:
    folded = simulate(scenario(tmp_path, layout))
    unfolded = simulate(scenario(tmp_path, layout).with_overrides("cost.symmetry=off"))
    assert folded.simulated_rank_count < unfolded.simulated_rank_count == 32
    assert_same_trace(folded.trace, unfolded.trace, relative=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_latency_counts_for_each_message_between_sites(tmp_path: Path, layout: str) -> None:
    """A step is longer by a few one-way latencies at most where replicas are across, by one a microbatch for stages."""
    near, far = (simulate(scenario(tmp_path, layout, round_trip=wait)).step_time for wait in ("1 us", "20 ms"))
    one_way = 10e-3
    assert far - near >= one_way
    assert far - near <= 200 * one_way


@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(list(LAYOUTS)), st.sampled_from([2, 4]), st.floats(1.0, 20.0), st.floats(1.0, 20.0))
def test_a_wider_or_shorter_link_is_never_slower(
    tmp_path: Path, layout: str, sites: int, wider: float, shorter: float
) -> None:
    plain = simulate(scenario(tmp_path, layout, sites)).step_time
    wide = simulate(scenario(tmp_path, layout, sites, bandwidth=f"{400 * wider} Gbit/s")).step_time
    near = simulate(scenario(tmp_path, layout, sites, round_trip=f"{20 / shorter} ms")).step_time
    assert max(wide, near) <= plain * (1 + 1e-9)


def test_one_site_is_the_cluster_to_the_digit(tmp_path: Path) -> None:
    path = tmp_path / "one.yaml"
    path.write_text(yaml.safe_dump({"sites": [{"name": "a", "cluster": "dgx-h100", "gpus": 32}]}), encoding="utf-8")
    alone = scenario(tmp_path, "replicas across", sites=1)
    single = Scenario.from_mapping(dict(alone.raw_mapping) | {"cluster": {"path": str(path)}})
    assert load_cluster(str(path)).gpu_count == 32
    assert simulate(single).step_time == simulate(alone).step_time


def test_pipeline_messages_wait_for_the_long_link(tmp_path: Path) -> None:
    """Stages in two sites: the first forward and the last backward cross, at least."""
    near, far = (
        simulate(scenario(tmp_path, "stages across", round_trip=wait)).to_json()["breakdown_s"]
        for wait in ("1 us", "20 ms")
    )
    assert far["bubble warm-up"] - near["bubble warm-up"] >= 0.4 * 10e-3  # the mean over both stages


def test_a_cluster_of_unlike_sites_waits_for_the_slower_one(tmp_path: Path) -> None:
    content = {
        "sites": [
            {"name": "a", "cluster": "dgx-h100", "gpus": 16},
            {"name": "b", "cluster": "dgx-a100", "gpus": 16},
        ],
        "links": [{"source": "a", "target": "b", "bandwidth": "400 Gbit/s", "round_trip": "1 ms"}],
    }
    path = tmp_path / "unlike.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    plain = scenario(tmp_path, "replicas across")
    unlike = Scenario.from_mapping(dict(plain.raw_mapping) | {"cluster": {"path": str(path)}})
    assert simulate(unlike).step_time > 1.1 * simulate(plain).step_time


def test_links_between_sites_carry_the_gradients_of_each_instance(tmp_path: Path) -> None:
    """Gradients in FP32, all-reduced between two instances: each direction carries all of them once."""
    plain = scenario(tmp_path, "instances across", price_per_gb=0.02)
    result_json = simulate(plain).to_json()
    parameters = parameter_count(plain.model)
    west, east = result_json["site_links"]
    assert west["bytes_per_step"] == pytest.approx(east["bytes_per_step"])
    assert west["bytes_per_step"] / parameters == pytest.approx(4.0, rel=0.01)
    assert west["egress_usd_per_step"] == pytest.approx(0.02e-9 * west["bytes_per_step"])
    assert "site_links" not in simulate(scenario(tmp_path, "instances across", sites=1)).to_json()
