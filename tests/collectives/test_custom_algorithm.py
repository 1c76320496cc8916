"""Algorithms of somebody's own Python: found beside a scenario or installed, asked, checked, used."""

import pickle
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim import RenderedResult, Scenario, simulate
from clustersim.collectives import custom_algorithm as room
from clustersim.collectives.custom_algorithm import CustomAlgorithm, load_custom_algorithm
from clustersim.collectives.library import ALGORITHMS
from clustersim.collectives.phase import group_topology
from clustersim.common.errors import InputError
from clustersim.program.task import CollectiveType
from tests.collectives.fake_fabric import FakeFabric
from tests.laws.timelines import same

MINE = """
import numpy as np
from clustersim.collectives.phase import Flows, Rounds, phase
from clustersim.collectives.ring import Ring
from clustersim.collectives.pairwise import Pairwise

class Copied(Ring): pass
class Sent(Pairwise): pass
class Raises:
    def phases(self, kind, arrangement): raise ValueError("no such thing")
class Needs:
    def __init__(self, size): pass
    def phases(self, kind, arrangement): return ()
class Lacking: pass
class Unable:
    def phases(self, kind, arrangement): return ()
class Text:
    def phases(self, kind, arrangement): return "round and round"
class Once:
    def phases(self, kind, arrangement): return (self.around(arrangement, 0.25, 1),)
    def around(self, arrangement, share, by):
        members = arrangement.members
        return phase(Flows(members, np.roll(members, -by, axis=1), share), rounds=Rounds(local=1))
class Itself(Once):
    def phases(self, kind, arrangement): return (self.around(arrangement, 9.0, 0),)
class Nothing(Once):
    def phases(self, kind, arrangement): return (self.around(arrangement, 0.0, 1),)
class Away(Once):
    def phases(self, kind, arrangement):
        members = arrangement.members
        return (phase(Flows(members, members + 1, 2.0), rounds=Rounds(local=1)),)
class Crooked(Once):
    def phases(self, kind, arrangement):
        members = arrangement.members
        return (phase(Flows(members, members[:, 1:], 2.0), rounds=Rounds(local=1)),)
class Back(Once):
    def phases(self, kind, arrangement):
        members = arrangement.members
        return (phase(Flows(members, np.roll(members, 1, axis=1), 2.0), rounds=Rounds(network=-5)),)
class Half(Once):
    def phases(self, kind, arrangement):
        members = arrangement.members
        return (phase(Flows(members, np.roll(members, 1, axis=1), 2.0), rounds=Rounds(local=float("nan"))),)
class Filling(Once):
    def phases(self, kind, arrangement):
        members = arrangement.members
        return (phase(Flows(members, np.roll(members, 1, axis=1), 2.0), rounds=Rounds(local=1), stages=-1.0),)
class Changing(Once):
    def phases(self, kind, arrangement): arrangement.members[:] = 0
class Leaving(Once):
    def phases(self, kind, arrangement): raise SystemExit(3)
class Halves(Once):
    def phases(self, kind, arrangement):
        members = arrangement.members
        return (phase(Flows(members, members / 2.0, 2.0), rounds=Rounds(local=1)),)
"""
GIVEN: dict[str, Any] = {
    "model": "llama-tiny",
    "cluster": {"name": "aws-p5", "gpus": 16},
    "layout": {"tp": 2, "dp": 8, "data": "fsdp"},
    "training": {"sequence": 512, "global_batch": 16},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def scenario(folder: Path, cost: dict[str, Any], **more: Any) -> Scenario:
    return Scenario.from_mapping(GIVEN | more | {"cost": cost}, path=folder / "plan.yaml")


def result_of(folder: Path, **cost: Any) -> RenderedResult:
    return simulate(scenario(folder, cost))


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=6).filter(lambda counts: sum(counts) > 1),
    st.sampled_from(sorted(ALGORITHMS)),
    st.sampled_from([kind for kind in CollectiveType if not kind.is_token_routing]),
)
def test_what_an_algorithm_must_move_at_least_is_what_all_of_the_library_do(
    counts: list[int], name: str, kind: CollectiveType
) -> None:
    members = [6 * domain + place for domain, count in enumerate(counts) for place in range(count)]
    (arrangement,) = group_topology(np.array([members]), FakeFabric(6 * len(counts), 6))
    asked = CustomAlgorithm(name, Path(), "")
    vars(asked)["algorithm"] = ALGORITHMS[name]
    assert len(asked.phases(kind, arrangement)) == len(ALGORITHMS[name].phases(kind, arrangement))


def test_a_copy_of_the_ring_takes_what_the_ring_takes_to_the_digit(folder: Path) -> None:
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    ring = result_of(folder, collectives=dict.fromkeys(kinds, "ring"))
    copy = result_of(folder, collectives=dict.fromkeys(kinds, "mine:Copied"))
    same(copy.trace, ring.trace)
    assert [
        selected_algorithm.algorithm.replace("mine:Copied", "ring") for selected_algorithm in copy.selected_algorithms
    ] == [item.algorithm for item in ring.selected_algorithms]
    assert any("mine:Copied" in element.algorithm for element in copy.selected_algorithms)


def test_constants_that_were_fitted_to_the_library_were_not_fitted_to_an_own_algorithm(folder: Path) -> None:
    fitted = {"name": "dgx-h100", "gpus": 16}
    found = simulate(scenario(folder, {"collectives": {"all_gather": "mine:Copied"}}, cluster=fitted))
    source = {
        selected_algorithm.collective: selected_algorithm.provenance for selected_algorithm in found.selected_algorithms
    }
    assert (source["all_gather"], source["reduce_scatter"]) == ("roofline", "published")
    told = [item for item in found.to_json()["collectives"] if item["collective"] == "all_gather"]
    assert told
    for element in told:
        assert element["algorithm"].startswith("mine:Copied ")
        assert element.keys() == {
            "group", "collective", "ranks", "payload_bytes", "algorithm", "alone_s", "provenance"
        }  # fmt: skip
        assert element["payload_bytes"] > 0.0
        assert element["alone_s"] > 0.0


def test_where_rings_do_nothing_constants_are_those_of_the_library_for_it(folder: Path) -> None:
    experts = {"model": "qwen3-30b-a3b", "layout": {"dp": 8, "ep": 8}, "cluster": {"name": "dgx-h100", "gpus": 8}}
    own, copy = (
        simulate(scenario(folder, {"collectives": cost}, **experts)) for cost in ({}, {"all_to_all": "mine:Sent"})
    )
    same(copy.trace, own.trace)
    assert any(selected_algorithm.algorithm.startswith("mine:Sent") for selected_algorithm in copy.selected_algorithms)


def test_a_candidate_is_taken_where_it_is_faster_and_slows_no_collective() -> None:
    examples = Path(__file__).parents[2] / "examples"
    given = GIVEN | {"cluster": {"name": "aws-p5", "gpus": 64}, "layout": {"dp": 64, "data": "fsdp"}}
    given["training"] = {"sequence": 512, "global_batch": 64}
    added = {kind: ["extend_chosen:Doubling"] for kind in ("all_gather", "reduce_scatter")}
    own, both = (
        simulate(Scenario.from_mapping(given | {"cost": {"candidates": item}}, path=examples / "plan.yaml"))
        for item in ({}, added)
    )
    pairs = list(zip(own.selected_algorithms, both.selected_algorithms, strict=True))
    mine = [one.seconds > two.seconds for one, two in pairs if two.algorithm.startswith("extend_chosen:Doubling ")]
    assert mine
    assert all(mine)
    assert all(one == two for one, two in pairs if not two.algorithm.startswith("extend_chosen:Doubling "))
    (left_out,) = [
        model_limitation for model_limitation in both.model_limitations if "extend_chosen:Doubling" in model_limitation
    ]
    assert "taken for all_gather of dp" in left_out
    assert not any("extend_chosen" in element for element in own.model_limitations)
    every = simulate(both.scenario.with_overrides("cost.symmetry=off"))
    assert every.simulated_rank_count > both.simulated_rank_count
    same(both.trace, every.trace, relative=1e-9)


def test_one_of_the_librarys_own_may_be_added_that_it_does_not_choose(folder: Path) -> None:
    own = result_of(folder, candidates={"all_reduce": "hierarchical"})
    assert own.scenario.cost.nccl_overrides.custom_algorithms == {}
    offers = own.scenario.cost.nccl_overrides.apply_to(room_library()).variants_for(CollectiveType.ALL_REDUCE)
    assert {"ring", "tree", "hierarchical"} < {offer.algorithm for offer in offers}


def room_library() -> Any:
    from clustersim.collectives.library import load_library

    return load_library("nccl")


def test_what_was_measured_of_the_librarys_own_does_not_count_where_another_may_be_taken(folder: Path) -> None:
    assert scenario(
        folder, {"candidates": {"all_gather": "mine:Copied"}}
    ).cost.nccl_overrides.constrained_collectives == {CollectiveType.ALL_GATHER}


def test_a_protocol_that_nccl_may_not_take_is_not_taken_for_an_own_algorithm(folder: Path) -> None:
    found = result_of(folder, candidates={"all_gather": "mine:Copied"}, nccl={"NCCL_PROTO": "Simple"})
    offers = found.scenario.cost.nccl_overrides.apply_to(room_library()).variants_for(CollectiveType.ALL_GATHER)
    mine = [offer for offer in offers if offer.algorithm == "mine:Copied"]
    assert [offer.protocol for offer in mine] == ["Simple"]


@pytest.mark.parametrize(
    ("cost", "sentence"),
    [
        ({"collectives": {"all_gather": "rign"}}, "'rign' for all_gather; did you mean ring"),
        ({"collectives": {"all_gather": "tree"}}, "does not offer 'tree' for all_gather"),
        ({"candidates": {"all_gathre": "ring"}}, "'all_gathre' is no collective; did you mean all_gather"),
        ({"candidates": {"all_gather": "mien:Copied"}}, "there is no module mien, .* did you mean mine"),
        ({"candidates": {"all_gather": "mine:Copeid"}}, "module mine has no class Copeid; did you mean Copied"),
        ({"candidates": {"all_gather": "mine:Lacking"}}, r"a collective algorithm has phases\(kind, arrangement\)"),
        ({"candidates": {"all_gather": "mine:Needs"}}, r"candidates.all_gather: mine:Needs\(\): TypeError: .*'size'"),
        ({"candidates": {"dispatch": "mine:Copied"}}, "no constants of dispatch"),
        (
            {"candidates": {"all_gather": "mine:Once"}, "collectives": {"all_gather": "ring"}},
            "both collectives and candidates for all_gather; keep one",
        ),
    ],
)
def test_what_cannot_be_named_is_said_when_the_scenario_is_read(
    folder: Path, cost: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        scenario(folder, cost)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Raises", r"cost: mine:Raises.phases\(all_gather, groups of 8 in 2 domains\): ValueError: no such thing"),
        ("Text", "'r' is no phase"),
        ("Once", "member 0 of a group receives 0.25 payloads in all; no all_gather does with less than 0.875"),
        ("Itself", "member 0 of a group sends 0 payloads in all; no all_gather does with less than 0.125"),
        ("Nothing", "a flow carries 0.0 of the payload; it must carry more than 0"),
        ("Away", "a flow has an end at GPU 1, which is not in its group"),
        ("Crooked", r"flows from \(2, 8\) to \(2, 7\) GPUs; both ends have one shape, \[2 groups, ...\]"),
        ("Halves", "ends of flows are GPU numbers, in arrays of whole numbers"),
        ("Back", "rounds: network: -5 is no whole number from 0 on, nor one for each of 2 groups"),
        ("Half", "rounds: local: nan is no whole number from 0 on"),
        ("Filling", "stages: -1.0 is no number from 0 on"),
        ("Changing", "ValueError: assignment destination is read-only"),
        ("Leaving", r"mine:Leaving.phases\(all_gather, groups of 8 in 2 domains\): SystemExit: 3"),
        ("Unable", "cannot do all_gather by mine:Unable in groups of 8 over 2 NVLink domains"),
    ],
)
def test_what_an_algorithm_answers_is_checked(folder: Path, name: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        result_of(folder, collectives={"all_gather": f"mine:{name}"})


def test_a_candidate_that_cannot_do_it_leaves_the_librarys_choice(folder: Path) -> None:
    same(result_of(folder, candidates={"all_gather": "mine:Unable"}).trace, result_of(folder).trace)


def test_installed_algorithms_have_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "package_of_mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(folder))
    found = {
        "around": EntryPoint("around", "package_of_mine:Copied", room.ENTRY_POINT_GROUP),
        "gone": EntryPoint("gone", "package_of_mine:Gone", room.ENTRY_POINT_GROUP),
        "less": EntryPoint("less", "package_of_mine:Lacking", room.ENTRY_POINT_GROUP),
    }
    monkeypatch.setattr(
        room,
        "entry_points",
        lambda **asked: EntryPoints(found.values()).select(**asked),
    )
    own = result_of(folder, collectives={"all_gather": "ring"})
    same(result_of(folder, collectives={"all_gather": "around"}).trace, own.trace)
    for name, sentence in (
        ("aroudn", "did you mean around"),
        ("gone", "entry point gone of clustersim.collectives .package_of_mine:Gone.: AttributeError"),
        ("less", r"is no class with phases\(kind, arrangement\)"),
    ):
        with pytest.raises(InputError, match=sentence):
            scenario(folder, {"collectives": {"all_gather": name}})


def test_a_scenario_with_an_own_algorithm_travels_and_comes_again(folder: Path) -> None:
    one = scenario(folder, {"candidates": {"all_gather": ["mine:Copied", "ring"]}})
    assert pickle.loads(pickle.dumps(one)) == one
    assert Scenario.from_mapping(one.to_mapping(), path=one.path) == one
    assert folder / "mine.py" in one.files
    (folder / "mine.py").write_text(MINE + "\n# edited\n")
    assert load_custom_algorithm("mine:Copied", folder) != one.cost.nccl_overrides.custom_algorithms["mine:Copied"]
    assert (
        one.with_overrides("steps=2").cost.nccl_overrides.custom_algorithms == one.cost.nccl_overrides.custom_algorithms
    )
