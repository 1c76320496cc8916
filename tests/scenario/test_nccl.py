"""What a scenario may say to NCCL."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim import Scenario, simulate
from clustersim.collectives.nccl_overrides import TUNED_COLLECTIVES
from clustersim.common.errors import InputError
from clustersim.program.task import CollectiveType
from clustersim.results.memory_check import check
from clustersim.scenario.changes.diff import changed_keys
from clustersim.scenario.config.nccl import NcclConfig
from tests.conftest import examples

Refuse = Callable[..., str]
ELEMENTS = {
    "tree": {"tree"},
    "ring": {"ring"},
    "collnetchain": {"collnet_chain"},
    "nvls": {"in_network", "collnet_nvls"},
    "nvlstree": {"in_network"},
    "pat": {"aggregated_trees"},
}
WORDS = {kind: kind.value.replace("_", "") for kind in TUNED_COLLECTIVES}


WHOLE_NODES = ["layout.tp=8", "layout.dp=8"]


@pytest.fixture
def mapping() -> dict[str, Any]:
    """Gradients of 64 GPUs are reduced: all-reduce, tensor-parallel ones too."""
    return {
        "model": "llama3-8b",
        "cluster": {"name": "dgx-h100", "gpus": 64},
        "layout": {"tp": 4, "dp": 16, "sequence_parallel": False, "data": "ddp"},
        "training": {"sequence": 8192, "global_batch": 32},
    }


def algorithms(text: str) -> dict[CollectiveType, frozenset[str]]:
    return dict(NcclConfig.model_validate({"NCCL_ALGO": text}).nccl_overrides().algorithms)


def test_lists_have_the_grammar_of_nccl() -> None:
    """Of NCCL's own comment: ring and collnetdirect for all functions, then tree for allreduce, ring for broadcast."""
    found = algorithms("ring,collnetdirect;allreduce:tree,collnetdirect;broadcast:ring")
    assert found[CollectiveType.ALL_GATHER] == {"ring", "collnet_direct"}
    assert found[CollectiveType.BROADCAST] == {"ring"}
    assert found[CollectiveType.ALL_REDUCE] == {"tree", "collnet_direct"}
    assert algorithms("allreduce:Tree,RING") == {CollectiveType.ALL_REDUCE: {"tree", "ring"}}
    assert algorithms("^NVLS,NVLSTree")[CollectiveType.ALL_REDUCE] == {
        *("tree", "ring", "aggregated_trees", "collnet_direct", "collnet_chain")
    }
    protocols = NcclConfig.model_validate({"NCCL_PROTO": "^LL128;allreduce:LL128"}).nccl_overrides().protocols
    assert protocols[CollectiveType.REDUCE] == {"LL", "Simple"}
    assert protocols[CollectiveType.ALL_REDUCE] == {"LL128"}


@given(
    st.dictionaries(
        st.sampled_from(TUNED_COLLECTIVES), st.sets(st.sampled_from(sorted(ELEMENTS)), min_size=1), min_size=1
    )
)
@examples(100)
def test_what_is_listed_for_a_collective_is_allowed_for_it_alone(lists: dict[CollectiveType, set[str]]) -> None:
    text = ";".join(f"{WORDS[kind]}:{','.join(sorted(names))}" for kind, names in lists.items())
    assert algorithms(text) == {kind: set().union(*map(ELEMENTS.get, names)) for kind, names in lists.items()}
    first = next(iter(lists.values()))
    assert set(algorithms(",".join(first))) == set(TUNED_COLLECTIVES)


def test_switched_off_nvls_is_not_chosen(mapping: dict[str, Any]) -> None:
    """All-reduce of tensor parallelism is done by NVLink's switches, unless they may not."""
    scenario = Scenario.from_mapping(mapping, WHOLE_NODES)

    def taken(*overrides: str) -> set[str]:
        result = simulate(scenario.with_overrides(overrides))
        every = {exchange for program in result.program.programs for exchange in program.comm_ops}
        large = {comm_op for comm_op in every if comm_op.comm_group == "tp" and comm_op.payload > 1e6}
        return {result.cost.comm_timing_by_group(item).algorithm.split()[0] for item in large}

    assert taken() == {"in_network"}
    for switch in ("NCCL_NVLS_ENABLE=0", "NCCL_ALGO=^NVLS,NVLSTree", "NCCL_PROTO=^Simple"):
        assert "in_network" not in taken(f"cost.nccl.{switch}")
    assert taken("cost.nccl.NCCL_NVLS_ENABLE=2") == {"in_network"}


def test_fewer_choices_never_make_a_step_faster(mapping: dict[str, Any]) -> None:
    scenario = Scenario.from_mapping(mapping)
    free = simulate(scenario).step_time
    for switch in ("NCCL_ALGO=Ring", "NCCL_ALGO=Tree", "NCCL_ALGO=NVLS", "NCCL_PROTO=LL", "NCCL_PROTO=Simple"):
        assert simulate(scenario.with_overrides(f"cost.nccl.{switch}")).step_time >= (1 - 1e-12) * free
    assert simulate(scenario.with_overrides("cost.nccl.NCCL_PROTO=LL")).step_time > 1.1 * free


def test_one_list_for_one_collective_is_the_older_key(mapping: dict[str, Any]) -> None:
    scenario = Scenario.from_mapping(mapping)
    one = simulate(scenario.with_overrides("cost.nccl.NCCL_ALGO=allreduce:ring"))
    other = simulate(scenario.with_overrides("cost.collectives.all_reduce=ring"))
    assert one.step_time == other.step_time


def test_bytes_on_links_are_those_of_what_is_left(mapping: dict[str, Any]) -> None:
    """A ring of eight sends 7/4 of the payload, NVLink's switches ask for 9/8."""
    from clustersim.report.panels.network import build_network

    sent = []
    for overrides in (WHOLE_NODES, [*WHOLE_NODES, "cost.nccl.NCCL_ALGO=Ring"]):
        network = build_network(simulate(Scenario.from_mapping(mapping, overrides)))
        assert network is not None
        sent.append(next(axis.sent_bytes for axis in network.network_use.axis_traffic if axis.axis == "tp"))
    assert sent[1] / sent[0] == pytest.approx(1.75 / 1.125, rel=1e-5), "a few small ones are rings anyway"


def test_switches_are_written_changed_and_told_apart(mapping: dict[str, Any]) -> None:
    scenario = Scenario.from_mapping(mapping, ["cost.nccl={NCCL_ALGO: ^NVLS, NCCL_PROTO: Simple}"])
    assert Scenario.from_mapping(scenario.to_mapping()) == scenario
    assert scenario.with_overrides("cost.nccl.NCCL_PROTO=LL").to_mapping()["cost"]["nccl"] == {
        "NCCL_ALGO": "^NVLS",
        "NCCL_PROTO": "LL",
    }
    assert scenario.with_overrides("cost.nccl={}").cost == Scenario.from_mapping(mapping).cost
    told = {
        changed_key.key: (changed_key.first, changed_key.second)
        for changed_key in changed_keys(Scenario.from_mapping(mapping), scenario)
    }
    assert told == {"cost.nccl.NCCL_ALGO": (None, "^NVLS"), "cost.nccl.NCCL_PROTO": (None, "Simple")}


def test_channels_say_how_far_they_reach(mapping: dict[str, Any]) -> None:
    blind = Scenario.from_mapping(mapping, ["cost.nccl.NCCL_MAX_NCHANNELS=4"])
    assert blind.warnings == (
        "cost.nccl: numbers of channels change nothing; the rate of a channel is not known for these GPUs",
    )
    known = blind.with_overrides("cluster={name: hgx-b200, gpus: 64}")
    assert "limit messages inside NVLink domains only" in known.warnings[0]


@pytest.mark.parametrize(
    ("switch", "sentence"),
    [
        ("NCCL_ALG=Ring", "cost.nccl.NCCL_ALG: unknown key; did you mean NCCL_ALGO?"),
        ("NCCL_ALGO=Rng", "cost.nccl.NCCL_ALGO: 'rng' is none of NCCL's; did you mean ring?"),
        ("NCCL_ALGO=[Ring]", "cost.nccl.NCCL_ALGO: ['Ring'] is no list; write e.g. tree, ring"),
        (
            "NCCL_ALGO=all_reduce:ring",
            "cost.nccl.NCCL_ALGO: 'all_reduce' is no collective that has a choice; did you mean",
        ),
        ("NCCL_ALGO=ring;tree", "cost.nccl.NCCL_ALGO: 'tree' names no collective; only the first entry is for all"),
        ("NCCL_PROTO=LL64", "cost.nccl.NCCL_PROTO: 'll64' is none of NCCL's; did you mean "),
        ("NCCL_NVLS_ENABLE=3", "cost.nccl.NCCL_NVLS_ENABLE: 3 is too large; the largest legal value is 2"),
        ("NCCL_MAX_NCHANNELS=0", "cost.nccl.NCCL_MAX_NCHANNELS: 0 is too small; the smallest legal value is 1"),
        ("NCCL_MIN_NCHANNELS=true", "cost.nccl.NCCL_MIN_NCHANNELS: true is not a whole number"),
        ("NCCL_BUFFSIZE=8388608", "cost.nccl: NCCL_BUFFSIZE is NCCL's, but not modelled: chunks and thresholds"),
        ("NCCL_IB_HCA=mlx5", "cost.nccl: NCCL_IB_HCA is NCCL's, but not modelled: the network is the cluster's"),
        ("NCCL_P2P_LEVEL=NVL", "cost.nccl: NCCL_P2P_LEVEL is NCCL's, but not modelled: routes inside a node"),
        ("NCCL_DEBUG=INFO", "cost.nccl: NCCL_DEBUG is NCCL's, but not modelled: no time depends on it"),
    ],
)
def test_a_variable_that_nothing_depends_on_is_refused(refusal: Refuse, switch: str, sentence: str) -> None:
    told = refusal(f"cost.nccl.{switch}")
    assert told.startswith(f"plan.yaml: {sentence}")
    assert "\n" not in told


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["cost={nccl: {NCCL_MIN_NCHANNELS: 8, NCCL_MAX_NCHANNELS: 4}}"],
            "cost.nccl: NCCL_MIN_NCHANNELS 8 is above NCCL_MAX_NCHANNELS 4; 4 or less fits",
        ),
        (
            ["cost={nccl: {NCCL_ALGO: Ring}, collectives: {all_reduce: tree}}"],
            "cost.nccl: speaks of all_reduce, for which cost.collectives names an algorithm; keep one of them",
        ),
        (
            ["cluster={name: laptop, gpus: 2}", "cost.nccl.NCCL_ALGO=Ring"],
            "cost.nccl: the cluster's library is gloo, which does not read NCCL's variables; leave it out",
        ),
        (
            ["cluster={name: mi300x, gpus: 64}", "cost.nccl.NCCL_MAX_NCHANNELS=4"],
            "cost.nccl: NCCL_MAX_NCHANNELS: channels of rccl are not modelled; leave it out",
        ),
    ],
)
def test_what_does_not_agree_is_refused(refusal: Refuse, overrides: list[str], sentence: str) -> None:
    assert sentence in refusal(*overrides)


@pytest.mark.parametrize(
    "switches", ["{NCCL_ALGO: allreduce:PAT}", "{NCCL_ALGO: CollnetChain}", "{NCCL_ALGO: NVLS, NCCL_NVLS_ENABLE: 0}"]
)
def test_a_step_that_has_nothing_left_is_refused_before_it_is_simulated(mapping: dict[str, Any], switches: str) -> None:
    """As NCCL does: no algorithm/protocol available."""
    scenario = Scenario.from_mapping(mapping, [f"cost.nccl={switches}"])
    for ask in (check, simulate):
        with pytest.raises(InputError, match=r"cost: with NCCL_ALGO.* nothing is left of nccl for all_reduce"):
            ask(scenario)


@pytest.mark.parametrize("switch", ["cost.nccl.NCCL_ALGO=^Ring", "cost.collectives={all_gather: aggregated_trees}"])
def test_what_no_group_of_a_layout_can_do_is_refused_before_it_is_simulated(
    mapping: dict[str, Any], switch: str
) -> None:
    """PAT is left for gathers, for groups with one member in each node; the 8 of a node are none."""
    scenario = Scenario.from_mapping(mapping, [switch, "layout={tp: 8, sequence_parallel: true, dp: 8}"])
    for ask in (check, simulate):
        with pytest.raises(InputError, match=r"cannot do \w+ by aggregated_trees in groups of 8 in one NVLink"):
            ask(scenario)


def test_rccl_reads_the_same_variables(mapping: dict[str, Any]) -> None:
    scenario = Scenario.from_mapping(mapping, ["cluster={name: mi300x, gpus: 64}"])
    assert simulate(scenario.with_overrides("cost.nccl.NCCL_ALGO=Ring")).step_time >= simulate(scenario).step_time
    with pytest.raises(InputError, match="nothing is left of rccl for all_reduce"):
        check(scenario.with_overrides("cost.nccl.NCCL_ALGO=NVLS"))


def test_what_is_left_but_groups_cannot_do_is_named(mapping: dict[str, Any]) -> None:
    """CollNet is between domains: tensor-parallel groups of four inside one have nothing left."""
    nccl = "cost.nccl={NCCL_COLLNET_ENABLE: 1, NCCL_ALGO: 'allreduce:collnetdirect'}"
    with pytest.raises(InputError, match="all_reduce by collnet_direct in groups of 4 in one NVLink domain"):
        simulate(Scenario.from_mapping(mapping, [nccl]))
