"""Scenarios and results travel: to other processes, into files and caches, as copies."""

import copy
import json
import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clustersim import RenderedResult, Scenario, simulate
from clustersim.schedules.csv_format import format_order
from clustersim.schedules.zero_bubble_v import ZeroBubbleV

MAPPING: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "layers": 4},
    "cluster": {"name": "dgx-h100", "gpus": 16},
    "layout": {"tp": 2, "pp": 2, "dp": 4},
    "training": {"sequence": 4096, "global_batch": 16},
}
_EDGE = {"kind": "nic", "bandwidth": "10 GB/s", "latency": "1 us"}
GRAPH = {
    "graph": {"accelerator": "h100-sxm-80gb"},
    "nodes": [
        *({"id": f"g{number}", "kind": "gpu", "node": number} for number in range(2)),
        {"id": "s", "kind": "switch"},
    ],
    "edges": [{"source": f"g{number}", "target": "s", **_EDGE} for number in range(2)],
}
VARIANTS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "recorded": ("cost.record=published/h100-sxm-80gb",),
    "shared network": ("cost.network=shared",),
    "forced algorithm": ("cost.collectives.all_reduce=ring",),
    "slow link": ("disturbances.links={between: [leaf0.0, spine0.0], bandwidth: 0.5}",),
    "dead NIC": ("disturbances.nics={gpu: 3, dead: true}",),
    "mixed": ("cluster.mixed={node: 1, accelerator: h200-sxm-141gb}",),
    "jitter, steps": ("disturbances.jitter=3%", "steps=2", "schedule=zb-1p"),
    "order from a file": ("schedule=order.csv",),
    "order from a class": ("schedule=rule:Rule",),
    "fsdp": ("layout={dp: 16, data: fsdp}",),
    "data_parallel": ("cluster.gpus=4", "layout={dp: 4, data: data_parallel}"),
    "graph": ("cluster=graph.json", "layout={dp: 2}", "training.global_batch=4"),
}
LARGEST = 200_000
"""Bytes of a pickled scenario; most take 10 kB, a record more."""


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS)
def scenario(request: pytest.FixtureRequest, tmp_path: Path) -> Scenario:
    (tmp_path / "order.csv").write_text(format_order(ZeroBubbleV().order(2, 4)))
    (tmp_path / "rule.py").write_text("from clustersim.schedules.zero_bubble_v import ZeroBubbleV as Rule\n")
    (tmp_path / "graph.json").write_text(json.dumps(GRAPH))
    (tmp_path / "plan.json").write_text(json.dumps(MAPPING))
    return Scenario.load(tmp_path / "plan.json", request.param)


def same_answer(one: RenderedResult, other: RenderedResult) -> bool:
    return {**one.to_json(), "simulate_wall_s": 0} == {**other.to_json(), "simulate_wall_s": 0}


def test_a_scenario_is_itself_again(scenario: Scenario) -> None:
    simulate(scenario)  # what its fabric works out meanwhile stays behind
    pickled = pickle.dumps(scenario)
    again = pickle.loads(pickled)
    assert again == scenario
    assert copy.deepcopy(scenario) == scenario
    assert len(pickled) < LARGEST
    assert again.to_mapping() == scenario.to_mapping()
    assert again.changed("steps=3") == scenario.with_overrides("steps=3")
    assert again != scenario.with_overrides("steps=3")


def test_a_result_gives_the_same_answer_again(scenario: Scenario) -> None:
    result = simulate(scenario)
    for again in (pickle.loads(pickle.dumps(result)), copy.deepcopy(result)):
        assert again.to_json() == result.to_json()
        mine, theirs = result.operation_spans(0), again.operation_spans(0)
        assert np.array_equal(mine.start, theirs.start)
        assert np.array_equal(mine.end, theirs.end)


def test_a_result_draws_the_same_page_again() -> None:
    result = simulate(Scenario.from_mapping(MAPPING))
    assert pickle.loads(pickle.dumps(result)).to_html() == result.to_html()


def test_a_scenario_is_simulated_in_a_process_of_its_own_and_the_result_comes_back() -> None:
    """Spawned, the process has nothing in common with this one, not even how words are hashed."""
    scenarios = [Scenario.from_mapping(MAPPING, VARIANTS[name]) for name in ("plain", "dead NIC", "shared network")]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        results = list(pool.map(simulate, scenarios))
    for scenario, result in zip(scenarios, results, strict=True):
        assert result.scenario == scenario
        assert same_answer(result, simulate(scenario))
