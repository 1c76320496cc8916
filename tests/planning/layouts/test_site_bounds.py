"""Lower bounds of steps over several sites, and searches of local training: what brute force finds."""

from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st

from clustersim.common.errors import InputError
from clustersim.planning.layouts import LayoutSearch, SearchSpace
from clustersim.planning.layouts.bounds import step_lower_bound
from clustersim.planning.layouts.objective import Objective
from clustersim.planning.layouts.site_bounds import PassSeconds, longest_path
from clustersim.reliability.local_training import LocalTraining
from clustersim.scenario import Scenario
from clustersim.schedules.one_f_one_b import OneFOneB
from clustersim.simulation import simulate
from tests.conftest import examples

LAYOUTS: dict[str, list[str]] = {
    "layout.tp": ["1", "2", "8"],
    "layout.pp": ["1", "2", "4"],
    "layout.order": ["[tp, cp, dp, pp]", "[tp, cp, pp, dp]"],
    "schedule": ["1f1b", "gpipe", "{interleaved: {chunks: 2}}"],
    "layout.data": ["ddp", "zero1", "zero2", "{zero: {stage: 1, shard: 2}}", "{zero: {stage: 1, shard: 4}}"],
    "training.microbatch": ["1", "2"],
}
OVERRIDES = st.fixed_dictionaries({key: st.sampled_from(values) for key, values in LAYOUTS.items()})


def scenario(folder: Path, sites: int = 2, bandwidth: str = "200 Gbit/s", **keys: Any) -> Scenario:
    """Nodes of eight in sites that are 10 ms apart."""
    names = [f"s{index}" for index in range(sites)]
    links = [
        {"source": source, "target": target, "bandwidth": bandwidth, "round_trip": "10 ms"}
        for source, target in pairwise(names)
    ]
    content = {"sites": [{"name": name, "cluster": "dgx-h100", "gpus": 16} for name in names], "links": links}
    path = folder / f"{sites}.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    mapping: dict[str, Any] = {
        "model": {"preset": "llama3-8b", "layers": 8},
        "cluster": {"path": str(path)},
        "layout": {"tp": 4, "dp": sites * 4, "data": "zero1"},
        "training": {"sequence": 2048, "global_batch": 64, "precision": "bf16"},
        "framework": "megatron",
    }
    return Scenario.from_mapping(mapping | keys)


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(OVERRIDES, st.sampled_from([2, 4]), st.sampled_from(["5 Gbit/s", "200 Gbit/s", "10 Tbit/s"]))
def test_no_step_over_sites_is_shorter_than_its_bound(
    tmp_path: Path, overrides: dict[str, str], sites: int, bandwidth: str
) -> None:
    dp = sites * 16 // (int(overrides["layout.tp"]) * int(overrides["layout.pp"]))
    texts = [f"{key}={value}" for key, value in overrides.items()]
    try:
        changed = scenario(tmp_path, sites, bandwidth).with_overrides(*texts, f"layout.dp={dp}")
    except InputError:
        assume(False)
    assert step_lower_bound(changed).seconds <= simulate(changed).step_time


def test_the_longest_path_of_two_stages_waits_for_each_message() -> None:
    """Two microbatches, forwards of 1 s, backwards of 2 s, messages of 10 s: F0 there, B0 back, then B1 back."""
    passes = PassSeconds(np.array([1.0, 1.0]), np.array([2.0, 2.0]))
    order = OneFOneB().order(2, 2)
    assert longest_path(order, passes, np.array([10.0, 0.0]), blocks=False) == pytest.approx(
        1 + 10 + 1 + 2 + 1 + 2 + 10 + 2
    )
    assert longest_path(order, passes, np.array([0.0, 0.0]), blocks=False) == pytest.approx(3 * 3)


LOCAL: dict[str, Any] = {"diloco": {"inner_steps": 20}}
VARY = {"layout.tp": ["4", "8"], "diloco.inner_steps": ["10", "50"], "diloco.outer_gradients": ["fp32", "int8"]}
FIX = {
    **dict.fromkeys(("layout.cp", "layout.pp", "training.microbatch"), "1"),
    "schedule": "1f1b",
    "layout.data": "zero1",
    "training.recompute": "none",
    "layout.sequence_parallel": "true",
    "diloco.fragments": "1",
    "diloco.overlap": "0",
}


def test_a_search_of_local_training_finds_what_brute_force_finds(tmp_path: Path) -> None:
    """Two layouts with four settings each; the time of a round by its inner steps."""
    plan = scenario(tmp_path, bandwidth="10 Gbit/s", **LOCAL)
    result = LayoutSearch(SearchSpace.from_scenario(plan, FIX, VARY), top=8, sensitivity=False).run()
    brute_force = []
    for tp, inner_steps, outer_format in product(*VARY.values()):
        overrides = [f"layout.tp={tp}", f"layout.dp={32 // int(tp)}", "layout.sequence_parallel=true"]
        training = LocalTraining(
            plan.with_overrides(
                *overrides, f"diloco.inner_steps={inner_steps}", f"diloco.outer_gradients={outer_format}"
            )
        )
        assert training.scenario.diloco is not None
        brute_force.append(training.rounds(training.scenario.diloco).round_seconds / int(inner_steps))
    assert [layout.step_time for layout in result.simulated] == pytest.approx(sorted(brute_force))
    assert result.variant_count == 4
    assert "arXiv:2503.09799" in result.to_json()["convergence"]


def test_of_tied_settings_the_fewest_inner_steps_are_recommended(tmp_path: Path) -> None:
    """Links that cost nothing: more inner steps gain nothing, nor do fewer bits."""
    plan = scenario(tmp_path, bandwidth="1000 Tbit/s", **LOCAL)
    vary = {"diloco.inner_steps": ["1000", "2000", "4000"], "diloco.outer_gradients": ["int8", "fp32"]}
    result = LayoutSearch(SearchSpace.from_scenario(plan, FIX | {"layout.tp": "4"}, vary), sensitivity=False).run()
    chosen = dict(override.split("=") for override in result.recommended.overrides)
    assert (chosen["diloco.inner_steps"], chosen["diloco.outer_gradients"]) == ("1000", "fp32")


@pytest.mark.parametrize("objective", [Objective.ENERGY, Objective.DAYS, Objective.RUN_COST])
def test_objectives_that_rounds_do_not_have_are_refused(tmp_path: Path, objective: Objective) -> None:
    space = SearchSpace.from_scenario(scenario(tmp_path, **LOCAL), FIX | {"layout.tp": "4"})
    with pytest.raises(InputError, match="step-time, tokens-per-gpu, cost"):
        LayoutSearch(space, objective=objective).run()


@pytest.mark.parametrize(
    ("vary", "sentence"),
    [
        ({"diloco.outer_gradients": ["fp5"]}, "fp5"),
        ({"diloco.inner_steps": ["0"]}, "inner_steps"),
        ({"diloco.overlap": ["9"], "diloco.inner_steps": ["5"]}, "no combination of these values"),
    ],
)
def test_mistaken_settings_of_local_training_are_named(
    tmp_path: Path, vary: dict[str, list[str]], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        SearchSpace.from_scenario(scenario(tmp_path, **LOCAL), {"layout.tp": "4"}, vary)


def test_settings_of_local_training_need_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"diloco.inner_steps: the scenario trains in step"):
        SearchSpace.from_scenario(scenario(tmp_path), {}, {"diloco.inner_steps": ["10"]})
