"""Link load over time: it sums to the bytes of the collectives, and follows the position of their events."""

import numpy as np
import pytest
from hypothesis import given

from clustersim import RenderedResult, Scenario, simulate
from clustersim.common.arrays import FloatArray
from clustersim.common.errors import InputError
from clustersim.results.transfer_events import collect_comm_volumes, find_transfers
from tests.conftest import examples
from tests.strategies import scenarios

TWO_STAGES = {
    "model": "llama-tiny",
    "cluster": {"name": "dgx-h100", "gpus": 16},
    "layout": {"tp": 8, "pp": 2, "dp": 1, "sequence_parallel": True},
    "training": {"sequence": 512, "global_batch": 4},
}


def link_bytes(result: RenderedResult) -> FloatArray:
    """Bytes on every link, summed over segments and collectives without regard to time."""
    fabric, trace_table = result.scenario.cluster.fabric, result.trace_table
    total = np.zeros(len(fabric.links.kind))
    for comm_volumes in collect_comm_volumes(trace_table, find_transfers(trace_table), result.network_volumes):
        carried_bytes = (
            comm_volumes.link_volumes.fraction
            * comm_volumes.class_bytes[comm_volumes.class_of_group[comm_volumes.link_volumes.group_index]]
            * trace_table.step_count
        )
        total += np.bincount(comm_volumes.link_volumes.link_id, carried_bytes, minlength=len(total))
    return total


@given(scenarios())
@examples(40)
def test_link_load_integrates_to_the_carried_bytes(scenario: Scenario) -> None:
    result = simulate(scenario)
    expected, loads = link_bytes(result), result.link_loads(bins=37)
    fabric = scenario.cluster.fabric
    link_ids = [fabric.find_link(link.source, link.target) for link in loads.links]
    assert sorted(link_ids) == np.flatnonzero(expected).tolist()
    assert loads.total_bytes == pytest.approx(expected[link_ids], rel=1e-9)
    assert (loads.byte_rates * np.diff(loads.bin_edges)).sum(axis=1) == pytest.approx(expected[link_ids], rel=1e-9)
    assert loads.bin_edges[-1] == pytest.approx(result.trace.makespan)


@given(scenarios())
@examples(15)
def test_link_loads_do_not_depend_on_folding(scenario: Scenario) -> None:
    folded, unfolded = (
        simulate(scenario.with_overrides(*overrides)).link_loads(bins=5) for overrides in ([], ["cost.symmetry=off"])
    )
    assert folded.links == unfolded.links
    assert folded.bytes_by_bin == pytest.approx(
        unfolded.bytes_by_bin, rel=1e-6, abs=1e-6 * max(float(unfolded.bytes_by_bin.max(initial=0.0)), 1.0)
    )


def test_a_p2p_message_loads_its_link_while_it_is_transferred() -> None:
    result = simulate(Scenario.from_mapping(TWO_STAGES))
    loads = result.link_loads(("nic0.0", "leaf0.0"), bins=20_000)
    trace, tasks = result.trace, result.program.programs[0].tasks
    (sends,) = [
        [event for event in trace.rank_events(0).tolist() if type(tasks[int(trace.task[event])]).__name__ == "SendTask"]
    ]
    payload = sum(tasks[int(trace.task[event])].comm_op.payload for event in sends)  # type: ignore[union-attr]
    other_bytes = loads.total_bytes.sum() - payload
    assert 0.0 <= other_bytes < 1e-3 * payload  # the gradient norm is all-reduced over stages
    bin_centers = (loads.bin_edges[1:] + loads.bin_edges[:-1]) / 2
    bin_width = loads.bin_edges[1]
    is_sending = np.zeros(len(bin_centers), bool)
    for event in sends:
        is_sending |= (bin_centers > trace.start[event] - bin_width) & (bin_centers < trace.end[event] + bin_width)
    assert loads.bytes_by_bin[0, is_sending].sum() == pytest.approx(payload, rel=1e-3)
    assert loads.byte_rates.max() <= loads.links[0].bandwidth


def test_tensor_parallel_traffic_is_at_the_time_of_its_operations() -> None:
    """Bins without communication carry nothing: traffic is not spread over the kernels of a segment."""
    mapping = TWO_STAGES | {"layout": {"tp": 8, "pp": 1, "dp": 2}, "framework": "ideal"}
    result = simulate(Scenario.from_mapping(mapping))
    (port,) = {
        link.source for link in result.link_loads().links if link.source == "gpu0" and link.kind.value == "nvlink"
    }
    other = next(link.target for link in result.link_loads().links if link.source == port)
    loads = result.link_loads((port, other), bins=5_000)
    spans = result.operation_spans(0)
    tasks = result.program.programs[0].tasks
    is_comm = [
        tasks[task].segment.operations[operation].comm_op is not None  # type: ignore[union-attr]
        for task, operation in zip(spans.task.tolist(), spans.operation.tolist(), strict=True)
    ]
    bin_centers, bin_width = (loads.bin_edges[1:] + loads.bin_edges[:-1]) / 2, loads.bin_edges[1]
    is_communicating = np.zeros(len(bin_centers), bool)
    for start, end in zip(spans.start[is_comm].tolist(), spans.end[is_comm].tolist(), strict=True):
        is_communicating |= (bin_centers > start - bin_width) & (bin_centers < end + bin_width)
    rank_events = result.trace.rank_events(0)
    for event in rank_events[result.trace.stream[rank_events] != 0].tolist():
        is_communicating |= (bin_centers > result.trace.start[event] - bin_width) & (
            bin_centers < result.trace.end[event] + bin_width
        )
    assert 0.1 < is_communicating.mean() < 0.9
    assert (loads.bytes_by_bin[0, ~is_communicating] == 0.0).all()
    assert loads.bytes_by_bin[0, is_communicating].sum() > 0.0


def test_unknown_links_and_bad_bin_counts_are_refused() -> None:
    result = simulate(Scenario.from_mapping(TWO_STAGES))
    with pytest.raises(InputError, match=r"no link.*nic0\.0 to leaf0\.1.*nic0\.0"):
        result.link_loads(("nic0.0", "leaf0.1"))
    with pytest.raises(InputError, match="bins: 0; 1 is the fewest"):
        result.link_loads(bins=0)
    with pytest.raises(InputError, match="links in 50,000,000 bins are too many; name some links"):
        result.link_loads(bins=50_000_000)
