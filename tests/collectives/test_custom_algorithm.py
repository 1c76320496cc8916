"""Custom collective algorithms in Python: found beside a scenario file or installed, called, validated, used."""

import pickle
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim import RenderedResult, Scenario, simulate
from clustersim.collectives import custom_algorithm
from clustersim.collectives.custom_algorithm import CustomAlgorithm, load_custom_algorithm
from clustersim.collectives.library import ALGORITHMS
from clustersim.collectives.phase import group_topology
from clustersim.common.errors import InputError
from clustersim.program.task import CollectiveType
from tests.collectives.fake_fabric import FakeFabric
from tests.laws.timelines import assert_same_trace
from tests.sentences import parts

MODULE_SOURCE = """
import numpy as np
from clustersim.collectives.phase import Flows, LatencySteps, build_phase
from clustersim.collectives.ring import RingAlgorithm
from clustersim.collectives.pairwise import PairwiseAlgorithm

class Copied(RingAlgorithm): pass
class Sent(PairwiseAlgorithm): pass
class Raises:
    def phases(self, collective, topology): raise ValueError("no such thing")
class Needs:
    def __init__(self, size): pass
    def phases(self, collective, topology): return ()
class Lacking: pass
class Unable:
    def phases(self, collective, topology): return ()
class Text:
    def phases(self, collective, topology): return "round and round"
class Once:
    def phases(self, collective, topology): return (self.around(topology, 0.25, 1),)
    def around(self, topology, share, by):
        members = topology.members
        return build_phase(Flows(members, np.roll(members, -by, axis=1), share), latency_steps=LatencySteps(local=1))
class Itself(Once):
    def phases(self, collective, topology): return (self.around(topology, 9.0, 0),)
class Nothing(Once):
    def phases(self, collective, topology): return (self.around(topology, 0.0, 1),)
class Away(Once):
    def phases(self, collective, topology):
        members = topology.members
        return (build_phase(Flows(members, members + 1, 2.0), latency_steps=LatencySteps(local=1)),)
class Crooked(Once):
    def phases(self, collective, topology):
        members = topology.members
        return (build_phase(Flows(members, members[:, 1:], 2.0), latency_steps=LatencySteps(local=1)),)
class Back(Once):
    def phases(self, collective, topology):
        members = topology.members
        return (build_phase(Flows(members, np.roll(members, 1, axis=1), 2.0), latency_steps=LatencySteps(network=-5)),)
class Half(Once):
    def phases(self, collective, topology):
        members = topology.members
        steps = LatencySteps(local=float("nan"))
        return (build_phase(Flows(members, np.roll(members, 1, axis=1), 2.0), latency_steps=steps),)
class Filling(Once):
    def phases(self, collective, topology):
        members = topology.members
        flows = Flows(members, np.roll(members, 1, axis=1), 2.0)
        return (build_phase(flows, latency_steps=LatencySteps(local=1), fill_stages=-1.0),)
class Changing(Once):
    def phases(self, collective, topology): topology.members[:] = 0
class Leaving(Once):
    def phases(self, collective, topology): raise SystemExit(3)
class Halves(Once):
    def phases(self, collective, topology):
        members = topology.members
        return (build_phase(Flows(members, members / 2.0, 2.0), latency_steps=LatencySteps(local=1)),)
"""
MAPPING: dict[str, Any] = {
    "model": "llama-tiny",
    "cluster": {"name": "aws-p5", "gpus": 16},
    "layout": {"tp": 2, "dp": 8, "data": "fsdp"},
    "training": {"sequence": 512, "global_batch": 16},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MODULE_SOURCE)
    return tmp_path


def scenario(folder: Path, cost: dict[str, Any], **sections: Any) -> Scenario:
    return Scenario.from_mapping(MAPPING | sections | {"cost": cost}, path=folder / "plan.yaml")


def simulate_with(folder: Path, **cost: Any) -> RenderedResult:
    return simulate(scenario(folder, cost))


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=6).filter(lambda counts: sum(counts) > 1),
    st.sampled_from(sorted(ALGORITHMS)),
    st.sampled_from([kind for kind in CollectiveType if not kind.is_token_routing]),
)
def test_library_algorithms_pass_the_minimum_volume_check(counts: list[int], name: str, kind: CollectiveType) -> None:
    members = [6 * domain + index for domain, count in enumerate(counts) for index in range(count)]
    (topology,) = group_topology(np.array([members]), FakeFabric(6 * len(counts), 6))
    custom = CustomAlgorithm(name, Path(), "")
    vars(custom)["instance"] = ALGORITHMS[name]
    assert len(custom.phases(kind, topology)) == len(ALGORITHMS[name].phases(kind, topology))


def test_a_custom_copy_of_the_ring_takes_exactly_the_same_time(folder: Path) -> None:
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    ring = simulate_with(folder, collectives=dict.fromkeys(kinds, "ring"))
    custom = simulate_with(folder, collectives=dict.fromkeys(kinds, "mine:Copied"))
    assert_same_trace(custom.trace, ring.trace)
    assert [
        selected_algorithm.algorithm.replace("mine:Copied", "ring") for selected_algorithm in custom.selected_algorithms
    ] == [item.algorithm for item in ring.selected_algorithms]
    assert any("mine:Copied" in element.algorithm for element in custom.selected_algorithms)


def test_a_custom_algorithm_has_roofline_provenance(folder: Path) -> None:
    cluster = {"name": "dgx-h100", "gpus": 16}
    result = simulate(scenario(folder, {"collectives": {"all_gather": "mine:Copied"}}, cluster=cluster))
    provenances = {
        selected_algorithm.collective: selected_algorithm.provenance
        for selected_algorithm in result.selected_algorithms
    }
    assert (provenances["all_gather"], provenances["reduce_scatter"]) == ("roofline", "published")
    all_gathers = [item for item in result.to_json()["collectives"] if item["collective"] == "all_gather"]
    assert all_gathers
    for all_gather in all_gathers:
        assert all_gather["algorithm"].startswith("mine:Copied ")
        assert all_gather.keys() == {
            "group", "collective", "ranks", "payload_bytes", "algorithm", "uncontended_s", "provenance"
        }  # fmt: skip
        assert all_gather["payload_bytes"] > 0.0
        assert all_gather["uncontended_s"] > 0.0


def test_a_custom_all_to_all_uses_the_constants_of_the_library(folder: Path) -> None:
    experts = {"model": "qwen3-30b-a3b", "layout": {"dp": 8, "ep": 8}, "cluster": {"name": "dgx-h100", "gpus": 8}}
    builtin, custom = (
        simulate(scenario(folder, {"collectives": cost}, **experts)) for cost in ({}, {"all_to_all": "mine:Sent"})
    )
    assert_same_trace(custom.trace, builtin.trace)
    assert any(
        selected_algorithm.algorithm.startswith("mine:Sent") for selected_algorithm in custom.selected_algorithms
    )


def test_a_candidate_is_selected_only_where_it_is_faster() -> None:
    examples = Path(__file__).parents[2] / "examples"
    mapping = MAPPING | {"cluster": {"name": "aws-p5", "gpus": 64}, "layout": {"dp": 64, "data": "fsdp"}}
    mapping["training"] = {"sequence": 512, "global_batch": 64}
    candidates = {kind: ["extend_chosen:Doubling"] for kind in ("all_gather", "reduce_scatter")}
    builtin, extended = (
        simulate(Scenario.from_mapping(mapping | {"cost": {"candidates": item}}, path=examples / "plan.yaml"))
        for item in ({}, candidates)
    )
    pairs = list(zip(builtin.selected_algorithms, extended.selected_algorithms, strict=True))
    is_faster = [one.seconds > two.seconds for one, two in pairs if two.algorithm.startswith("extend_chosen:Doubling ")]
    assert is_faster
    assert all(is_faster)
    assert all(one == two for one, two in pairs if not two.algorithm.startswith("extend_chosen:Doubling "))
    (note,) = [
        model_limitation
        for model_limitation in extended.model_limitations
        if "extend_chosen:Doubling" in model_limitation
    ]
    assert "taken for all_gather of dp" in note
    assert not any("extend_chosen" in element for element in builtin.model_limitations)
    unfolded = simulate(extended.scenario.with_overrides("cost.symmetry=off"))
    assert unfolded.simulated_rank_count > extended.simulated_rank_count
    assert_same_trace(extended.trace, unfolded.trace, relative=1e-9)


def test_a_builtin_algorithm_may_be_added_as_a_candidate(folder: Path) -> None:
    result = simulate_with(folder, candidates={"all_reduce": "hierarchical"})
    assert result.scenario.cost.nccl_overrides.custom_algorithms == {}
    variants = result.scenario.cost.nccl_overrides.apply_to(nccl_library()).variants_for(CollectiveType.ALL_REDUCE)
    assert {"ring", "tree", "hierarchical"} < {variant.algorithm for variant in variants}


def nccl_library() -> Any:
    from clustersim.collectives.library_files import load_library

    return load_library("nccl")


def test_measurements_do_not_count_for_collectives_with_candidates(folder: Path) -> None:
    assert scenario(
        folder, {"candidates": {"all_gather": "mine:Copied"}}
    ).cost.nccl_overrides.constrained_collectives == {CollectiveType.ALL_GATHER}


def test_nccl_proto_restricts_custom_algorithms_too(folder: Path) -> None:
    result = simulate_with(folder, candidates={"all_gather": "mine:Copied"}, nccl={"NCCL_PROTO": "Simple"})
    variants = result.scenario.cost.nccl_overrides.apply_to(nccl_library()).variants_for(CollectiveType.ALL_GATHER)
    custom_variants = [variant for variant in variants if variant.algorithm == "mine:Copied"]
    assert [variant.protocol for variant in custom_variants] == ["Simple"]


@pytest.mark.parametrize(
    ("cost", "sentence"),
    [
        ({"collectives": {"all_gather": "rign"}}, "'rign' for all_gather; did you mean ring"),
        ({"collectives": {"all_gather": "tree"}}, "does not offer 'tree' for all_gather"),
        ({"candidates": {"all_gathre": "ring"}}, "'all_gathre' is no collective; did you mean all_gather"),
        ({"candidates": {"all_gather": "mien:Copied"}}, "there is no module mien, .* did you mean mine"),
        ({"candidates": {"all_gather": "mine:Copeid"}}, "module mine has no class Copeid; did you mean Copied"),
        ({"candidates": {"all_gather": "mine:Lacking"}}, r"a collective algorithm has phases\(collective, topology\)"),
        ({"candidates": {"all_gather": "mine:Needs"}}, r"candidates.all_gather: mine:Needs\(\): TypeError: .*'size'"),
        ({"candidates": {"dispatch": "mine:Copied"}}, "no constants of dispatch"),
        (
            {"candidates": {"all_gather": "mine:Once"}, "collectives": {"all_gather": "ring"}},
            "both collectives and candidates for all_gather; keep one",
        ),
    ],
)
def test_bad_algorithm_names_are_refused_when_the_scenario_is_read(
    folder: Path, cost: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        scenario(folder, cost)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Raises", r"cost: mine:Raises\.phases\(all_gather, groups of 8.*2 domains\): ValueError: no such thing"),
        ("Text", "'r' is no phase"),
        ("Once", r"member 0.*receives 0\.25 payloads.*all_gather.*0\.875"),
        ("Itself", r"member 0.*sends 0 payloads.*all_gather.*0\.125"),
        ("Nothing", "a flow carries 0.0 of the payload; it must carry more than 0"),
        ("Away", "a flow has an end at GPU 1, which is not in its group"),
        ("Crooked", r"from \(2, 8\) to \(2, 7\) GPUs.*one shape, \[2 groups, \.\.\.\]"),
        ("Halves", "ends of flows are GPU numbers, in arrays of whole numbers"),
        ("Back", r"latency_steps: network: -5.*whole number from 0.*2 groups"),
        ("Half", "latency_steps: local: nan is no whole number from 0 on"),
        ("Filling", "fill_stages: -1.0 is no number from 0 on"),
        ("Changing", "ValueError: assignment destination is read-only"),
        ("Leaving", r"mine:Leaving\.phases\(all_gather, groups of 8.*2 domains\): SystemExit: 3"),
        ("Unable", r"all_gather by mine:Unable.*groups of 8 over 2 NVLink domains"),
    ],
)
def test_phases_of_a_custom_algorithm_are_validated(folder: Path, name: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        simulate_with(folder, collectives={"all_gather": f"mine:{name}"})


def test_an_unsupported_candidate_leaves_the_library_selection(folder: Path) -> None:
    assert_same_trace(
        simulate_with(folder, candidates={"all_gather": "mine:Unable"}).trace, simulate_with(folder).trace
    )


def test_installed_algorithms_are_named_by_entry_points(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "package_of_mine.py").write_text(MODULE_SOURCE)
    monkeypatch.syspath_prepend(str(folder))
    entries = {
        "around": EntryPoint("around", "package_of_mine:Copied", custom_algorithm.ENTRY_POINT_GROUP),
        "gone": EntryPoint("gone", "package_of_mine:Gone", custom_algorithm.ENTRY_POINT_GROUP),
        "less": EntryPoint("less", "package_of_mine:Lacking", custom_algorithm.ENTRY_POINT_GROUP),
    }
    monkeypatch.setattr(
        custom_algorithm,
        "entry_points",
        lambda **selection: EntryPoints(entries.values()).select(**selection),
    )
    ring = simulate_with(folder, collectives={"all_gather": "ring"})
    assert_same_trace(simulate_with(folder, collectives={"all_gather": "around"}).trace, ring.trace)
    for name, sentence in (
        ("aroudn", "did you mean around"),
        ("gone", "entry point gone of clustersim.collectives ... package_of_mine:Gone ... no class Gone"),
        ("less", "has no method phases; a collective algorithm has phases"),
    ):
        with pytest.raises(InputError, match=parts(sentence)):
            scenario(folder, {"collectives": {"all_gather": name}})


def test_a_scenario_with_a_custom_algorithm_survives_pickling_and_mapping(folder: Path) -> None:
    original = scenario(folder, {"candidates": {"all_gather": ["mine:Copied", "ring"]}})
    assert pickle.loads(pickle.dumps(original)) == original
    assert Scenario.from_mapping(original.to_mapping(), path=original.path) == original
    assert folder / "mine.py" in original.files
    (folder / "mine.py").write_text(MODULE_SOURCE + "\n# edited\n")
    assert load_custom_algorithm("mine:Copied", folder) != original.cost.nccl_overrides.custom_algorithms["mine:Copied"]
    assert (
        original.with_overrides("steps=2").cost.nccl_overrides.custom_algorithms
        == original.cost.nccl_overrides.custom_algorithms
    )
