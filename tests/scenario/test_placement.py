"""`cluster.placement`: the GPUs that a job gets."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from clustersim import Scenario, simulate
from clustersim.common.errors import InputError
from clustersim.hardware.rank_mapping import RankMappedFabric
from clustersim.results.memory_check import check
from clustersim.scenario.changes.diff import changed_keys
from tests.sentences import parts

Refuse = Callable[..., str]


@pytest.fixture
def mapping() -> dict[str, Any]:
    """16 GPUs on nodes of eight."""
    return {
        "model": "llama3-8b",
        "cluster": {"name": "dgx-h100", "gpus": 16},
        "layout": {"tp": 2, "dp": 8},
        "training": {"sequence": 8192, "global_batch": 16},
    }


@pytest.mark.parametrize(
    ("placement", "gpu_ids"),
    [
        ("{per_node: 4}", [*range(4), *range(8, 12), *range(16, 20), *range(24, 28)]),
        ("{per_domain: 4}", [*range(4), *range(8, 12), *range(16, 20), *range(24, 28)]),
        ("{nodes: [5, 2]}", [*range(40, 48), *range(16, 24)]),
        ("{nodes: 2-3}", range(16, 32)),
        ("{nodes: [6, 0-2], per_node: 4}", [*range(48, 52), *range(4), *range(8, 12), *range(16, 20)]),
        ("{spare: 1}", range(16)),
        ("{order: [8-15, 3, 2, 1, 0, 4-7]}", [*range(8, 16), 3, 2, 1, 0, 4, 5, 6, 7]),
        ("{order: 8-23}", range(8, 24)),
    ],
)
def test_placement_determines_gpu_of_ranks(mapping: dict[str, Any], placement: str, gpu_ids: range | list[int]) -> None:
    scenario = Scenario.from_mapping(mapping, [f"cluster.placement={placement}"])
    assert scenario.cluster.machine_gpu_ids.tolist() == list(gpu_ids)
    assert scenario.cluster.gpu_count == scenario.layout.world_size == 16


def test_none_is_no_placement(mapping: dict[str, Any]) -> None:
    """As documented in the manual; on the command line it removes a file's placement."""
    scattered = Scenario.from_mapping(mapping, ["cluster.placement={scatter: nodes}"])
    plain = Scenario.from_mapping(mapping)
    assert isinstance(scattered.cluster.fabric, RankMappedFabric)
    assert scattered.with_overrides("cluster.placement=none").cluster == plain.cluster


def test_cluster_size_from_placement(mapping: dict[str, Any]) -> None:
    def cluster_gpus(placement: str) -> int:
        return Scenario.from_mapping(mapping, [f"cluster.placement={placement}"]).cluster.machine.gpu_count

    assert cluster_gpus("{per_node: 4}") == 32
    assert cluster_gpus("{spare: 3}") == 16 + 24
    assert cluster_gpus("{nodes: [5, 2]}") == 48
    assert cluster_gpus("{scatter: nodes, spare: 2, per_node: 2}") == 8 * 8 + 16


def test_omitted_gpu_count_from_placement(mapping: dict[str, Any]) -> None:
    """From the selected nodes, the order list, or the cluster's default size (DGX H100: 1,024 GPUs)."""
    del mapping["cluster"]["gpus"], mapping["layout"]["dp"]
    named = Scenario.from_mapping(mapping, ["cluster.placement.nodes=[0, 3]"])
    assert (named.cluster.gpu_count, named.layout.dp) == (16, 8)
    assert Scenario.from_mapping(mapping, ["cluster.placement.order=[0, 1, 8, 9]"]).cluster.gpu_count == 4
    default_size = Scenario.from_mapping({**mapping, "training": {"sequence": 8192, "global_batch": 512}})
    half_nodes = default_size.with_overrides("cluster.placement.per_node=4", "training.global_batch=256")
    assert half_nodes.cluster.gpu_count * 2 == default_size.cluster.gpu_count


def test_order_file_is_inlined(mapping: dict[str, Any], tmp_path: Path) -> None:
    """The scenario of a result does not need the order file, and changes do not reread it."""
    (tmp_path / "hosts.txt").write_text("# rack 2\n8-15\n\n3\n2\n1\n0\n4-7\n")
    mapping["cluster"]["placement"] = {"order": "hosts.txt"}
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump(mapping))
    scenario = Scenario.load(plan)
    assert scenario.cluster.machine_gpu_ids.tolist() == [*range(8, 16), 3, 2, 1, 0, 4, 5, 6, 7]
    assert tmp_path / "hosts.txt" in scenario.files
    (tmp_path / "hosts.txt").unlink()
    assert scenario.with_overrides("steps=2").cluster == scenario.cluster
    written = simulate(scenario).to_json()["scenario"]
    assert written["cluster"]["placement"] == {"order": ["8-15", 3, 2, 1, 0, "4-7"]}
    assert Scenario.from_mapping(written).cluster == scenario.cluster


@pytest.mark.parametrize("placement", ["{per_node: 4}", "{scatter: gpus, seed: 5}", "{nodes: [3, 1]}", "{order: 8-23}"])
def test_placement_round_trip_and_changed_keys(mapping: dict[str, Any], placement: str) -> None:
    scenario = Scenario.from_mapping(mapping, [f"cluster.placement={placement}"])
    assert Scenario.from_mapping(scenario.to_mapping()) == scenario
    assert scenario.with_overrides("training.global_batch=32").cluster == scenario.cluster
    keys = {change.key for change in changed_keys(Scenario.from_mapping(mapping), scenario)}
    assert keys == {f"cluster.placement.{key}" for key in yaml.safe_load(placement)}
    bare = scenario.with_overrides("cluster.placement=null")
    assert bare.cluster == Scenario.from_mapping(mapping).cluster


@pytest.mark.parametrize(
    ("placement", "sentence"),
    [
        ("{}", "cluster.placement: ... nothing; write {per_node: 6}, {per_domain: 64}"),
        ("{per_node: 9}", "cluster.placement.per_node: 9 ... node has 8 GPUs"),
        ("{per_domain: 9}", "cluster.placement.per_domain: 9 ... NVLink domain has 8 GPUs"),
        ("{per_node: 0}", "cluster.placement.per_node: 0 ... smallest ... 1"),
        ("{per_node: 6}", "cluster.gpus: 16 GPUs ... multiple of the 6 ... 12 or 18"),
        ("{per_nod: 6}", "cluster.placement.per_nod: ... per_node?"),
        ("{per_node: 4, per_domain: 4}", "cluster.placement: ... both per_node and per_domain; keep one"),
        ("{nodes: [0, 0]}", "cluster.placement.nodes: node 0 comes twice; keep one"),
        ("{nodes: [0, 40000]}", "cluster.placement.nodes: ... no node 40,000; ... 0 to"),
        ("{nodes: [0]}", "cluster.gpus: a job of 16 ... 8 GPUs"),
        ("{nodes: [0, 1], spare: 1}", "cluster.placement: ... both nodes and spare; nodes"),
        ("{nodes: a}", "cluster.placement.nodes: 'a' ... number from 0 ... 8-15"),
        ("{scatter: node}", "cluster.placement.scatter: 'node' ... nodes?"),
        ("{seed: 1}", "cluster.placement: ... seed but no scatter; write scatter: nodes, or scatter: gpus"),
        ("{order: [0-14, 3]}", "cluster.placement.order: GPU 3 comes twice; keep one"),
        ("{order: 0-14}", "cluster.placement.order: ... 15 GPUs ... 16 ranks"),
        ("{order: 0-16}", "cluster.placement.order: ... 17 GPUs ... 16 ranks"),
        ("{order: [0-14, 999999]}", "cluster.placement.order: ... no GPU 999,999; ... 0 to"),
        ("{order: 0-15, per_node: 2}", "cluster.placement: ... both order and per_node"),
        ("{order: none.txt}", "cluster.placement.order: none.txt: "),
        ("{order: 0-99999999}", "cluster.placement.order: ... 100,000,000 GPUs; 1,048,576 are the most"),
        ("4", "cluster.placement: 4 ... mapping ... {per_node: 6}"),
    ],
)
def test_invalid_placement_has_a_one_line_error(refusal: Refuse, placement: str, sentence: str) -> None:
    message = refusal(f"cluster.placement={placement}")
    assert parts(f"plan.yaml: {sentence}").match(message)
    assert "\n" not in message


def test_order_file_errors_name_the_line(mapping: dict[str, Any], tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.txt"
    for text, sentence in (
        ("0-14\nnode1\n", "hosts.txt, line 2: 'node1' ... number from 0 ... 8-15"),
        ("# nobody\n", "hosts.txt names no GPU; write one on each line"),
    ):
        hosts.write_text(text)
        with pytest.raises(InputError) as caught:
            Scenario.from_mapping(mapping, [f"cluster.placement.order={hosts}"])
        assert parts(sentence).search(str(caught.value))


def test_degradations_use_cluster_gpu_ids(mapping: dict[str, Any]) -> None:
    """Node 3 is the job's first node; degraded GPUs outside the job are reported to change nothing."""
    scenario = Scenario.from_mapping(
        mapping,
        [
            "cluster.placement.nodes=[3, 1]",
            "cluster.mixed=[{node: 3, accelerator: h200-sxm-141gb}, {node: 0, accelerator: b200-sxm-180gb}]",
            "degradations.slow=[{gpu: 9, speed: 0.5}, {gpu: 0, speed: 0.5}]",
            "degradations.nics={gpu: 25, bandwidth: 50 %}",
        ],
    )
    accelerators, kind = scenario.cluster.accelerator_kinds()
    assert [accelerators[type_index].name for type_index in kind[[0, 8]]] == ["h200-sxm-141gb", "h100-sxm-80gb"]
    assert len(accelerators) == 2, "node 0 is another job's"
    assert np.flatnonzero(scenario.degradations.gpu_speeds(scenario.cluster.machine_gpu_ids) < 1.0).tolist() == [9]
    (slow,) = (warning for warning in scenario.warnings if "slow" in warning)
    assert parts("degradations.slow.1 changes nothing: ... (cluster.placement)").fullmatch(slow)
    halved = scenario.cluster.fabric.links.bandwidth[scenario.cluster.fabric.nic_links(np.array([1]))]
    assert (halved == 25e9).all(), "GPU 25 of the machine is rank 1"


def test_dead_nic_outside_the_job_disconnects_nothing(mapping: dict[str, Any]) -> None:
    """A node that loses its only NIC is disconnected."""
    mapping["cluster"] |= {"node": {"nic": {"per_node": 1}}, "placement": {"nodes": [1, 2]}}
    mapping["degradations"] = {"nics": {"node": 0, "dead": True}}
    scenario = Scenario.from_mapping(mapping)
    assert isinstance(scenario.cluster.fabric, RankMappedFabric)
    with pytest.raises(InputError, match="GPUs 0-7 cannot reach GPUs 8-15"):
        scenario.with_overrides("cluster.placement.nodes=[0, 1]")


def test_host_is_shared_by_the_jobs_gpus_only(mapping: dict[str, Any]) -> None:
    """Two ranks on a node each have four times the host memory bandwidth of eight."""
    mapping["training"] |= {"offload": {"optimizer": True}}
    mapping["layout"] = {"dp": 16, "data": "zero1"}
    full, two_per_node = (
        simulate(Scenario.from_mapping(mapping, [f"cluster.placement.per_node={gpus}"])) for gpus in (8, 2)
    )
    breakdowns = [result.breakdown.mean_seconds() for result in (full, two_per_node)]
    assert breakdowns[1]["exposed host"] < 0.5 * breakdowns[0]["exposed host"]
    host_checks = [
        check(Scenario.from_mapping(mapping, [f"cluster.placement.per_node={gpus}"])).host for gpus in (8, 2)
    ]
    assert host_checks[0] is not None
    assert host_checks[1] is not None
    assert host_checks[0].total_bytes == pytest.approx(4 * host_checks[1].total_bytes)


HALF_RACK_SCENARIO = [
    "cluster={name: gb200-nvl72, gpus: 72, node: {nvlink: {gpus: 36}}}",
    "layout={tp: 8, dp: 9}",
    "training.global_batch=18",
]


def test_tp_groups_across_domains_suggest_even_placement(mapping: dict[str, Any]) -> None:
    """Of ranks 0 to 71 in racks of 36, the group of 32 to 39 has four in each; 24 in each of three racks are even."""
    scenario = Scenario.from_mapping(mapping, HALF_RACK_SCENARIO)
    assert parts(
        "1 of 9 tensor-parallel groups (tp 8) ... beyond one NVLink domain ... cluster.placement {per_domain: 24}"
    ).match(scenario.warnings[0])
    even = scenario.with_overrides("cluster.placement.per_domain=24")
    assert not [warning for warning in even.warnings if "NVLink domain" in warning]


def test_unevenly_distributed_groups_warn(mapping: dict[str, Any]) -> None:
    """80 GPUs that fill racks of 72 are 72 and 8; 40 and 40 are even, as is a job without placement."""
    racks = "cluster={name: gb200-nvl72, gpus: 80, placement: {per_domain: 72}}"
    scenario = Scenario.from_mapping(mapping, [racks, "layout={tp: 2, dp: 40}", "training.global_batch=80"])
    (warning,) = scenario.warnings
    assert parts(
        "2 of 2 data-parallel groups (dp 40) ... unevenly, with 4 to 36 members ... cluster.placement {per_domain: 40}"
    ).match(warning)
    for even in ("{per_domain: 40}", "{scatter: nodes}", "{spare: 3}", "null"):
        assert not scenario.with_overrides(f"cluster.placement={even}").warnings


def test_cp_groups_warn_only_if_some_stay_in_one_domain(mapping: dict[str, Any]) -> None:
    """Tp 4 x cp 3 in nodes of eight: ranks 0 to 11 and so on; cp 2 x tp 8 is over two nodes by design."""
    crossing = Scenario.from_mapping(
        mapping, ["cluster.gpus=48", "layout={tp: 4, cp: 3, dp: 4}", "training={sequence: 12288, global_batch: 8}"]
    )
    assert any("context-parallel groups" in warning for warning in crossing.warnings)
    two_node_groups = Scenario.from_mapping(mapping, ["layout={tp: 8, cp: 2}"])
    assert not two_node_groups.warnings
