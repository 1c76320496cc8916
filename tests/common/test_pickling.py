"""Scenarios and results can be pickled and copied: for other processes, files and caches."""

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
        *({"id": f"g{index}", "kind": "gpu", "node": index} for index in range(2)),
        {"id": "s", "kind": "switch"},
    ],
    "edges": [{"source": f"g{index}", "target": "s", **_EDGE} for index in range(2)],
}
VARIANTS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "recorded": ("cost.record=published/h100-sxm-80gb",),
    "shared network": ("cost.network=shared",),
    "forced algorithm": ("cost.collectives.all_reduce=ring",),
    "slow link": ("degradations.links={between: [leaf0.0, spine0.0], bandwidth: 0.5}",),
    "dead NIC": ("degradations.nics={gpu: 3, dead: true}",),
    "mixed": ("cluster.mixed={node: 1, accelerator: h200-sxm-141gb}",),
    "jitter, steps": ("degradations.jitter=3%", "steps=2", "schedule=zb-1p"),
    "order from a file": ("schedule=order.csv",),
    "order from a class": ("schedule=rule:Rule",),
    "fsdp": ("layout={dp: 16, data: fsdp}",),
    "data_parallel": ("cluster.gpus=4", "layout={dp: 4, data: data_parallel}"),
    "graph": ("cluster=graph.json", "layout={dp: 2}", "training.global_batch=4"),
}
MAX_PICKLE_BYTES = 200_000
"""Upper bound of a pickled scenario's size; most take 10 kB, a calibration record more."""


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS)
def scenario(request: pytest.FixtureRequest, tmp_path: Path) -> Scenario:
    (tmp_path / "order.csv").write_text(format_order(ZeroBubbleV().order(2, 4)))
    (tmp_path / "rule.py").write_text("from clustersim.schedules.zero_bubble_v import ZeroBubbleV as Rule\n")
    (tmp_path / "graph.json").write_text(json.dumps(GRAPH))
    (tmp_path / "plan.json").write_text(json.dumps(MAPPING))
    return Scenario.load(tmp_path / "plan.json", request.param)


def same_report(left: RenderedResult, right: RenderedResult) -> bool:
    return {**left.to_json(), "simulate_wall_s": 0} == {**right.to_json(), "simulate_wall_s": 0}


def test_a_scenario_survives_pickling_and_copying(scenario: Scenario) -> None:
    simulate(scenario)  # values cached by its fabric meanwhile are not pickled
    pickled = pickle.dumps(scenario)
    unpickled = pickle.loads(pickled)
    assert unpickled == scenario
    assert copy.deepcopy(scenario) == scenario
    assert len(pickled) < MAX_PICKLE_BYTES
    assert unpickled.to_mapping() == scenario.to_mapping()
    assert unpickled.with_overrides("steps=3") == scenario.with_overrides("steps=3")
    assert unpickled != scenario.with_overrides("steps=3")


def test_a_pickled_result_gives_the_same_report(scenario: Scenario) -> None:
    result = simulate(scenario)
    for restored in (pickle.loads(pickle.dumps(result)), copy.deepcopy(result)):
        assert restored.to_json() == result.to_json()
        operations, restored_operations = result.operation_spans(0), restored.operation_spans(0)
        assert np.array_equal(operations.start, restored_operations.start)
        assert np.array_equal(operations.end, restored_operations.end)


def test_a_pickled_result_renders_the_same_page() -> None:
    result = simulate(Scenario.from_mapping(MAPPING))
    assert pickle.loads(pickle.dumps(result)).to_html() == result.to_html()


def test_a_scenario_can_be_simulated_in_a_spawned_process() -> None:
    """A spawned process shares nothing with this one, not even the hash seed of strings."""
    scenarios = [Scenario.from_mapping(MAPPING, VARIANTS[name]) for name in ("plain", "dead NIC", "shared network")]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        results = list(pool.map(simulate, scenarios))
    for scenario, result in zip(scenarios, results, strict=True):
        assert result.scenario == scenario
        assert same_report(result, simulate(scenario))
