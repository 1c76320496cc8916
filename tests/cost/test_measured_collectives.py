"""Exchanges take what groups of their size were measured to take, and what the model says where none were."""

from dataclasses import replace

import numpy as np
import pytest

from clustersim.collectives.library import load_library
from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError
from clustersim.cost.calibration_record import CalibrationRecord, CollectiveSample, RecordOrigin
from clustersim.cost.collective_cost import CollectiveCost
from clustersim.cost.measured_collectives import RECORDED_ALGORITHM, MeasuredCollectives
from clustersim.cost.timing import Bottleneck, Provenance
from clustersim.hardware.clos_fabric import ClosFabric
from clustersim.hardware.clos_spec import LeafSpec, NetworkSpec, NicSpec, NodeSpec, NvlinkSpec, Port, SpineSpec
from clustersim.hardware.ecmp import SpreadEcmp as Spreading
from clustersim.program.program import ProcessGroups
from clustersim.program.task import CollectiveType, CommOp, TokenDispatcher, TokenRouting
from tests.cost.records import CONDITIONS, DEVICE, calls, line

NODE = NodeSpec(8, Port(64e9, 5e-7), NvlinkSpec(8, Port(450e9, 5e-7)), None, NicSpec(8, Port(50e9, 5e-7)))
FABRIC = ClosFabric(NODE, NetworkSpec(LeafSpec(4, 8, 2e-7, 1.0), Spreading(), SpineSpec(1024, 2e-7)), 32)
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


def model() -> CollectiveCost:
    return CollectiveCost(FABRIC, load_library("nccl"), GROUPS)


def recorded(
    *rows: CollectiveSample, origin: RecordOrigin = RecordOrigin.MEASURED, fits: tuple = ()
) -> MeasuredCollectives:
    record = CalibrationRecord(DEVICE, CONDITIONS, collectives=rows, collective_fits=fits, origin=origin)
    return MeasuredCollectives(model(), record, GROUPS, nodes=np.arange(FABRIC.gpu_count) // 8)


def reduction(role: str, payload: float, kind: CollectiveType = CollectiveType.ALL_REDUCE) -> CommOp:
    return CommOp("x", kind, role, payload)


def test_a_measured_payload_takes_what_it_took_in_every_group():
    timing = recorded(*TP).time_comm_op(reduction("tp", 1e7))
    assert timing.seconds.tolist() == [ALPHA + 1e7 / BETA] * 4
    assert (timing.provenance, timing.algorithm, timing.error) == (Provenance.MEASURED, RECORDED_ALGORITHM, 0.0)
    assert timing.tier == "nvlink"


def test_between_measured_payloads_it_lies_between():
    timing = recorded(*TP).time_comm_op(reduction("tp", 3e7))
    assert timing.provenance is Provenance.INTERPOLATED
    assert timing.error is not None
    assert timing.seconds == pytest.approx(ALPHA + 3e7 / BETA, rel=timing.error)


def test_beyond_measured_payloads_the_fit_answers_and_without_one_the_model():
    far = reduction("tp", 1e10)
    timing = recorded(*TP, fits=(line(ALPHA, BETA, 0.06),)).time_comm_op(far)
    assert timing.seconds == pytest.approx(ALPHA + 1e10 / BETA)
    assert (timing.provenance, timing.error) == (Provenance.FITTED, 0.06)
    without = recorded(*TP).time_comm_op(far)
    assert without.seconds.tolist() == model().time_comm_op(far).seconds.tolist()
    assert without.provenance is Provenance.PUBLISHED


def test_a_reduction_takes_what_its_own_format_took_and_else_what_another_did():
    """Twice as long in BF16; a gradient in FP16, that was not measured, and one of which nobody knows it: FP32's."""
    narrow = [replace(row, call=replace(row.call, format=DType.BF16)) for row in calls({1e7: 2e-3})]
    both = recorded(*narrow, *TP)
    asked = {form: replace(reduction("tp", 1e7), reduce_dtype=form) for form in (None, *DType)}
    wide, once = ALPHA + 1e7 / BETA, recorded(*narrow)
    assert {form: float(both.time_comm_op(comm_op).seconds[0]) for form, comm_op in asked.items()} == {
        **dict.fromkeys(asked, wide),
        DType.BF16: 2e-3,
    }
    assert all(float(once.time_comm_op(item).seconds[0]) == 2e-3 for item in asked.values())


def test_mostly_alpha_is_latency_and_mostly_beta_is_bandwidth():
    """10 kB take 30.1 us, of which all counts as latency; 100 MB take a millisecond."""
    made = recorded(*TP)
    assert made.time_comm_op(reduction("tp", 1e4)).bottleneck is Bottleneck.LATENCY
    assert made.time_comm_op(reduction("tp", 1e8)).bottleneck is Bottleneck.BANDWIDTH


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
    timing, modelled = recorded(*TP).time_comm_op(other), model().time_comm_op(other)
    assert timing.seconds.tolist() == modelled.seconds.tolist()
    assert (timing.provenance, timing.algorithm, timing.error) == (modelled.provenance, modelled.algorithm, None)


def test_groups_that_span_other_nodes_than_the_record_are_modelled_beside_those_that_do_not():
    """Four ranks on two nodes were measured: of the four groups the second is such; the third has one and three."""
    exchange = reduction("mixed", 1e7)
    modelled = model().time_comm_op(exchange)
    fast = recorded(*calls({1e7: 1e-9}, ranks=4, nodes=2)).time_comm_op(exchange)
    assert fast.seconds.tolist() == [modelled.seconds[0], 1e-9, *modelled.seconds[2:]]
    assert (fast.provenance, fast.error) == (modelled.provenance, None)
    slow = recorded(*calls({1e7: 1.0}, ranks=4, nodes=2)).time_comm_op(exchange)
    assert slow.seconds.tolist() == [modelled.seconds[0], 1.0, *modelled.seconds[2:]]
    assert (slow.provenance, slow.error) == (Provenance.MEASURED, 0.0)


def test_each_span_of_nodes_has_its_own_times():
    rows = [*calls({1e7: 1.0}, 4, 1), *calls({1e7: 2.0}, 4, 2), *calls({1e7: 3.0}, 4, 4)]
    seconds = recorded(*rows).time_comm_op(reduction("mixed", 1e7)).seconds
    assert seconds[[0, 1, 3]].tolist() == [1.0, 2.0, 3.0]


def test_messages_are_pairs():
    """Each sends to the same GPU of the next node."""
    made = recorded(*calls({1e7: 1.0}, ranks=2, nodes=2, collective=CollectiveType.SEND_RECV))
    assert made.time_comm_op(reduction("pp_next", 1e7, CollectiveType.SEND_RECV)).seconds.tolist() == [1.0] * 32


@pytest.mark.parametrize(
    ("origin", "stands"), [(RecordOrigin.PUBLISHED, Provenance.PUBLISHED), (RecordOrigin.DERIVED, Provenance.DERIVED)]
)
def test_what_was_not_measured_here_is_never_called_so(origin: RecordOrigin, stands: Provenance):
    made = recorded(*TP, origin=origin)
    assert {made.time_comm_op(reduction("tp", size)).provenance for size in (1e7, 3e7)} == {stands}


def test_a_group_that_has_its_links_for_itself_asks_of_them_what_it_takes():
    """Latency and transfer in the model's proportion, on the model's links."""
    for exchange in (reduction("tp", 1e7), reduction("tp", 3e7)):
        made = recorded(*TP)
        demand, modelled = made.link_demand(exchange), model().link_demand(exchange)
        assert demand.latency + demand.transfer == pytest.approx(made.time_comm_op(exchange).seconds, rel=1e-9)
        assert demand.latency / demand.transfer == pytest.approx(modelled.latency / modelled.transfer)
        assert demand.link_loads.link_index.tolist() == modelled.link_loads.link_index.tolist()
        assert demand.flow.tolist() == modelled.flow.tolist()


def test_groups_that_share_links_in_the_model_ask_for_less_than_they_take_together():
    """What they took was measured side by side: record over model is the factor of what each takes alone."""
    exchange = reduction("dp", 1e7)
    made, modelled = recorded(*calls({1e7: 1.0}, ranks=4, nodes=4)), model()
    alone = modelled.link_demand(exchange)
    longer = 1.0 / modelled.time_comm_op(exchange).seconds
    assert made.link_demand(exchange).transfer == pytest.approx(alone.transfer * longer)
    assert made.link_demand(exchange).latency == pytest.approx(alone.latency * longer)


@pytest.mark.parametrize(("role", "ranks", "nodes"), [("tp", 8, 1), ("dp", 4, 4)])
def test_a_record_of_what_the_model_says_changes_nothing(role: str, ranks: int, nodes: int):
    exchange, modelled = reduction(role, 1e7), model()
    seconds = modelled.time_comm_op(exchange).seconds
    assert (seconds == seconds[0]).all()
    made = recorded(*calls({1e7: float(seconds[0])}, ranks, nodes))
    assert made.time_comm_op(exchange).seconds.tolist() == seconds.tolist()
    demand, asked = modelled.link_demand(exchange), made.link_demand(exchange)
    assert (asked.latency.tolist(), asked.transfer.tolist()) == (demand.latency.tolist(), demand.transfer.tolist())


def test_what_is_not_covered_asks_for_what_the_model_says():
    for exchange in (reduction("dp", 1e7), reduction("one", 1e7)):
        demand, modelled = recorded(*TP).link_demand(exchange), model().link_demand(exchange)
        assert demand.latency.tolist() == modelled.latency.tolist()
        assert demand.transfer.tolist() == modelled.transfer.tolist()


def test_answers_are_remembered():
    made = recorded(*TP)
    assert made.time_comm_op(reduction("tp", 1e7)) is made.time_comm_op(reduction("tp", 1e7))
    assert made.link_demand(reduction("tp", 1e7)) is made.link_demand(replace(reduction("tp", 1e7), name="y"))


def test_a_role_that_is_not_there_is_refused():
    with pytest.raises(InputError, match="dp"):
        recorded(*TP).time_comm_op(reduction("dpp", 1e7))


def test_tokens_that_a_record_does_not_know_take_what_the_model_says_of_their_routing() -> None:
    """Beside rows of other collectives; routings that differ in nothing but how many nodes a token may reach."""
    times = []
    for limit in (1, None):
        routing = TokenRouting(TokenDispatcher.DEEPEP, 64, 8, 4, limit, token_bytes=14336.0)
        sent = CommOp("x", CollectiveType.DISPATCH, "mixed", 1e8, routing=routing)
        asked = recorded(*TP)
        assert (asked.time_comm_op(sent).seconds == model().time_comm_op(sent).seconds).all()
        assert asked.time_comm_op(sent).provenance is Provenance.PUBLISHED
        times.append(asked.time_comm_op(sent).seconds[1])
    assert times[0] < times[1]
