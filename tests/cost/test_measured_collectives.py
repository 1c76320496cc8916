"""Exchanges take what groups of their size were measured to take, and what the model says where none were."""

from dataclasses import replace

import numpy as np
import pytest

from clustersim.collectives.library import load_library
from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError
from clustersim.cost.calibration_record import CollectiveRow, Origin, Record
from clustersim.cost.collective_cost import CommunicationCost
from clustersim.cost.measured_collectives import ALGORITHM, RecordedExchanges
from clustersim.cost.timing import Bound, Provenance
from clustersim.hardware.clos_fabric import ClosFabric
from clustersim.hardware.clos_spec import Leaf, Network, Nics, Node, NvLink, Port, Spine
from clustersim.hardware.ecmp import Spread as Spreading
from clustersim.program.program import ProcessGroups
from clustersim.program.task import CollectiveType, CommOp, TokenDispatcher, TokenRouting
from tests.cost.records import CONDITIONS, DEVICE, calls, line

NODE = Node(8, Port(64e9, 5e-7), NvLink(8, Port(450e9, 5e-7)), None, Nics(8, Port(50e9, 5e-7)))
FABRIC = ClosFabric(NODE, Network(Leaf(4, 8, 2e-7, 1.0), Spreading(), Spine(1024, 2e-7)), 32)
RANKS = np.arange(32)
ROLES = {
    "tp": RANKS.reshape(-1, 8),
    "dp": np.ascontiguousarray(RANKS.reshape(-1, 8).T),
    "one": RANKS[:, None],
    # on one node, on two nodes evenly, on two nodes unevenly, on four nodes
    "mixed": np.array([[0, 1, 2, 3], [4, 5, 8, 9], [6, 10, 11, 12], [7, 13, 16, 24]]),
    "pp_next": np.stack([RANKS, np.roll(RANKS, -8)], axis=1),
}
GROUPS = {role: ProcessGroups(role, members, ordered=role == "pp_next") for role, members in ROLES.items()}
ALPHA, BETA = 3e-5, 1e11
SIZES = [1e4, 1e5, 1e6, 1e7, 1e8]
TP = calls({size: ALPHA + size / BETA for size in SIZES})


def model() -> CommunicationCost:
    return CommunicationCost(FABRIC, load_library("nccl"), GROUPS)


def recorded(*rows: CollectiveRow, origin: Origin = Origin.MEASURED, fits: tuple = ()) -> RecordedExchanges:
    record = Record(DEVICE, CONDITIONS, collectives=rows, collective_fits=fits, origin=origin)
    return RecordedExchanges(model(), record, GROUPS, nodes=np.arange(FABRIC.gpus) // 8)


def reduction(role: str, payload: float, kind: CollectiveType = CollectiveType.ALL_REDUCE) -> CommOp:
    return CommOp("x", kind, role, payload)


def test_a_measured_payload_takes_what_it_took_in_every_group():
    timing = recorded(*TP).exchange(reduction("tp", 1e7))
    assert timing.seconds.tolist() == [ALPHA + 1e7 / BETA] * 4
    assert (timing.provenance, timing.algorithm, timing.error) == (Provenance.MEASURED, ALGORITHM, 0.0)
    assert timing.tier == "nvlink"


def test_between_measured_payloads_it_lies_between():
    timing = recorded(*TP).exchange(reduction("tp", 3e7))
    assert timing.provenance is Provenance.INTERPOLATED
    assert timing.error is not None
    assert timing.seconds == pytest.approx(ALPHA + 3e7 / BETA, rel=timing.error)


def test_beyond_measured_payloads_the_fit_answers_and_without_one_the_model():
    far = reduction("tp", 1e10)
    timing = recorded(*TP, fits=(line(ALPHA, BETA, 0.06),)).exchange(far)
    assert timing.seconds == pytest.approx(ALPHA + 1e10 / BETA)
    assert (timing.provenance, timing.error) == (Provenance.FITTED, 0.06)
    without = recorded(*TP).exchange(far)
    assert without.seconds.tolist() == model().exchange(far).seconds.tolist()
    assert without.provenance is Provenance.PUBLISHED


def test_a_reduction_takes_what_its_own_format_took_and_else_what_another_did():
    """Twice as long in BF16; a gradient in FP16, that was not measured, and one of which nobody knows it: FP32's."""
    narrow = [replace(row, call=replace(row.call, format=DType.BF16)) for row in calls({1e7: 2e-3})]
    both = recorded(*narrow, *TP)
    asked = {form: replace(reduction("tp", 1e7), reduce_dtype=form) for form in (None, *DType)}
    wide, once = ALPHA + 1e7 / BETA, recorded(*narrow)
    assert {form: float(both.exchange(comm_op).seconds[0]) for form, comm_op in asked.items()} == {
        **dict.fromkeys(asked, wide),
        DType.BF16: 2e-3,
    }
    assert all(float(once.exchange(item).seconds[0]) == 2e-3 for item in asked.values())


def test_mostly_alpha_is_latency_and_mostly_beta_is_bandwidth():
    """10 kB take 30.1 us, of which all counts as latency; 100 MB take a millisecond."""
    made = recorded(*TP)
    assert made.exchange(reduction("tp", 1e4)).bound is Bound.LATENCY
    assert made.exchange(reduction("tp", 1e8)).bound is Bound.BANDWIDTH


@pytest.mark.parametrize(
    "other",
    [
        reduction("tp", 1e7, CollectiveType.ALL_GATHER),
        reduction("dp", 1e7),
        reduction("mixed", 1e7),
        reduction("one", 1e7),
    ],
    ids=["another collective", "four nodes", "fewer ranks", "one rank"],
)
def test_what_is_not_covered_is_as_the_model_says(other: CommOp):
    timing, modelled = recorded(*TP).exchange(other), model().exchange(other)
    assert timing.seconds.tolist() == modelled.seconds.tolist()
    assert (timing.provenance, timing.algorithm, timing.error) == (modelled.provenance, modelled.algorithm, None)


def test_groups_that_span_other_nodes_than_the_record_are_modelled_beside_those_that_do_not():
    """Four ranks on two nodes were measured: of the four groups the second is such; the third has one and three."""
    exchange = reduction("mixed", 1e7)
    modelled = model().exchange(exchange)
    fast = recorded(*calls({1e7: 1e-9}, ranks=4, nodes=2)).exchange(exchange)
    assert fast.seconds.tolist() == [modelled.seconds[0], 1e-9, *modelled.seconds[2:]]
    assert (fast.provenance, fast.error) == (modelled.provenance, None)
    slow = recorded(*calls({1e7: 1.0}, ranks=4, nodes=2)).exchange(exchange)
    assert slow.seconds.tolist() == [modelled.seconds[0], 1.0, *modelled.seconds[2:]]
    assert (slow.provenance, slow.error) == (Provenance.MEASURED, 0.0)


def test_each_span_of_nodes_has_its_own_times():
    rows = [*calls({1e7: 1.0}, 4, 1), *calls({1e7: 2.0}, 4, 2), *calls({1e7: 3.0}, 4, 4)]
    seconds = recorded(*rows).exchange(reduction("mixed", 1e7)).seconds
    assert seconds[[0, 1, 3]].tolist() == [1.0, 2.0, 3.0]


def test_messages_are_pairs():
    """Each sends to the same GPU of the next node."""
    made = recorded(*calls({1e7: 1.0}, ranks=2, nodes=2, collective=CollectiveType.SEND_RECV))
    assert made.exchange(reduction("pp_next", 1e7, CollectiveType.SEND_RECV)).seconds.tolist() == [1.0] * 32


@pytest.mark.parametrize(
    ("origin", "stands"), [(Origin.PUBLISHED, Provenance.PUBLISHED), (Origin.DERIVED, Provenance.DERIVED)]
)
def test_what_was_not_measured_here_is_never_called_so(origin: Origin, stands: Provenance):
    made = recorded(*TP, origin=origin)
    assert {made.exchange(reduction("tp", size)).provenance for size in (1e7, 3e7)} == {stands}


def test_a_group_that_has_its_links_for_itself_asks_of_them_what_it_takes():
    """Latency and transfer in the model's proportion, on the model's links."""
    for exchange in (reduction("tp", 1e7), reduction("tp", 3e7)):
        made = recorded(*TP)
        demand, modelled = made.demand(exchange), model().demand(exchange)
        assert demand.latency + demand.transfer == pytest.approx(made.exchange(exchange).seconds, rel=1e-9)
        assert demand.latency / demand.transfer == pytest.approx(modelled.latency / modelled.transfer)
        assert demand.crossings.link_index.tolist() == modelled.crossings.link_index.tolist()
        assert demand.flow.tolist() == modelled.flow.tolist()


def test_groups_that_share_links_in_the_model_ask_for_less_than_they_take_together():
    """What they took was measured side by side: record over model is the factor of what each takes alone."""
    exchange = reduction("dp", 1e7)
    made, modelled = recorded(*calls({1e7: 1.0}, ranks=4, nodes=4)), model()
    alone = modelled.demand(exchange)
    longer = 1.0 / modelled.exchange(exchange).seconds
    assert made.demand(exchange).transfer == pytest.approx(alone.transfer * longer)
    assert made.demand(exchange).latency == pytest.approx(alone.latency * longer)


@pytest.mark.parametrize(("role", "ranks", "nodes"), [("tp", 8, 1), ("dp", 4, 4)])
def test_a_record_of_what_the_model_says_changes_nothing(role: str, ranks: int, nodes: int):
    exchange, modelled = reduction(role, 1e7), model()
    seconds = modelled.exchange(exchange).seconds
    assert (seconds == seconds[0]).all()
    made = recorded(*calls({1e7: float(seconds[0])}, ranks, nodes))
    assert made.exchange(exchange).seconds.tolist() == seconds.tolist()
    demand, asked = modelled.demand(exchange), made.demand(exchange)
    assert (asked.latency.tolist(), asked.transfer.tolist()) == (demand.latency.tolist(), demand.transfer.tolist())


def test_what_is_not_covered_asks_for_what_the_model_says():
    for exchange in (reduction("dp", 1e7), reduction("one", 1e7)):
        demand, modelled = recorded(*TP).demand(exchange), model().demand(exchange)
        assert demand.latency.tolist() == modelled.latency.tolist()
        assert demand.transfer.tolist() == modelled.transfer.tolist()


def test_answers_are_remembered():
    made = recorded(*TP)
    assert made.exchange(reduction("tp", 1e7)) is made.exchange(reduction("tp", 1e7))
    assert made.demand(reduction("tp", 1e7)) is made.demand(replace(reduction("tp", 1e7), name="y"))


def test_a_role_that_is_not_there_is_refused():
    with pytest.raises(InputError, match="dp"):
        recorded(*TP).exchange(reduction("dpp", 1e7))


def test_tokens_that_a_record_does_not_know_take_what_the_model_says_of_their_routing() -> None:
    """Beside rows of other collectives; routings that differ in nothing but how many nodes a token may reach."""
    times = []
    for limit in (1, None):
        routing = TokenRouting(TokenDispatcher.DEEPEP, 64, 8, 4, limit, token_bytes=14336.0)
        sent = CommOp("x", CollectiveType.DISPATCH, "mixed", 1e8, routing=routing)
        asked = recorded(*TP)
        assert (asked.exchange(sent).seconds == model().exchange(sent).seconds).all()
        assert asked.exchange(sent).provenance is Provenance.PUBLISHED
        times.append(asked.exchange(sent).seconds[1])
    assert times[0] < times[1]
