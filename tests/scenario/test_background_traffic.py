"""Background traffic and temporarily degraded links in a scenario file; error messages."""

import pickle
from math import inf
from typing import Any

import pytest

from clustersim import Scenario, simulate
from clustersim.common.errors import InputError
from clustersim.cost.background_traffic import TrafficPattern
from clustersim.program.task import CollectiveType

BASE_MAPPING: dict[str, Any] = {
    "model": "llama-tiny",
    "cluster": {"name": "dgx-h100", "gpus": 16},
    "layout": {"tp": 8, "dp": 2},
    "training": {"sequence": 512, "global_batch": 2},
}
SLOW_LINK = {"between": ["nic0.0", "leaf0.0"], "bandwidth": "50 %"}


def load_scenario(cost: dict[str, Any] | None = None, **degradations: Any) -> Scenario:
    return Scenario.from_mapping({**BASE_MAPPING, "cost": cost or {}, "degradations": degradations})


def test_traffic_defaults_and_single_entry() -> None:
    scenario = load_scenario(traffic={"gpus": [8, 0], "bytes": "1 MB"})
    assert scenario.background_traffic == (TrafficPattern((8, 0), CollectiveType.SEND_RECV, 1e6, 0.0, inf, inf),)
    assert pickle.loads(pickle.dumps(scenario)) == scenario
    assert Scenario.from_mapping(scenario.to_mapping()) == scenario
    repetition = {"start": "1 ms", "every": "2 ms", "until": "1 s"}
    (traffic,) = load_scenario(
        traffic=[{"gpus": "0-3", "collective": "all_gather", "bytes": "1 MB", **repetition}]
    ).background_traffic
    assert (traffic.gpu_ids, traffic.collective) == ((0, 1, 2, 3), CollectiveType.ALL_GATHER)
    assert (traffic.start_seconds, traffic.period_seconds, traffic.end_seconds) == pytest.approx((1e-3, 2e-3, 1.0))


def test_timed_link_degradation_keeps_the_fabric() -> None:
    scenario = load_scenario(links={**SLOW_LINK, "during": ["10 ms", "40 ms"]})
    (change,) = scenario.degradations.links
    assert change.active_period == pytest.approx((0.01, 0.04))
    assert scenario.cluster.fabric == load_scenario().cluster.fabric
    assert not scenario.degradations.affects_network


@pytest.mark.parametrize(
    ("degradations", "sentence"),
    [
        ({"traffic": {"gpus": [0, 8, 9], "bytes": "1 MB"}}, "names 3 GPUs; a message needs two"),
        ({"traffic": {"gpus": 3, "collective": "all_reduce", "bytes": "1 MB"}}, "names 1 GPU; a message needs two"),
        ({"traffic": {"gpus": [0, 16], "bytes": "1 MB"}}, "traffic.0: there is no GPU 16; GPUs are 0 to 15"),
        ({"traffic": {"gpus": [3, 3], "bytes": "1 MB"}}, "traffic.0: a GPU comes twice in 2; keep one"),
        ({"traffic": {"gpus": [0, 8], "bytes": "1 MB", "every": "0 s"}}, "every: 0 would never end"),
        ({"traffic": {"gpus": [0, 8], "bytes": 5}}, "5 has no unit"),
        ({"traffic": {"gpus": [0, 8], "bytes": "1 MB", "collective": "dispatch"}}, "'dispatch' is unknown"),
        ({"links": {**SLOW_LINK, "during": ["2 s", "1 s"]}}, "ends before it begins"),
        ({"links": {**SLOW_LINK, "during": "2 s"}}, "'2 s' is not a pair of times such as"),
        ({"links": {**SLOW_LINK, "during": ["1 s", 2]}}, "2 has no unit"),
        (
            {"links": {"between": SLOW_LINK["between"], "dead": True, "during": ["1 s", "2 s"]}},
            "dead and during.*routes do not change",
        ),
        ({"links": [{**SLOW_LINK, "during": ["0 s", "1 s"]}] * 2}, "is in links.0 already; keep one"),
        ({"links": {**SLOW_LINK, "between": ["nic0.0", "leaf0.1"], "during": ["0 s", "1 s"]}}, "no link leads from"),
    ],
)
def test_invalid_traffic_has_a_one_line_error(degradations: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as refused:
        load_scenario(**degradations)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("key", "degradations"),
    [
        ("traffic", {"traffic": {"gpus": [0, 8], "bytes": "1 MB"}}),
        ("links.during", {"links": {**SLOW_LINK, "during": ["0 s", "1 s"]}}),
    ],
)
def test_traffic_needs_a_shared_network(key: str, degradations: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=rf"degradations\.{key}:.*cost\.network uncontended"):
        load_scenario({"network": "uncontended"}, **degradations)


def test_nccl_restrictions_do_not_apply_to_background_traffic() -> None:
    scenario = Scenario.from_mapping(
        {
            **BASE_MAPPING,
            "cost": {"nccl": {"NCCL_ALGO": "allreduce:ring"}},
            "degradations": {"traffic": {"gpus": [0, 8], "bytes": "1 MB", "collective": "broadcast"}},
        }
    )
    assert (
        simulate(scenario).step_time > 0.0
    )  # background traffic uses the library's default selection, not this job's overrides


def test_result_describes_background_traffic() -> None:
    from clustersim.report.labels import describe_degradations

    scenario = load_scenario(
        traffic={"gpus": [0, 8], "bytes": "1 MB", "every": "2 ms"}, links={**SLOW_LINK, "during": ["10 ms", "40 ms"]}
    )
    description = describe_degradations(scenario)
    assert "link nic0.0 - leaf0.0 at 50 % from 10 ms to 40 ms" in description
    assert "others' send_recv of 976.6 KiB among 2 GPUs every 2 ms" in description
    assert not any(
        "all GPUs and links are healthy" in limitation for limitation in simulate(scenario).model_limitations
    )
