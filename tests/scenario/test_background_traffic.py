"""What a scenario says of others' traffic and of links that are slow for a while, and what it may not say."""

import pickle
from math import inf
from typing import Any

import pytest

from clustersim import Scenario, simulate
from clustersim.common.errors import InputError
from clustersim.cost.background_traffic import TrafficPattern
from clustersim.program.task import CollectiveType

GIVEN: dict[str, Any] = {
    "model": "llama-tiny",
    "cluster": {"name": "dgx-h100", "gpus": 16},
    "layout": {"tp": 8, "dp": 2},
    "training": {"sequence": 512, "global_batch": 2},
}
SLOW = {"between": ["nic0.0", "leaf0.0"], "bandwidth": "50 %"}


def read(cost: dict[str, Any] | None = None, **disturbances: Any) -> Scenario:
    return Scenario.from_mapping({**GIVEN, "cost": cost or {}, "disturbances": disturbances})


def test_one_entry_may_stand_alone_and_begins_at_once_and_once() -> None:
    scenario = read(traffic={"gpus": [8, 0], "bytes": "1 MB"})
    assert scenario.background_traffic == (TrafficPattern((8, 0), CollectiveType.SEND_RECV, 1e6, 0.0, inf, inf),)
    assert pickle.loads(pickle.dumps(scenario)) == scenario
    assert Scenario.from_mapping(scenario.to_mapping()) == scenario
    again = {"start": "1 ms", "every": "2 ms", "until": "1 s"}
    (found,) = read(traffic=[{"gpus": "0-3", "collective": "all_gather", "bytes": "1 MB", **again}]).background_traffic
    assert (found.gpu_ids, found.collective) == ((0, 1, 2, 3), CollectiveType.ALL_GATHER)
    assert (found.start_seconds, found.period_seconds, found.end_seconds) == pytest.approx((1e-3, 2e-3, 1.0))


def test_a_link_is_slow_during_a_time_and_the_fabric_knows_no_time() -> None:
    scenario = read(links={**SLOW, "during": ["10 ms", "40 ms"]})
    (change,) = scenario.degradations.links
    assert change.active_period == pytest.approx((0.01, 0.04))
    assert scenario.cluster.fabric == read().cluster.fabric
    assert not scenario.degradations.affects_network


@pytest.mark.parametrize(
    ("disturbances", "sentence"),
    [
        ({"traffic": {"gpus": [0, 8, 9], "bytes": "1 MB"}}, "names 3 GPUs; a message needs two"),
        ({"traffic": {"gpus": 3, "collective": "all_reduce", "bytes": "1 MB"}}, "names 1 GPU; a message needs two"),
        ({"traffic": {"gpus": [0, 16], "bytes": "1 MB"}}, "traffic.0: there is no GPU 16; GPUs are 0 to 15"),
        ({"traffic": {"gpus": [3, 3], "bytes": "1 MB"}}, "traffic.0: a GPU comes twice in 2; keep one"),
        ({"traffic": {"gpus": [0, 8], "bytes": "1 MB", "every": "0 s"}}, "every: 0 would never end"),
        ({"traffic": {"gpus": [0, 8], "bytes": 5}}, "5 has no unit"),
        ({"traffic": {"gpus": [0, 8], "bytes": "1 MB", "collective": "dispatch"}}, "'dispatch' is unknown"),
        ({"links": {**SLOW, "during": ["2 s", "1 s"]}}, "ends before it begins"),
        ({"links": {**SLOW, "during": "2 s"}}, "'2 s' is not a pair of times such as"),
        ({"links": {**SLOW, "during": ["1 s", 2]}}, "2 has no unit"),
        (
            {"links": {"between": SLOW["between"], "dead": True, "during": ["1 s", "2 s"]}},
            "has dead and during, but routes do not change while a step runs",
        ),
        ({"links": [{**SLOW, "during": ["0 s", "1 s"]}] * 2}, "is in links.0 already; keep one"),
        ({"links": {**SLOW, "between": ["nic0.0", "leaf0.1"], "during": ["0 s", "1 s"]}}, "no link leads from"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(disturbances: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as refused:
        read(**disturbances)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("key", "disturbances"),
    [
        ("traffic", {"traffic": {"gpus": [0, 8], "bytes": "1 MB"}}),
        ("links.during", {"links": {**SLOW, "during": ["0 s", "1 s"]}}),
    ],
)
def test_links_must_be_shared_for_others_to_be_on_them(key: str, disturbances: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"disturbances.{key}: links are not shared with cost.network uncontended"):
        read({"network": "uncontended"}, **disturbances)


def test_what_the_library_cannot_do_is_said_with_its_entry() -> None:
    scenario = Scenario.from_mapping(
        {
            **GIVEN,
            "cost": {"nccl": {"NCCL_ALGO": "allreduce:ring"}},
            "disturbances": {"traffic": {"gpus": [0, 8], "bytes": "1 MB", "collective": "broadcast"}},
        }
    )
    assert simulate(scenario).step_time > 0.0  # others choose as their library does, whatever this job tells its own


def test_an_answer_with_traffic_says_so_and_does_not_say_that_all_is_healthy() -> None:
    from clustersim.report.labels import describe_degradations

    beside = read(
        traffic={"gpus": [0, 8], "bytes": "1 MB", "every": "2 ms"}, links={**SLOW, "during": ["10 ms", "40 ms"]}
    )
    words = describe_degradations(beside)
    assert "link nic0.0 - leaf0.0 at 50 % from 10 ms to 40 ms" in words
    assert "others' send_recv of 976.6 KiB among 2 GPUs every 2 ms" in words
    assert not any(
        "all GPUs and links are healthy" in model_limitation for model_limitation in simulate(beside).model_limitations
    )
