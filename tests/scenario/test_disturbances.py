"""What a file says of slow GPUs, jitter, links and mixed accelerators, and how it is refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from clustersim.cost.jitter import Distribution, Jitter
from clustersim.hardware.cluster import load_cluster
from clustersim.hardware.topology import LINK_KINDS, LinkKind
from clustersim.scenario import Scenario

Refusal = Callable[..., str]
Mapping = dict[str, Any]


def parts(scenario: Scenario) -> dict[tuple[str, str], float]:
    """What is left of each link of the scenario's cluster, where that is not all."""
    fabric, healthy = scenario.cluster.fabric, load_cluster("dgx-h100", scenario.cluster.gpus).fabric
    left = fabric.links.bandwidth / healthy.links.bandwidth
    links = {number: healthy.link(number) for number in np.flatnonzero(left != 1.0).tolist()}
    return {(link.source, link.target): float(left[number]) for number, link in links.items()}


def test_a_file_without_disturbances_has_none(mapping: Mapping) -> None:
    scenario = Scenario.from_mapping(mapping)
    assert (scenario.disturbances.speeds(64) == 1.0).all()
    assert (scenario.jitter, scenario.steps, scenario.cost.interference) == (None, 1, None)
    assert parts(scenario) == {}


def test_a_whole_section_is_read(mapping: Mapping) -> None:
    mapping["disturbances"] = {
        "slow": [{"gpu": 17, "speed": 0.9}, {"nodes": [0, 1], "speed": "50 %"}],
        "jitter": {"std": "2 %", "distribution": "lognormal", "seed": 7},
        "nics": [{"gpu": 12, "bandwidth": 0.5}],
        "links": [
            {"between": ["gpu3", "nvswitch0"], "bandwidth": 0.25},
            {"from": "gpu4", "to": "nvswitch0", "bandwidth": 0.25},
        ],
        "background": {"leaf": 0.3},
    }
    mapping["steps"] = 3
    mapping["cost"] = {"interference": 0.2}
    scenario = Scenario.from_mapping(mapping)
    assert scenario.disturbances.speeds(64).tolist() == [0.5] * 16 + [1.0, 0.9] + [1.0] * 46
    assert scenario.jitter == Jitter(0.02, Distribution.LOGNORMAL, 7)
    assert (scenario.steps, scenario.cost.interference) == (3, 0.2)
    found = parts(scenario)
    leaves = {ends: part for ends, part in found.items() if "spine0.0" in ends}
    assert {round(part, 9) for part in leaves.values()} == {0.7}
    assert len(leaves) == np.count_nonzero(scenario.cluster.fabric.links.kind == LINK_KINDS.index(LinkKind.LEAF))
    assert {ends: part for ends, part in found.items() if ends not in leaves} == {
        ("nic1.4", "leaf0.4"): 0.5,
        ("leaf0.4", "nic1.4"): 0.5,
        ("gpu3", "nvswitch0"): 0.25,
        ("nvswitch0", "gpu3"): 0.25,
        ("gpu4", "nvswitch0"): 0.25,
    }


@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        ({"gpu": 9}, [9]),
        ({"gpus": [9, 8, 9]}, [8, 9]),
        ({"gpus": "8-11"}, [8, 9, 10, 11]),
        ({"gpus": ["0-1", 4, "62-63"]}, [0, 1, 4, 62, 63]),
        ({"node": 7}, range(56, 64)),
        ({"nodes": "0-6", "gpu": 60}, [*range(56), 60]),
    ],
)
def test_gpus_are_named_by_number_range_list_or_node(mapping: Mapping, words: Mapping, gpus: list[int]) -> None:
    mapping["disturbances"] = {"slow": {**words, "speed": 0.5}}
    speeds = Scenario.from_mapping(mapping).disturbances.speeds(64)
    assert np.flatnonzero(speeds == 0.5).tolist() == list(gpus)


@pytest.mark.parametrize("share", ["2 %", "2%", "2.0e0 %", 0.02])
def test_a_share_is_a_number_or_a_percentage_everywhere(mapping: Mapping, share: object) -> None:
    scenario = Scenario.from_mapping(
        {
            **mapping,
            "disturbances": {
                "slow": {"gpu": 0, "speed": share},
                "jitter": share,
                "nics": {"gpu": 0, "bandwidth": share},
                "links": {"between": ["gpu0", "nvswitch0"], "bandwidth": share},
                "background": {"leaf": share},
            },
            "cost": {"interference": share},
        }
    )
    assert scenario.disturbances.speeds(1)[0] == 0.02
    assert scenario.jitter == Jitter(0.02)
    assert scenario.cost.interference == 0.02
    assert scenario.disturbances.background == {LinkKind.LEAF: 0.02}
    assert parts(scenario)["gpu0", "nvswitch0"] == pytest.approx(0.02)
    assert parts(scenario)["nic0.0", "leaf0.0"] == pytest.approx(0.02)


def test_overrides_reach_into_the_section_and_changes_start_from_what_was_written(mapping: Mapping) -> None:
    mapping["disturbances"] = {"jitter": "1 %", "slow": {"gpu": 3, "speed": 0.9}}
    scenario = Scenario.from_mapping(mapping, ["disturbances.jitter.seed=4", "steps=5", "disturbances.slow.speed=0.8"])
    assert (scenario.jitter, scenario.steps) == (Jitter(0.01, seed=4), 5)
    assert scenario.disturbances.speeds(4)[3] == 0.8
    assert scenario.changed("disturbances.jitter=2%").jitter == Jitter(0.02)
    assert scenario.changed("disturbances.jitter=0").jitter is None
    assert scenario.changed("disturbances.jitter=null").jitter is None
    slower = scenario.changed("disturbances.links={between: [leaf0.0, spine0.0], bandwidth: 0.5}")
    again = Scenario.from_mapping(slower.to_mapping())
    assert (again.disturbances, again.cluster, again.jitter) == (slower.disturbances, slower.cluster, slower.jitter)
    assert parts(slower)["leaf0.0", "spine0.0"] == 0.5


def test_nodes_may_have_other_accelerators(mapping: Mapping) -> None:
    mapping["cluster"] = {**mapping["cluster"], "mixed": [{"nodes": "6-7", "accelerator": "a100-sxm-80gb"}]}
    kinds, kind = Scenario.from_mapping(mapping).cluster.kinds()
    assert [each.name for each in kinds] == ["h100-sxm-80gb", "a100-sxm-80gb"]
    assert kind.tolist() == [0] * 48 + [1] * 16


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("slow={gpu: 64, speed: 0.9}", "slow.0: there is no GPU 64; GPUs are 0 to 63"),
        ("slow=[{gpu: 1, speed: 0.9}, {node: 8, speed: 0.9}]", "slow.1: there is no node 8; nodes are 0 to 7"),
        ("slow={gpu: -1, speed: 0.9}", "slow.gpu: -1 is neither a number from 0 up nor a range such as 8-15"),
        ("slow={gpus: 9-8, speed: 0.9}", "slow.gpus: '9-8' is neither a number from 0 up nor a range"),
        ("slow={gpus: [], speed: 0.9}", "slow.gpus: is empty"),
        ("slow={speed: 0.9}", "slow: names no GPU; write gpu: 17, gpus: 8-15, node: 3 or nodes: [3, 4]"),
        ("slow={gpu: 1}", "slow.speed: is missing"),
        ("slow=[{gpu: 1, speed: 0}]", "slow.0.speed: 0 is not between 0.001 and 10"),
        ("slow=[{gpu: 1, speed: -90 %}]", "slow.0.speed: '-90 %' is not between 0.001 and 10"),
        ("slow=[{gpu: 1, speed: 0.9, sped: 0.9}]", "slow.0.sped: unknown key; did you mean speed?"),
        ("slow={gpu: 1, speed: .nan}", "slow.speed: nan is not between 0.001 and 10"),
        ("slow={gpu: 1, speed: fast}", "slow.speed: 'fast' is not a share; write a number or a percentage"),
        ("slow=17", "slow: 17 is not a list"),
        ("jitter=20%", "jitter: normal jitter of 0.2 would make a duration negative; at most 10% fits, or {std: 0.2, "),
        ("jitter=-1%", "jitter: '-1%' is not between 0 and 10"),
        ("jitter={std: 0.2, distribution: lognorm}", "jitter.distribution: 'lognorm' is unknown; did you mean lognorm"),
        ("jitter.seed=3", "jitter.std: is missing"),
        ("jitter={std: 0.01, seed: -1}", "jitter.seed: -1 is too small; the smallest legal value is 0"),
        ("nics={gpu: 64, bandwidth: 0.5}", "nics.0: there is no GPU 64"),
        ("nics={gpu: 6, bandwidth: 1000}", "nics.bandwidth: 1,000 is not between 0.001 and 100"),
        ("links={between: [leaf0.0, spine0.9], dead: true}", "links.0: there is no spine0.9; there are spine0.0"),
        ("links={between: [leaf0.0], dead: true}", "links: between is ['leaf0.0'], not the two ends of a link"),
        (
            "links={from: leaf0.0, dead: true}",
            "links: names no link; write between: [leaf0.0, spine0.0], or from and to",
        ),
        ("links={between: [leaf0.0, spine0.0]}", "links: needs bandwidth (the part that is left) or dead: true"),
        ("links={between: [a, b], from: a, dead: true}", "links: has both between and from or to; keep one"),
        ("links={between: [gpu0, nvswitch0], bandwidth: 0}", "links.bandwidth: 0 is not between 0.001 and 100; write"),
        ("links={between: [gpu0, nvswitch0], dead: false}", "links.dead: false is what links are anyway"),
        ("links={between: [gpu0, nvswitch0], dead: 2}", "links.0: it is a single link, of which 2 cannot be dead"),
        ("background.leaf=1", "background.leaf: 1 is not between 0 and 0.99"),
        ("background.core=0.1", "background.core: unknown key; choose one of leaf, nic, spine"),
        ("background.spine=0.1", "background.spine: this cluster has no such links; it has nic, leaf"),
    ],
)
def test_what_cannot_be_is_refused_with_what_could(refusal: Refusal, override: str, sentence: str) -> None:
    refused = refusal(f"disturbances.{override}")
    assert refused.startswith(f"plan.yaml: disturbances.{sentence}"), refused
    assert "\n" not in refused


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "cluster.mixed={node: 8, accelerator: h200-sxm-141gb}",
            "cluster.mixed.0: there is no node 8; nodes are 0 to",
        ),
        ("cluster.mixed={accelerator: h200-sxm-141gb}", "cluster.mixed: names no node; write node: 3, or nodes: 0-7"),
        ("cluster.mixed={node: 3}", "cluster.mixed.accelerator: is missing"),
        (
            "cluster.mixed={node: 3, accelerator: h200}",
            "cluster.mixed.0.accelerator: there is no accelerator 'h200'",
        ),
        (
            "cluster.mixed=[{nodes: 0-3, accelerator: h200-sxm-141gb}, {node: 3, accelerator: a100-sxm-80gb}]",
            "cluster.mixed.1: node 3 has another accelerator already",
        ),
        ("cluster.mixed={node: 3, accelerator: v100-sxm-32gb}", "training.precision: v100-sxm-32gb has no bf16 peak"),
        ("steps=0", "steps: 0 is too small; the smallest legal value is 1"),
        ("steps=9999", "steps: 9,999 of 32 passes each are 319,968 passes; 131,072 are the most, so 4,096 steps fit"),
        ("steps=1000000", "steps: 1,000,000 is too large; the largest legal value is 10,000"),
        ("cost.interference=-0.1", "cost.interference: -0.1 is not between 0 and 10"),
    ],
)
def test_other_new_keys_are_refused_in_the_same_way(refusal: Refusal, override: str, sentence: str) -> None:
    assert refusal(override).startswith(f"plan.yaml: {sentence}")


def test_a_change_that_cuts_gpus_off_names_the_link_and_the_gpus(refusal: Refusal) -> None:
    """A rack of 16 nodes has one leaf, and a bundle of 64 links up."""
    racks = ["cluster=llama3-roce", "cluster.gpus=512", "layout.dp=64"]
    ends = "[leaf1.0, spine0.0]"
    sentence = refusal(*racks, f"disturbances.links={{between: {ends}, dead: 10000}}")
    members = int(sentence.split("a bundle of ")[1].split()[0])
    sentence = refusal(*racks, f"disturbances.links={{between: {ends}, dead: {members}}}")
    assert "plan.yaml: disturbances.links.0: without the link between leaf1.0 and spine0.0, GPUs 0-" in sentence
    assert " cannot reach GPUs " in sentence


def test_mistakes_of_all_parts_are_listed_together(refusal: Refusal) -> None:
    sentence = refusal("cluster.mixed={node: 99, accelerator: h200}", "disturbances.slow={gpu: 99, speed: 0.5}")
    assert "2 problems" in sentence
    assert "cluster.mixed.0: there is no node 99" in sentence
    assert "disturbances.slow.0: there is no GPU 99" in sentence


def test_disturbances_that_no_transfer_meets_are_warned_of(mapping: Mapping) -> None:
    mapping |= {"cluster": {"name": "dgx-h100", "gpus": 8}, "layout": {"tp": 4, "dp": 2}}
    mapping["disturbances"] = {
        "nics": {"gpu": 3, "bandwidth": 0.5},
        "links": [
            {"between": ["leaf0.0", "spine0.0"], "bandwidth": 0.5},
            {"between": ["gpu0", "nvswitch0"], "bandwidth": 0.5},
        ],
        "background": {"leaf": 0.5},
    }
    found = [warning for warning in Scenario.from_mapping(mapping).warnings if "changes nothing" in warning]
    assert [warning.split()[0] for warning in found] == [
        "disturbances.background.leaf",
        "disturbances.nics",
        "disturbances.links.0",
    ]
    assert found[1].endswith("no transfer leaves the nvlink tier")
    mapping["disturbances"]["links"] = {"between": ["gpu0", "nvswitch0"], "dead": True}  # GPU 0 uses its NIC now
    assert not any("changes nothing" in warning for warning in Scenario.from_mapping(mapping).warnings)
