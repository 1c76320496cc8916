"""NCCL environment variables in a scenario (`cost.nccl`)."""

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
from tests.sentences import parts

Refuse = Callable[..., str]
ALGORITHM_NAMES = {
    "tree": {"tree"},
    "ring": {"ring"},
    "collnetchain": {"collnet_chain"},
    "nvls": {"nvls", "collnet_nvls"},
    "nvlstree": {"nvls"},
    "pat": {"pat"},
}
COLLECTIVE_KEYS = {kind: kind.value.replace("_", "") for kind in TUNED_COLLECTIVES}


FULL_NODE_LAYOUT = ["layout.tp=8", "layout.dp=8"]


@pytest.fixture
def mapping() -> dict[str, Any]:
    """DDP and TP without sequence parallelism on 64 GPUs: gradients and activations are all-reduced."""
    return {
        "model": "llama3-8b",
        "cluster": {"name": "dgx-h100", "gpus": 64},
        "layout": {"tp": 4, "dp": 16, "sequence_parallel": False, "data": "ddp"},
        "training": {"sequence": 8192, "global_batch": 32},
        "framework": {"name": "ideal", "launch": "10 us"},
    }


def parse_algorithms(text: str) -> dict[CollectiveType, frozenset[str]]:
    return dict(NcclConfig.model_validate({"NCCL_ALGO": text}).nccl_overrides().algorithms)


def test_lists_have_the_grammar_of_nccl() -> None:
    """NCCL's documented example: ring and collnetdirect for all, tree for allreduce, ring for broadcast."""
    allowed = parse_algorithms("ring,collnetdirect;allreduce:tree,collnetdirect;broadcast:ring")
    assert allowed[CollectiveType.ALL_GATHER] == {"ring", "collnet_direct"}
    assert allowed[CollectiveType.BROADCAST] == {"ring"}
    assert allowed[CollectiveType.ALL_REDUCE] == {"tree", "collnet_direct"}
    assert parse_algorithms("allreduce:Tree,RING") == {CollectiveType.ALL_REDUCE: {"tree", "ring"}}
    assert parse_algorithms("^NVLS,NVLSTree")[CollectiveType.ALL_REDUCE] == {
        *("tree", "ring", "pat", "collnet_direct", "collnet_chain")
    }
    protocols = NcclConfig.model_validate({"NCCL_PROTO": "^LL128;allreduce:LL128"}).nccl_overrides().protocols
    assert protocols[CollectiveType.REDUCE] == {"LL", "Simple"}
    assert protocols[CollectiveType.ALL_REDUCE] == {"LL128"}


@given(
    st.dictionaries(
        st.sampled_from(TUNED_COLLECTIVES), st.sets(st.sampled_from(sorted(ALGORITHM_NAMES)), min_size=1), min_size=1
    )
)
@examples(100)
def test_algorithm_lists_apply_per_collective(lists: dict[CollectiveType, set[str]]) -> None:
    text = ";".join(f"{COLLECTIVE_KEYS[kind]}:{','.join(sorted(names))}" for kind, names in lists.items())
    assert parse_algorithms(text) == {
        kind: set().union(*map(ALGORITHM_NAMES.get, names)) for kind, names in lists.items()
    }
    first = next(iter(lists.values()))
    assert set(parse_algorithms(",".join(first))) == set(TUNED_COLLECTIVES)


def test_disabled_nvls_is_not_selected(mapping: dict[str, Any]) -> None:
    """TP all-reduce uses NVLink SHARP (NVLS) unless it is disabled."""
    scenario = Scenario.from_mapping(mapping, FULL_NODE_LAYOUT)

    def selected_algorithms(*overrides: str) -> set[str]:
        result = simulate(scenario.with_overrides(overrides))
        comm_ops = {comm_op for program in result.program.programs for comm_op in program.comm_ops}
        large = {item for item in comm_ops if item.comm_group == "tp" and item.payload > 1e6}
        return {result.cost.comm_timing_by_group(element).algorithm.split()[0] for element in large}

    assert selected_algorithms() == {"nvls"}
    for switch in ("NCCL_NVLS_ENABLE=0", "NCCL_ALGO=^NVLS,NVLSTree", "NCCL_PROTO=^Simple"):
        assert "nvls" not in selected_algorithms(f"cost.nccl.{switch}")
    assert selected_algorithms("cost.nccl.NCCL_NVLS_ENABLE=2") == {"nvls"}


def test_restricting_algorithms_never_speeds_up(mapping: dict[str, Any]) -> None:
    scenario = Scenario.from_mapping(mapping)
    unrestricted = simulate(scenario).step_time
    for switch in ("NCCL_ALGO=Ring", "NCCL_ALGO=Tree", "NCCL_ALGO=NVLS", "NCCL_PROTO=LL", "NCCL_PROTO=Simple"):
        assert simulate(scenario.with_overrides(f"cost.nccl.{switch}")).step_time >= (1 - 1e-12) * unrestricted
    assert simulate(scenario.with_overrides("cost.nccl.NCCL_PROTO=LL")).step_time > 1.1 * unrestricted


def test_single_algorithm_equals_cost_collectives(mapping: dict[str, Any]) -> None:
    scenario = Scenario.from_mapping(mapping)
    by_nccl = simulate(scenario.with_overrides("cost.nccl.NCCL_ALGO=allreduce:ring"))
    by_collectives = simulate(scenario.with_overrides("cost.collectives.all_reduce=ring"))
    assert by_nccl.step_time == by_collectives.step_time


def test_sent_bytes_follow_the_selected_algorithm(mapping: dict[str, Any]) -> None:
    """A ring of eight sends 7/4 of the payload, NVLS 9/8."""
    from clustersim.report.panels.network import build_network

    sent = []
    for overrides in (FULL_NODE_LAYOUT, [*FULL_NODE_LAYOUT, "cost.nccl.NCCL_ALGO=Ring"]):
        network = build_network(simulate(Scenario.from_mapping(mapping, overrides)))
        assert network is not None
        sent.append(next(axis.sent_bytes for axis in network.network_use.axis_traffic if axis.axis == "tp"))
    assert sent[1] / sent[0] == pytest.approx(1.75 / 1.125, rel=1e-5), "a few small ones are rings anyway"


def test_nccl_variables_round_trip_and_changed_keys(mapping: dict[str, Any]) -> None:
    scenario = Scenario.from_mapping(mapping, ["cost.nccl={NCCL_ALGO: ^NVLS, NCCL_PROTO: Simple}"])
    assert Scenario.from_mapping(scenario.to_mapping()) == scenario
    assert scenario.with_overrides("cost.nccl.NCCL_PROTO=LL").to_mapping()["cost"]["nccl"] == {
        "NCCL_ALGO": "^NVLS",
        "NCCL_PROTO": "LL",
    }
    assert scenario.with_overrides("cost.nccl={}").cost == Scenario.from_mapping(mapping).cost
    changes = {
        change.key: (change.first, change.second) for change in changed_keys(Scenario.from_mapping(mapping), scenario)
    }
    assert changes == {"cost.nccl.NCCL_ALGO": (None, "^NVLS"), "cost.nccl.NCCL_PROTO": (None, "Simple")}


def test_channel_limits_warn_about_their_scope(mapping: dict[str, Any]) -> None:
    dgx_h100 = Scenario.from_mapping(mapping, ["cost.nccl.NCCL_MAX_NCHANNELS=4"])
    (warning,) = dgx_h100.warnings
    assert parts("cost.nccl: ... channels change nothing ... not known for these GPUs").fullmatch(warning)
    hgx_b200 = dgx_h100.with_overrides("cluster={name: hgx-b200, gpus: 64}")
    assert "limit messages inside NVLink domains only" in hgx_b200.warnings[0]


@pytest.mark.parametrize(
    ("switch", "sentence"),
    [
        ("NCCL_ALG=Ring", "cost.nccl.NCCL_ALG: unknown key; did you mean NCCL_ALGO?"),
        ("NCCL_ALGO=Rng", "cost.nccl.NCCL_ALGO: 'rng' ... ring?"),
        ("NCCL_ALGO=[Ring]", "cost.nccl.NCCL_ALGO: ['Ring'] ... list; write e.g. tree, ring"),
        ("NCCL_ALGO=all_reduce:ring", "cost.nccl.NCCL_ALGO: 'all_reduce' ... mean"),
        ("NCCL_ALGO=ring;tree", "cost.nccl.NCCL_ALGO: 'tree' names no collective ... first entry"),
        ("NCCL_PROTO=LL64", "cost.nccl.NCCL_PROTO: 'll64' ... mean"),
        ("NCCL_NVLS_ENABLE=3", "cost.nccl.NCCL_NVLS_ENABLE: 3 ... largest ... 2"),
        ("NCCL_MAX_NCHANNELS=0", "cost.nccl.NCCL_MAX_NCHANNELS: 0 ... smallest ... 1"),
        ("NCCL_MIN_NCHANNELS=true", "cost.nccl.NCCL_MIN_NCHANNELS: true is not a whole number"),
        ("NCCL_BUFFSIZE=8388608", "cost.nccl: NCCL_BUFFSIZE ... not modelled: chunks"),
        ("NCCL_IB_HCA=mlx5", "cost.nccl: NCCL_IB_HCA ... not modelled: the network"),
        ("NCCL_P2P_LEVEL=NVL", "cost.nccl: NCCL_P2P_LEVEL ... not modelled: routes"),
        ("NCCL_DEBUG=INFO", "cost.nccl: NCCL_DEBUG ... not modelled: no time"),
    ],
)
def test_invalid_nccl_variables_are_rejected(refusal: Refuse, switch: str, sentence: str) -> None:
    message = refusal(f"cost.nccl.{switch}")
    assert parts(f"plan.yaml: {sentence}").match(message)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["cost={nccl: {NCCL_MIN_NCHANNELS: 8, NCCL_MAX_NCHANNELS: 4}}"],
            "cost.nccl: NCCL_MIN_NCHANNELS 8 ... NCCL_MAX_NCHANNELS 4; 4 or less",
        ),
        (
            ["cost={nccl: {NCCL_ALGO: Ring}, collectives: {all_reduce: tree}}"],
            "cost.nccl: ... all_reduce ... cost.collectives ... keep one",
        ),
        (
            ["cluster={name: laptop, gpus: 2}", "cost.nccl.NCCL_ALGO=Ring"],
            "cost.nccl: ... library is gloo ... leave it out",
        ),
        (
            ["cluster={name: mi300x, gpus: 64}", "cost.nccl.NCCL_MAX_NCHANNELS=4"],
            "cost.nccl: NCCL_MAX_NCHANNELS: ... rccl ... leave it out",
        ),
    ],
)
def test_conflicting_nccl_settings_are_rejected(refusal: Refuse, overrides: list[str], sentence: str) -> None:
    assert parts(sentence).search(refusal(*overrides))


@pytest.mark.parametrize(
    "switches", ["{NCCL_ALGO: allreduce:PAT}", "{NCCL_ALGO: CollnetChain}", "{NCCL_ALGO: NVLS, NCCL_NVLS_ENABLE: 0}"]
)
def test_no_algorithm_left_is_rejected_before_simulation(mapping: dict[str, Any], switches: str) -> None:
    """As NCCL's error "no algorithm/protocol available"."""
    scenario = Scenario.from_mapping(mapping, [f"cost.nccl={switches}"])
    for entry_point in (check, simulate):
        with pytest.raises(InputError, match=r"cost: with NCCL_ALGO.* nothing is left of nccl for all_reduce"):
            entry_point(scenario)


@pytest.mark.parametrize("switch", ["cost.nccl.NCCL_ALGO=^Ring", "cost.collectives={all_gather: pat}"])
def test_unusable_algorithm_is_rejected_before_simulation(mapping: dict[str, Any], switch: str) -> None:
    """Only PAT is left for all-gather; it needs groups of one member per node, so groups of 8 cannot use it."""
    scenario = Scenario.from_mapping(mapping, [switch, "layout={tp: 8, sequence_parallel: true, dp: 8}"])
    for entry_point in (check, simulate):
        with pytest.raises(InputError, match=r"cannot do \w+ by pat in groups of 8 in one NVLink"):
            entry_point(scenario)


def test_rccl_reads_the_same_variables(mapping: dict[str, Any]) -> None:
    scenario = Scenario.from_mapping(mapping, ["cluster={name: mi300x, gpus: 64}"])
    assert simulate(scenario.with_overrides("cost.nccl.NCCL_ALGO=Ring")).step_time >= simulate(scenario).step_time
    with pytest.raises(InputError, match="nothing is left of rccl for all_reduce"):
        check(scenario.with_overrides("cost.nccl.NCCL_ALGO=NVLS"))


def test_unusable_remaining_algorithm_is_named(mapping: dict[str, Any]) -> None:
    """CollNet works between NVLink domains: TP groups of four inside one have no algorithm left."""
    nccl = "cost.nccl={NCCL_COLLNET_ENABLE: 1, NCCL_ALGO: 'allreduce:collnetdirect'}"
    with pytest.raises(InputError, match=r"all_reduce by collnet_direct.*groups of 4 in one NVLink domain"):
        simulate(Scenario.from_mapping(mapping, [nccl]))
