"""Degradations in a scenario file: slow GPUs, jitter, links and mixed accelerators; error messages."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clustersim.cost.jitter import Distribution, Jitter
from clustersim.hardware.cluster import load_cluster
from clustersim.hardware.topology import LINK_KINDS, LinkKind
from clustersim.scenario import Scenario
from tests.sentences import parts

Refusal = Callable[..., str]
Mapping = dict[str, Any]


def bandwidth_fractions(scenario: Scenario) -> dict[tuple[str, str], float]:
    """Remaining bandwidth fraction of each degraded link of the scenario's cluster, by (source, target)."""
    fabric, healthy = scenario.cluster.fabric, load_cluster("dgx-h100", scenario.cluster.gpu_count).fabric
    fraction = fabric.links.bandwidth / healthy.links.bandwidth
    links = {link_index: healthy.link_info(link_index) for link_index in np.flatnonzero(fraction != 1.0).tolist()}
    return {(link.source, link.target): float(fraction[link_index]) for link_index, link in links.items()}


def test_no_degradations_by_default(mapping: Mapping) -> None:
    scenario = Scenario.from_mapping(mapping)
    assert (scenario.degradations.gpu_speeds(np.arange(64)) == 1.0).all()
    assert (scenario.jitter, scenario.steps, scenario.cost.interference) == (None, 1, None)
    assert bandwidth_fractions(scenario) == {}


def test_full_degradation_section_is_read(mapping: Mapping) -> None:
    mapping["degradations"] = {
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
    assert scenario.degradations.gpu_speeds(np.arange(64)).tolist() == [0.5] * 16 + [1.0, 0.9] + [1.0] * 46
    assert scenario.jitter == Jitter(0.02, Distribution.LOGNORMAL, 7)
    assert (scenario.steps, scenario.cost.interference) == (3, 0.2)
    fractions = bandwidth_fractions(scenario)
    leaves = {ends: fraction for ends, fraction in fractions.items() if "spine0.0" in ends}
    assert {round(fraction, 9) for fraction in leaves.values()} == {0.7}
    assert len(leaves) == np.count_nonzero(scenario.cluster.fabric.links.kind == LINK_KINDS.index(LinkKind.LEAF))
    assert {ends: fraction for ends, fraction in fractions.items() if ends not in leaves} == {
        ("nic1.4", "leaf0.4"): 0.5,
        ("leaf0.4", "nic1.4"): 0.5,
        ("gpu3", "nvswitch0"): 0.25,
        ("nvswitch0", "gpu3"): 0.25,
        ("gpu4", "nvswitch0"): 0.25,
    }


@pytest.mark.parametrize(
    ("gpu_selection", "gpus"),
    [
        ({"gpu": 9}, [9]),
        ({"gpus": [9, 8, 9]}, [8, 9]),
        ({"gpus": "8-11"}, [8, 9, 10, 11]),
        ({"gpus": ["0-1", 4, "62-63"]}, [0, 1, 4, 62, 63]),
        ({"node": 7}, range(56, 64)),
        ({"nodes": "0-6", "gpu": 60}, [*range(56), 60]),
    ],
)
def test_gpus_are_selected_by_id_range_list_or_node(mapping: Mapping, gpu_selection: Mapping, gpus: list[int]) -> None:
    mapping["degradations"] = {"slow": {**gpu_selection, "speed": 0.5}}
    speeds = Scenario.from_mapping(mapping).degradations.gpu_speeds(np.arange(64))
    assert np.flatnonzero(speeds == 0.5).tolist() == list(gpus)


@pytest.mark.parametrize("share", ["2 %", "2%", "2.0e0 %", 0.02])
def test_fractions_accept_numbers_and_percentages(mapping: Mapping, share: object) -> None:
    scenario = Scenario.from_mapping(
        {
            **mapping,
            "degradations": {
                "slow": {"gpu": 0, "speed": share},
                "jitter": share,
                "nics": {"gpu": 0, "bandwidth": share},
                "links": {"between": ["gpu0", "nvswitch0"], "bandwidth": share},
                "background": {"leaf": share},
            },
            "cost": {"interference": share},
        }
    )
    assert scenario.degradations.gpu_speeds(np.arange(1))[0] == 0.02
    assert scenario.jitter == Jitter(0.02)
    assert scenario.cost.interference == 0.02
    assert scenario.degradations.background_load == {LinkKind.LEAF: 0.02}
    assert bandwidth_fractions(scenario)["gpu0", "nvswitch0"] == pytest.approx(0.02)
    assert bandwidth_fractions(scenario)["nic0.0", "leaf0.0"] == pytest.approx(0.02)


def test_degradation_overrides_and_changes(mapping: Mapping) -> None:
    mapping["degradations"] = {"jitter": "1 %", "slow": {"gpu": 3, "speed": 0.9}}
    scenario = Scenario.from_mapping(mapping, ["degradations.jitter.seed=4", "steps=5", "degradations.slow.speed=0.8"])
    assert (scenario.jitter, scenario.steps) == (Jitter(0.01, seed=4), 5)
    assert scenario.degradations.gpu_speeds(np.arange(4))[3] == 0.8
    assert scenario.with_overrides("degradations.jitter=2%").jitter == Jitter(0.02)
    assert scenario.with_overrides("degradations.jitter=0").jitter is None
    assert scenario.with_overrides("degradations.jitter=null").jitter is None
    slower = scenario.with_overrides("degradations.links={between: [leaf0.0, spine0.0], bandwidth: 0.5}")
    reread = Scenario.from_mapping(slower.to_mapping())
    assert (reread.degradations, reread.cluster, reread.jitter) == (slower.degradations, slower.cluster, slower.jitter)
    assert bandwidth_fractions(slower)["leaf0.0", "spine0.0"] == 0.5


def test_nodes_may_have_other_accelerators(mapping: Mapping) -> None:
    mapping["cluster"] = {**mapping["cluster"], "mixed": [{"nodes": "6-7", "accelerator": "a100-sxm-80gb"}]}
    kinds, kind = Scenario.from_mapping(mapping).cluster.accelerator_kinds()
    assert [accelerator.name for accelerator in kinds] == ["h100-sxm-80gb", "a100-sxm-80gb"]
    assert kind.tolist() == [0] * 48 + [1] * 16


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("slow={gpu: 64, speed: 0.9}", "slow.0: there is no GPU 64; GPUs are 0 to 63"),
        ("slow=[{gpu: 1, speed: 0.9}, {node: 8, speed: 0.9}]", "slow.1: there is no node 8; nodes are 0 to 7"),
        ("slow={gpu: -1, speed: 0.9}", "slow.0.gpu: -1 ... number from 0 ... 8-15"),
        ("slow={gpus: 9-8, speed: 0.9}", "slow.0.gpus: '9-8' is backwards; write 8-9"),
        ("slow={gpus: [], speed: 0.9}", "slow.0.gpus: is empty"),
        ("slow={speed: 0.9}", "slow.0: names no GPU; write gpu: 17, gpus: 8-15, node: 3 or nodes: [3, 4]"),
        ("slow={gpu: 1}", "slow.0.speed: is missing; write speed: 0.9"),
        ("slow=[{gpu: 1, speed: 0}]", "slow.0.speed: 0 is not between 0.001 and 1"),
        ("slow=[{gpu: 1, speed: -90 %}]", "slow.0.speed: '-90 %' is not between 0.1 % and 1000 %"),
        ("slow=[{gpu: 1, speed: 0.9, sped: 0.9}]", "slow.0.sped: unknown key; did you mean speed?"),
        ("slow={gpu: 1, speed: .nan}", "slow.0.speed: nan is not between 0.001 and 1"),
        ("slow={gpu: 1, speed: fast}", "slow.0.speed: 'fast' ... number or a percentage"),
        ("slow=17", "slow: 17 ... mapping ... {gpu: 17, speed: 0.9}"),
        ("jitter=20%", "jitter: normal ... 0.2 ... negative; at most 10% ... {std: 0.2,"),
        ("jitter=-1%", "jitter: '-1%' is not between 0 % and 1000 %"),
        ("jitter={std: 0.2, distribution: lognorm}", "jitter.distribution: 'lognorm' ... lognormal?"),
        ("jitter.seed=3", "jitter.std: is missing"),
        ("jitter={std: 0.01, seed: -1}", "jitter.seed: -1 is too small; the smallest legal value is 0"),
        ("nics={gpu: 64, bandwidth: 0.5}", "nics.0: there is no GPU 64"),
        ("nics={gpu: 6, bandwidth: 1000}", "nics.0.bandwidth: 1,000 ... 100 %"),
        ("links={between: [leaf0.0, spine0.9], dead: true}", "links.0: there is no spine0.9; there are spine0.0"),
        ("links={between: [leaf0.0], dead: true}", "links.0.between: ['leaf0.0'] ... [leaf0.0, spine0.0]"),
        (
            "links={from: leaf0.0, dead: true}",
            "links.0: names no link; write between: [leaf0.0, spine0.0], or from and to",
        ),
        ("links={between: [leaf0.0, spine0.0]}", "links.0: needs bandwidth ... or dead: true"),
        ("links={between: [a, b], from: a, dead: true}", "links.0: has both between and from or to; keep one"),
        ("links={between: [gpu0, nvswitch0], bandwidth: 0}", "links.0.bandwidth: 0 ... 0.001 and 1; write dead: true"),
        ("links={between: [gpu0, nvswitch0], dead: false}", "links.0.dead: false is what links are anyway"),
        ("links={between: [gpu0, nvswitch0], dead: 2}", "links.0: it is a single link, of which 2 cannot be dead"),
        ("slow={gpus: 0-1000000000000, speed: 0.9}", "slow.0: there is no GPU 64; GPUs are 0 to 63"),
        ("slow={gpu: 1e1, speed: 0.9}", "slow.0.gpu: '1e1' is a text in YAML; write 10"),
        ("slow=[3]", "slow.0: 3 ... mapping ... {gpu: 17, speed: 0.9}"),
        ("slow=[{gpu: 3, speed: 0.5}, {node: 0, speed: 0.9}]", "slow.1: GPU 3 is in slow.0 already; keep one"),
        ("jitter={std: 1 %, seed: 1e9}", "jitter.seed: '1e9' is a text in YAML; write 1000000000"),
        ("jitter={std: 1e-3}", "jitter.std: '1e-3' is a text in YAML; write 1.0e-3 or 0.001"),
        ("nics={gpu: 6}", "nics.0: needs bandwidth ... or dead: true, and not both"),
        ("nics={gpu: 6, bandwidth: 0.5, dead: true}", "nics.0: needs bandwidth ... or dead: true,"),
        ("nics={gpu: 6, bandwidth: 0}", "nics.0.bandwidth: 0 ... 0.001 and 1; write dead: true"),
        ("nics={gpu: 6, bandwidth: 120 %}", "nics.0.bandwidth: '120 %' is not between 0.1 % and 100 %"),
        ("nics={gpu: 6, dead: 2}", "nics.0.dead: 2 is not true; write dead: true"),
        (
            "nics=[{gpu: 6, bandwidth: 0.5}, {gpus: 5-6, dead: true}]",
            "nics.1: GPU 6 is in nics.0 already; keep one",
        ),
        (
            "links=[{from: leaf0.0, to: spine0.0, bandwidth: 0.5}, {between: [spine0.0, leaf0.0], dead: true}]",
            "links.1: ... leaf0.0 to spine0.0 ... links.0 already; keep one",
        ),
        ("links={between: leaf0.0, dead: true}", "links.0.between: 'leaf0.0' ... [leaf0.0,"),
        ("links={between: [leaf0.0, ''], dead: true}", "links.0.between: ['leaf0.0', ''] is not a pair of ends"),
        ("links={from: '', to: leaf0.0, dead: true}", "links.0.from: is empty; write a name"),
        ("background.leaf=1", "background.leaf: 1 is not between 0 and 0.99"),
        ("background.core=0.1", "background.core: unknown key; choose one of leaf, nic, spine"),
        ("background.spine=0.1", "background.spine: ... no such links; it has nic, leaf"),
    ],
)
def test_invalid_degradations_are_rejected(refusal: Refusal, override: str, sentence: str) -> None:
    message = refusal(f"degradations.{override}")
    assert parts(f"plan.yaml: degradations.{sentence}").match(message), message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "cluster.mixed={node: 8, accelerator: h200-sxm-141gb}",
            "cluster.mixed.0: there is no node 8; nodes are 0 to",
        ),
        ("cluster.mixed={accelerator: h200-sxm-141gb}", "cluster.mixed.0: names no node; write node: 3, or nodes: 0-7"),
        ("cluster.mixed={node: 3}", "cluster.mixed.0.accelerator: is missing; write accelerator: h200-sxm-141gb"),
        (
            "cluster.mixed={node: 3, accelerator: h200}",
            "cluster.mixed.0.accelerator: there is no accelerator 'h200'",
        ),
        (
            "cluster.mixed=[{nodes: 0-3, accelerator: h200-sxm-141gb}, {node: 3, accelerator: a100-sxm-80gb}]",
            "cluster.mixed.1: node 3 is in mixed.0 already; keep one",
        ),
        ("cluster.mixed={node: 3, accelerator: v100-sxm-32gb}", "training.precision: v100-sxm-32gb has no bf16 peak"),
        ("steps=0", "steps: 0 is too small; the smallest legal value is 1"),
        ("steps=9999", "steps: 9,999 of 32 passes each ... 319,968 passes; 131,072 are the most; steps 4096"),
        ("steps=1000000", "steps: 1,000,000 ... largest ... 10,000"),
        ("cost.interference=-0.1", "cost.interference: -0.1 is not between 0 and 1"),
    ],
)
def test_invalid_mixed_steps_and_interference_are_rejected(refusal: Refusal, override: str, sentence: str) -> None:
    assert parts(f"plan.yaml: {sentence}").match(refusal(override))


def test_disconnecting_link_failure_names_link_and_gpus(refusal: Refusal) -> None:
    """A rack of 16 nodes has one leaf switch and one bundle of 64 uplinks."""
    racks = ["cluster=llama3-roce", "cluster.gpus=512", "layout.dp=64"]
    endpoints = "[leaf1.0, spine0.0]"
    sentence = refusal(*racks, f"degradations.links={{between: {endpoints}, dead: 10000}}")
    members = int(sentence.split("a bundle of ")[1].split()[0])
    sentence = refusal(*racks, f"degradations.links={{between: {endpoints}, dead: {members}}}")
    assert parts(
        f"plan.yaml: degradations.links.0: without the {members} links ... leaf1.0 and spine0.0, GPUs 0-"
    ).search(sentence)
    assert " cannot reach GPUs " in sentence


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("degradations.slow={gpu: 1, speed: 9}", "degradations.slow.0.speed: 9 ... 9 % (or 900 %)"),
        ("degradations.slow={gpu: 1, speed: 50}", "degradations.slow.0.speed: 50 ... write 50 %"),
        ("degradations.nics={gpu: 1, bandwidth: 50}", "degradations.nics.0.bandwidth: 50 ... write 50 %"),
        (
            "degradations.links={from: gpu0, to: nvswitch0, bandwidth: 2}",
            "degradations.links.0.bandwidth: 2 is more than all",
        ),
        ("degradations.jitter=5", "degradations.jitter: 5 ... 5 % (or 500 %)"),
        ("degradations.jitter={std: 5}", "degradations.jitter.std: 5 ... 5 % (or 500 %)"),
        ("degradations.background.leaf=30", "degradations.background.leaf: 30 ... write 30 %"),
        ("cost.interference=5", "cost.interference: 5 ... 5 % (or 500 %)"),
    ],
)
def test_fraction_above_one_suggests_percent(refusal: Refusal, override: str, sentence: str) -> None:
    assert parts(f"plan.yaml: {sentence}").match(refusal(override))


def test_percentages_above_100_are_accepted_where_valid(mapping: Mapping) -> None:
    mapping["degradations"] = {
        "slow": {"gpu": 1, "speed": "120 %"},
        "jitter": {"std": "150 %", "distribution": "lognormal"},
    }
    mapping["cost"] = {"interference": "120 %"}
    scenario = Scenario.from_mapping(mapping)
    assert scenario.degradations.gpu_speeds(np.arange(2))[1] == scenario.cost.interference == 1.2
    assert scenario.jitter == Jitter(1.5, Distribution.LOGNORMAL)


@pytest.mark.parametrize("cluster", ["dgx-h100", "llama3-roce", "gb200-nvl72"])
def test_dead_nic_equals_dead_gpu_to_nic_link(mapping: Mapping, cluster: str) -> None:
    """Where GPU and NIC share a PCIe switch, routing cannot distinguish which side of the NIC failed."""
    gpus, nic = (72, "nic3.0") if cluster == "gb200-nvl72" else (64, "nic1.4")
    mapping |= {"cluster": {"name": cluster, "gpus": gpus}, "layout": {"tp": 4}, "training": {"sequence": 8192}}
    mapping["training"]["global_batch"] = gpus // 4
    dead = [{"nics": {"gpu": 12, "dead": True}}, {"links": {"between": ["gpu12", nic], "dead": True}}]
    fabrics = [Scenario.from_mapping({**mapping, "degradations": degradation}).cluster.fabric for degradation in dead]
    sources, targets = np.repeat(np.arange(gpus), gpus), np.tile(np.arange(gpus), gpus)
    paths = [fabric.find_paths(sources, targets) for fabric in fabrics]
    assert (paths[0].latency == paths[1].latency).all()
    width = min(path_set.links.shape[1] for path_set in paths)
    assert (paths[0].links[:, :width] == paths[1].links[:, :width]).all()
    healthy = load_cluster(cluster, gpus).fabric
    assert not np.isin(paths[0].links, healthy.nic_links(np.array([12]))).any()


def test_gpus_without_nics_are_disconnected(refusal: Refusal) -> None:
    sentence = refusal("degradations.nics=[{gpu: 20, dead: true}, {node: 1, dead: true}]")
    assert parts("plan.yaml: degradations.nics.1: ... NICs of GPUs 8-15, GPUs 0-7, 16-63 ... GPUs 8-15").fullmatch(
        sentence
    )


def test_shared_nic_cannot_be_degraded_twice(refusal: Refusal) -> None:
    """In dgx-v100 two GPUs share a NIC."""
    cluster = ["cluster={name: dgx-v100, gpus: 64}", "training.precision=fp16"]
    sentence = refusal(*cluster, "degradations.nics=[{gpu: 0, bandwidth: 0.5}, {gpu: 1, bandwidth: 0.5}]")
    assert parts("degradations.nics.1: ... nic0.0 to leaf0.0 ... share, is in nics.0 already").search(sentence)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("name=''", "name: is empty; write a name"),
        ("cluster.name=''", "cluster.name: is empty; write a name"),
        ("steps=1e3", "steps: '1e3' is a text in YAML; write 1000"),
        ("steps=1.0e+3", "steps: 1000.0 has a point; write 1000"),
        ("training={sequence: 8192}", "training.global_batch: is missing; write global_batch: 2048"),
        ("layout=[1]", "layout: [1] ... mapping ... tp, cp, pp, dp, ep, etp"),
    ],
)
def test_wrong_value_types_are_rejected_with_a_correction(refusal: Refusal, override: str, sentence: str) -> None:
    assert parts(f"plan.yaml: {sentence}").match(refusal(override))


def test_large_task_counts_warn_with_memory_and_time() -> None:
    """Llama 3 405B with 4 chunks: 16,384 ranks run 423 tasks a step, 69 million in ten, in 9.8 GB and 106 s."""
    plan = Path(__file__).parents[2] / "examples" / "llama3_405b_16k.yaml"
    common = ["cost.network=uncontended", "schedule.interleaved.chunks=4", "layout.data=zero1"]
    (warning,) = Scenario.load(plan, ["degradations.jitter=1%", "steps=10", *common]).warnings
    assert parts("about 69 million tasks of 16,384 ranks in 10 steps ... 5 GB ... 104 s; 3 steps").search(warning)
    for fewer in (["degradations.jitter=1%", "steps=3"], ["steps=10"]):
        assert Scenario.load(plan, [*fewer, *common]).warnings == ()
    *_, warning = Scenario.load(plan, ["cost.symmetry=off", "steps=10", *common]).warnings
    assert "cost.symmetry auto, 3 steps" in warning


def test_desynchronized_tp_groups_on_shared_links_warn(mapping: Mapping) -> None:
    """Two TP groups of 4 share a node's NVLink, so they contend; a group of 8 has the node to itself."""
    mapping |= {"cluster": {"name": "dgx-h100", "gpus": 512}, "layout": {"tp": 4, "pp": 2, "dp": 64}}
    mapping["training"] = {"sequence": 8192, "global_batch": 65536}
    mapping["degradations"] = {"slow": {"gpu": 3, "speed": 0.9}}
    assert "some ranks of a tensor-parallel group" in Scenario.from_mapping(mapping).warnings[0]
    for change in (
        "cost.network=uncontended",
        "layout={tp: 8, pp: 2, dp: 32}",
        "degradations.slow={node: 3, speed: 0.9}",
    ):
        assert Scenario.from_mapping(mapping, overrides=[change]).warnings == ()


def test_errors_of_all_sections_are_listed(refusal: Refusal) -> None:
    sentence = refusal("cluster.mixed={node: 99, accelerator: h200}", "degradations.slow={gpu: 99, speed: 0.5}")
    assert "2 problems" in sentence
    assert "cluster.mixed.0: there is no node 99" in sentence
    assert "degradations.slow.0: there is no GPU 99" in sentence


def test_degradations_without_effect_warn(mapping: Mapping) -> None:
    mapping |= {"cluster": {"name": "dgx-h100", "gpus": 8}, "layout": {"tp": 4, "dp": 2}}
    mapping["degradations"] = {
        "nics": {"gpu": 3, "bandwidth": 0.5},
        "links": [
            {"between": ["leaf0.0", "spine0.0"], "bandwidth": 0.5},
            {"between": ["gpu0", "nvswitch0"], "bandwidth": 0.5},
        ],
        "background": {"leaf": 0.5},
    }
    no_effect_warnings = [
        warning for warning in Scenario.from_mapping(mapping).warnings if "changes nothing" in warning
    ]
    assert [warning.split()[0] for warning in no_effect_warnings] == [
        "degradations.background.leaf",
        "degradations.nics",
        "degradations.links.0",
    ]
    assert no_effect_warnings[1].endswith("no transfer leaves the nvlink tier")
    mapping["degradations"]["links"] = {"between": ["gpu0", "nvswitch0"], "dead": True}  # GPU 0 uses its NIC now
    assert not any("changes nothing" in warning for warning in Scenario.from_mapping(mapping).warnings)
