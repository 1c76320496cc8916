"""Collectives take the times measured for groups of their size and node span, and the model's elsewhere."""

from dataclasses import replace

import numpy as np
import pytest

from clustersim.collectives.library_files import load_library
from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError
from clustersim.cost.calibration_record import CalibrationRecord, CollectiveSample, ProfileAnchor
from clustersim.cost.collective_cost import CollectiveCost
from clustersim.cost.measured_collectives import RECORDED_ALGORITHM, MeasuredCollectives
from clustersim.cost.record_kinds import RecordOrigin
from clustersim.cost.timing import Bottleneck, Provenance
from clustersim.hardware.clos_fabric import ClosFabric
from clustersim.hardware.clos_spec import LeafSpec, NetworkSpec, NicSpec, NodeSpec, NvlinkSpec, Port, SpineSpec
from clustersim.hardware.ecmp import SpreadEcmp as Spreading
from clustersim.model.training import AttentionBackend
from clustersim.program.program import ProcessGroups
from clustersim.program.task import CollectiveType, CommOp, TokenDispatcher, TokenRouting
from tests.cost.records import CONDITIONS, DEVICE, collective_fit, collective_samples

NODE = NodeSpec(8, Port(64e9, 5e-7), NvlinkSpec(8, Port(450e9, 5e-7)), None, NicSpec(8, Port(50e9, 5e-7)))
FABRIC = ClosFabric(NODE, NetworkSpec(LeafSpec(4, 8, 2e-7, 1.0), Spreading(), SpineSpec(1024, 2e-7)), 32)
RANKS = np.arange(32)
MEMBERS = {
    "tp": RANKS.reshape(-1, 8),
    "dp": np.ascontiguousarray(RANKS.reshape(-1, 8).T),
    "one": RANKS[:, None],
    # on one node, on two nodes evenly, on two nodes unevenly, on four nodes
    "mixed": np.array([[0, 1, 2, 3], [4, 5, 8, 9], [6, 10, 11, 12], [7, 13, 16, 24]]),
    "pp_next": np.stack([RANKS, np.roll(RANKS, -8)], axis=1),
}
GROUPS = {name: ProcessGroups(name, members, ordered=name == "pp_next") for name, members in MEMBERS.items()}
ALPHA, BETA = 3e-5, 1e11
SIZES = [1e4, 1e5, 1e6, 1e7, 1e8]
TP = collective_samples({size: ALPHA + size / BETA for size in SIZES})


def modelled_collectives() -> CollectiveCost:
    return CollectiveCost(FABRIC, load_library("nccl"), GROUPS)


def measured_collectives(
    *samples: CollectiveSample,
    origin: RecordOrigin = RecordOrigin.MEASURED,
    fits: tuple = (),
    profile: ProfileAnchor | None = None,
) -> MeasuredCollectives:
    record = CalibrationRecord(
        DEVICE, CONDITIONS, collectives=samples, collective_fits=fits, origin=origin, profile=profile
    )
    return MeasuredCollectives(modelled_collectives(), record, GROUPS, nodes=np.arange(FABRIC.gpu_count) // 8)


def reduction_op(comm_group: str, payload: float, kind: CollectiveType = CollectiveType.ALL_REDUCE) -> CommOp:
    return CommOp("x", kind, comm_group, payload)


@pytest.mark.parametrize("payload", [1e3, 1e4, 1e8, 1e9])
def test_beyond_the_payloads_of_a_profiled_step_the_model_is_scaled(payload: float) -> None:
    """Profiled collectives that take a multiple of the model's time take it at every payload."""
    modelled = modelled_collectives()
    factors = {1e4: 3.0, 1e8: 1.5}
    samples = collective_samples(
        {
            size: factor * float(modelled.time_comm_op(reduction_op("tp", size)).seconds[0])
            for size, factor in factors.items()
        }
    )
    profile = ProfileAnchor("traces", 8, 1, 1.0, 1.0, 1.0, AttentionBackend.FLASH)
    timing = measured_collectives(*samples, profile=profile).time_comm_op(reduction_op("tp", payload))
    expected = factors[1e4 if payload <= 1e4 else 1e8] * modelled.time_comm_op(reduction_op("tp", payload)).seconds
    assert timing.seconds == pytest.approx(expected)
    assert timing.provenance is (Provenance.MEASURED if payload in factors else Provenance.FITTED)


def test_a_measured_payload_takes_its_time_in_every_group():
    timing = measured_collectives(*TP).time_comm_op(reduction_op("tp", 1e7))
    assert timing.seconds.tolist() == [ALPHA + 1e7 / BETA] * 4
    assert (timing.provenance, timing.algorithm, timing.error) == (Provenance.MEASURED, RECORDED_ALGORITHM, 0.0)
    assert timing.tier == "nvlink"


def test_payloads_between_samples_are_interpolated():
    timing = measured_collectives(*TP).time_comm_op(reduction_op("tp", 3e7))
    assert timing.provenance is Provenance.INTERPOLATED
    assert timing.error is not None
    assert timing.seconds == pytest.approx(ALPHA + 3e7 / BETA, rel=timing.error)


def test_extrapolation_uses_the_fit_or_else_the_model():
    large_op = reduction_op("tp", 1e10)
    timing = measured_collectives(*TP, fits=(collective_fit(ALPHA, BETA, 0.06),)).time_comm_op(large_op)
    assert timing.seconds == pytest.approx(ALPHA + 1e10 / BETA)
    assert (timing.provenance, timing.error) == (Provenance.FITTED, 0.06)
    without_fit = measured_collectives(*TP).time_comm_op(large_op)
    assert without_fit.seconds.tolist() == modelled_collectives().time_comm_op(large_op).seconds.tolist()
    assert without_fit.provenance is Provenance.PUBLISHED


def test_reductions_use_samples_of_their_format_or_else_another():
    """Twice as long in BF16; FP16, which was not measured, and an unknown format take FP32's time."""
    bf16_samples = [
        replace(sample, call=replace(sample.call, dtype=DType.BF16)) for sample in collective_samples({1e7: 2e-3})
    ]
    both_formats = measured_collectives(*bf16_samples, *TP)
    op_by_format = {form: replace(reduction_op("tp", 1e7), reduce_dtype=form) for form in (None, *DType)}
    fp32_seconds, bf16_only = ALPHA + 1e7 / BETA, measured_collectives(*bf16_samples)
    assert {form: float(both_formats.time_comm_op(comm_op).seconds[0]) for form, comm_op in op_by_format.items()} == {
        **dict.fromkeys(op_by_format, fp32_seconds),
        DType.BF16: 2e-3,
    }
    assert all(float(bf16_only.time_comm_op(item).seconds[0]) == 2e-3 for item in op_by_format.values())


def test_mostly_alpha_is_latency_and_mostly_beta_is_bandwidth():
    """10 kB take 30.1 us, of which all counts as latency; 100 MB take a millisecond."""
    measured = measured_collectives(*TP)
    assert measured.time_comm_op(reduction_op("tp", 1e4)).bottleneck is Bottleneck.LATENCY
    assert measured.time_comm_op(reduction_op("tp", 1e8)).bottleneck is Bottleneck.BANDWIDTH


@pytest.mark.parametrize(
    "other",
    [
        reduction_op("tp", 1e7, CollectiveType.ALL_GATHER),
        reduction_op("dp", 1e7),
        reduction_op("mixed", 1e7),
        reduction_op("one", 1e7),
    ],
    ids=["another collective", "four nodes", "fewer ranks", "one rank"],
)
def test_uncovered_collectives_take_the_models_time(other: CommOp):
    timing, modelled = measured_collectives(*TP).time_comm_op(other), modelled_collectives().time_comm_op(other)
    assert timing.seconds.tolist() == modelled.seconds.tolist()
    assert (timing.provenance, timing.algorithm, timing.error) == (modelled.provenance, modelled.algorithm, None)


def test_only_groups_with_the_sampled_node_span_take_measured_times():
    """Four ranks on two nodes were measured: only the second of four groups matches; the third has one and three."""
    comm_op = reduction_op("mixed", 1e7)
    modelled = modelled_collectives().time_comm_op(comm_op)
    fast = measured_collectives(*collective_samples({1e7: 1e-9}, ranks=4, nodes=2)).time_comm_op(comm_op)
    assert fast.seconds.tolist() == [modelled.seconds[0], 1e-9, *modelled.seconds[2:]]
    assert (fast.provenance, fast.error) == (modelled.provenance, None)
    slow = measured_collectives(*collective_samples({1e7: 1.0}, ranks=4, nodes=2)).time_comm_op(comm_op)
    assert slow.seconds.tolist() == [modelled.seconds[0], 1.0, *modelled.seconds[2:]]
    assert (slow.provenance, slow.error) == (Provenance.MEASURED, 0.0)


def test_each_span_of_nodes_has_its_own_times():
    samples = [
        *collective_samples({1e7: 1.0}, 4, 1),
        *collective_samples({1e7: 2.0}, 4, 2),
        *collective_samples({1e7: 3.0}, 4, 4),
    ]
    seconds = measured_collectives(*samples).time_comm_op(reduction_op("mixed", 1e7)).seconds
    assert seconds[[0, 1, 3]].tolist() == [1.0, 2.0, 3.0]


def test_send_recv_samples_apply_to_pairs():
    """Each sends to the same GPU of the next node."""
    measured = measured_collectives(
        *collective_samples({1e7: 1.0}, ranks=2, nodes=2, collective=CollectiveType.SEND_RECV)
    )
    assert measured.time_comm_op(reduction_op("pp_next", 1e7, CollectiveType.SEND_RECV)).seconds.tolist() == [1.0] * 32


@pytest.mark.parametrize(
    ("origin", "stands"), [(RecordOrigin.PUBLISHED, Provenance.PUBLISHED), (RecordOrigin.DERIVED, Provenance.DERIVED)]
)
def test_unmeasured_records_never_have_measured_provenance(origin: RecordOrigin, stands: Provenance):
    measured = measured_collectives(*TP, origin=origin)
    assert {measured.time_comm_op(reduction_op("tp", size)).provenance for size in (1e7, 3e7)} == {stands}


def test_demand_of_groups_without_shared_links_is_the_measured_time():
    """Latency and transfer in the model's proportion, on the model's links."""
    for comm_op in (reduction_op("tp", 1e7), reduction_op("tp", 3e7)):
        measured = measured_collectives(*TP)
        demand, modelled = measured.link_demand(comm_op), modelled_collectives().link_demand(comm_op)
        assert demand.latency + demand.transfer == pytest.approx(measured.time_comm_op(comm_op).seconds, rel=1e-9)
        assert demand.latency / demand.transfer == pytest.approx(modelled.latency / modelled.transfer)
        assert demand.link_loads.link_index.tolist() == modelled.link_loads.link_index.tolist()
        assert demand.flow.tolist() == modelled.flow.tolist()


def test_demand_of_groups_with_shared_links_scales_the_uncontended_model():
    """Samples include the contention of concurrent groups: record over model scales the uncontended demand."""
    comm_op = reduction_op("dp", 1e7)
    measured, modelled = measured_collectives(*collective_samples({1e7: 1.0}, ranks=4, nodes=4)), modelled_collectives()
    uncontended = modelled.link_demand(comm_op)
    slowdown = 1.0 / modelled.time_comm_op(comm_op).seconds
    assert measured.link_demand(comm_op).transfer == pytest.approx(uncontended.transfer * slowdown)
    assert measured.link_demand(comm_op).latency == pytest.approx(uncontended.latency * slowdown)


@pytest.mark.parametrize(("comm_group", "ranks", "nodes"), [("tp", 8, 1), ("dp", 4, 4)])
def test_a_record_equal_to_the_model_changes_nothing(comm_group: str, ranks: int, nodes: int):
    comm_op, modelled = reduction_op(comm_group, 1e7), modelled_collectives()
    seconds = modelled.time_comm_op(comm_op).seconds
    assert (seconds == seconds[0]).all()
    measured = measured_collectives(*collective_samples({1e7: float(seconds[0])}, ranks, nodes))
    assert measured.time_comm_op(comm_op).seconds.tolist() == seconds.tolist()
    demand, measured_demand = modelled.link_demand(comm_op), measured.link_demand(comm_op)
    assert (measured_demand.latency.tolist(), measured_demand.transfer.tolist()) == (
        demand.latency.tolist(),
        demand.transfer.tolist(),
    )


def test_demand_of_uncovered_collectives_is_the_models():
    for comm_op in (reduction_op("dp", 1e7), reduction_op("one", 1e7)):
        demand, modelled = measured_collectives(*TP).link_demand(comm_op), modelled_collectives().link_demand(comm_op)
        assert demand.latency.tolist() == modelled.latency.tolist()
        assert demand.transfer.tolist() == modelled.transfer.tolist()


def test_timings_and_demands_are_cached():
    measured = measured_collectives(*TP)
    assert measured.time_comm_op(reduction_op("tp", 1e7)) is measured.time_comm_op(reduction_op("tp", 1e7))
    assert measured.link_demand(reduction_op("tp", 1e7)) is measured.link_demand(
        replace(reduction_op("tp", 1e7), name="y")
    )


def test_an_unknown_process_group_is_rejected():
    with pytest.raises(InputError, match="dp"):
        measured_collectives(*TP).time_comm_op(reduction_op("dpp", 1e7))


def test_unmeasured_dispatches_take_the_models_time_of_their_routing() -> None:
    """With samples of other collectives; routings that differ only in how many nodes a token may reach."""
    times = []
    for limit in (1, None):
        routing = TokenRouting(TokenDispatcher.DEEPEP, 64, 8, 4, limit, token_bytes=14336.0)
        dispatch_op = CommOp("x", CollectiveType.DISPATCH, "mixed", 1e8, routing=routing)
        measured = measured_collectives(*TP)
        assert (
            measured.time_comm_op(dispatch_op).seconds == modelled_collectives().time_comm_op(dispatch_op).seconds
        ).all()
        assert measured.time_comm_op(dispatch_op).provenance is Provenance.PUBLISHED
        times.append(measured.time_comm_op(dispatch_op).seconds[1])
    assert times[0] < times[1]
