"""Runs over several sites, as published: two data centres of NVIDIA, and a node of INTELLECT-1."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from clustersim import Scenario, simulate
from clustersim.reliability.local_training import simulate_local_training
from clustersim.results.outer_rounds import OuterRounds

NEMOTRON: dict[str, Any] = {
    "model": "nemotron4-340b",
    "layout": {
        "tp": 8,
        "pp": 12,
        "dp": 32,
        "order": ["tp", "cp", "pp", "dp"],
        "sequence_parallel": True,
        "data": {"zero": {"stage": 1, "shard": 16}},
    },
    "schedule": {"interleaved": {"chunks": 8}},
    "training": {
        "sequence": 4096,
        "global_batch": 1536,
        "microbatch": 1,
        "precision": "bf16",
        "recompute": "selective",
        "overheads": {"loss_averaging": "step"},
    },
    "framework": "nemo",
}
"""Nemotron-4 340B on 3,072 H100 as its report has it (arXiv:2406.11704, table 2: tp 8, pp 12, interleaved, dp 32, batch
1,536, 10.3 s a step), with one instance of the distributed optimizer in each data centre."""
INTELLECT_1_NODE: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "layers": 42},
    "cluster": {"name": "dgx-h100", "gpus": 8},
    "layout": {"dp": 8, "data": "fsdp"},
    "training": {
        "sequence": 8192,
        "global_batch": 128,
        "microbatch": 1,
        "precision": "bf16",
        "recompute": "full",
        "attention": "flash",
    },
    "framework": {"name": "torchtitan", "torch_compile": True},
}
"""One node of INTELLECT-1 (PrimeIntellect-ai/prime: src/zeroband/models/llama and configs/10B/H100.toml)."""
ROUND_TRIP = "21 ms"
"""Between two regions 1,000 km apart; fibre alone takes 9.8 ms. The link's bandwidth is not published."""


def two_sites(folder: Path, tbit: float, round_trip: str = ROUND_TRIP) -> Scenario:
    content = {
        "sites": [{"name": name, "cluster": "dgx-h100", "gpus": 1536} for name in ("west", "east")],
        "links": [{"source": "west", "target": "east", "bandwidth": f"{tbit} Tbit/s", "round_trip": round_trip}],
    }
    path = folder / "sites.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return Scenario.from_mapping(NEMOTRON | {"cluster": {"path": str(path)}})


@pytest.fixture(scope="module")
def one_site_seconds() -> float:
    return simulate(Scenario.from_mapping(NEMOTRON | {"cluster": {"name": "dgx-h100", "gpus": 3072}})).step_time


def test_one_site_takes_the_published_time(one_site_seconds: float) -> None:
    """Tolerance: half of the mean error of NVIDIA's other dense steps on H100 (dgxc, 6 %)."""
    assert one_site_seconds == pytest.approx(10.3, rel=0.03)


@pytest.mark.parametrize("tbit", [6.4, 12.8])
def test_two_sites_reach_the_published_efficiency(tmp_path: Path, one_site_seconds: float, tbit: float) -> None:
    """96 % of one site (NVIDIA's blog of 2025-05 on NeMo 25.02 and Megatron-Core 0.11).

    First error: 14 points too low, because NeMo's file averages the loss after each of 48 microbatches over both sites,
    42 ms each; with the average once a step, as here, 1 to 2 points without anything set.
    """
    efficiency = one_site_seconds / simulate(two_sites(tmp_path, tbit)).step_time
    assert efficiency == pytest.approx(0.96, abs=0.02)


def test_two_sites_a_microsecond_apart_are_one(tmp_path: Path, one_site_seconds: float) -> None:
    assert simulate(two_sites(tmp_path, 1e4, "1 us")).step_time == pytest.approx(one_site_seconds, rel=1e-4)


def test_the_inner_step_of_intellect_1() -> None:
    """38 minutes for 100 steps of 128 sequences of 8,192 tokens on 8 H100 (arXiv:2412.01152, table 2).

    The model is Llama 3 with 42 layers of 4,096 (PrimeIntellect-ai/prime: src/zeroband/models/llama and
    configs/10B/H100.toml: micro_bs 1, ac_ckpt, FSDP2, compiled). First prediction, nothing set: 22.05 s for 22.8 s.
    """
    step = simulate(Scenario.from_mapping(INTELLECT_1_NODE)).step_time
    assert step == pytest.approx(22.8, rel=0.06)


def intellect_1(folder: Path, gbit: float) -> OuterRounds:
    """14 nodes in a ring of internet links, as PRIME orders them; int8, the outer optimizer on the host."""
    nodes = [f"node{index}" for index in range(14)]
    content = {
        "sites": [{"name": name, "cluster": "dgx-h100", "gpus": 8} for name in nodes],
        "links": [
            {"source": source, "target": target, "bandwidth": f"{gbit} Gbit/s", "round_trip": "60 ms"}
            for source, target in zip(nodes, nodes[1:] + nodes[:1], strict=True)
        ],
    }
    path = folder / "nodes.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    mapping = INTELLECT_1_NODE | {
        "cluster": {"path": str(path)},
        "layout": {"dp": 112, "data": "fsdp"},
        "training": INTELLECT_1_NODE["training"] | {"global_batch": 14 * 128},
        "diloco": {"inner_steps": 100, "outer_gradients": "int8", "offload": True},
    }
    return simulate_local_training(Scenario.from_mapping(mapping))


def test_the_all_reduce_of_intellect_1_is_within_what_its_links_had(tmp_path: Path) -> None:
    """Links of 0.5 to 4 Gbit/s, 103 s and 95.7 % within the USA (arXiv:2412.01152, section 3 and table 2)."""
    slowest, fastest = intellect_1(tmp_path, 0.5), intellect_1(tmp_path, 4.0)
    assert fastest.exposed_seconds < 103.0 < slowest.exposed_seconds
    assert slowest.utilization < 0.957 < fastest.utilization
