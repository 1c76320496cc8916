"""What links carry over time is, summed up, what collectives put on them, and is where and when their spans are."""

import numpy as np
import pytest
from hypothesis import given

from clustersim import RenderedResult, Scenario, simulate
from clustersim.common.arrays import FloatArray
from clustersim.common.errors import InputError
from clustersim.results.transfer_events import collect_comm_volumes, find_transfers
from tests.conftest import examples
from tests.strategies import scenarios

PAIR = {
    "model": "llama-tiny",
    "cluster": {"name": "dgx-h100", "gpus": 16},
    "layout": {"tp": 8, "pp": 2, "dp": 1, "sequence_parallel": True},
    "training": {"sequence": 512, "global_batch": 4},
}


def carried(result: RenderedResult) -> FloatArray:
    """Bytes on every link, counted by block and collective without looking at when."""
    fabric, rows = result.scenario.cluster.fabric, result.trace_table
    total = np.zeros(len(fabric.links.kind))
    for kind in collect_comm_volumes(rows, find_transfers(rows), result.network_volumes):
        amount = (
            kind.link_volumes.fraction
            * kind.class_bytes[kind.class_of_group[kind.link_volumes.group_index]]
            * rows.step_count
        )
        total += np.bincount(kind.link_volumes.link_id, amount, minlength=len(total))
    return total


@given(scenarios())
@examples(40)
def test_the_integral_of_a_links_load_is_what_it_carried(scenario: Scenario) -> None:
    result = simulate(scenario)
    expected, loads = carried(result), result.link_loads(bins=37)
    fabric = scenario.cluster.fabric
    numbers = [fabric.find_link(link.source, link.target) for link in loads.links]
    assert sorted(numbers) == np.flatnonzero(expected).tolist()
    assert loads.total_bytes == pytest.approx(expected[numbers], rel=1e-9)
    assert (loads.byte_rates * np.diff(loads.bin_edges)).sum(axis=1) == pytest.approx(expected[numbers], rel=1e-9)
    assert loads.bin_edges[-1] == pytest.approx(result.trace.makespan)


@given(scenarios())
@examples(15)
def test_it_does_not_depend_on_folding(scenario: Scenario) -> None:
    folded, every = (
        simulate(scenario.with_overrides(*item)).link_loads(bins=5) for item in ([], ["cost.symmetry=off"])
    )
    assert folded.links == every.links
    assert folded.bytes_by_bin == pytest.approx(
        every.bytes_by_bin, rel=1e-6, abs=1e-6 * max(float(every.bytes_by_bin.max(initial=0.0)), 1.0)
    )


def test_a_message_between_stages_is_on_its_link_while_it_is_sent() -> None:
    result = simulate(Scenario.from_mapping(PAIR))
    loads = result.link_loads(("nic0.0", "leaf0.0"), bins=20_000)
    trace, tasks = result.trace, result.program.programs[0].tasks
    (sends,) = [[row for row in trace.rank_events(0).tolist() if type(tasks[int(trace.task[row])]).__name__ == "Send"]]
    payload = sum(tasks[int(trace.task[row])].comm_op.payload for row in sends)  # type: ignore[union-attr]
    others = loads.total_bytes.sum() - payload
    assert 0.0 <= others < 1e-3 * payload  # the norm of gradients is summed over stages
    middle = (loads.bin_edges[1:] + loads.bin_edges[:-1]) / 2
    width = loads.bin_edges[1]
    during = np.zeros(len(middle), bool)
    for row in sends:
        during |= (middle > trace.start[row] - width) & (middle < trace.end[row] + width)
    assert loads.bytes_by_bin[0, during].sum() == pytest.approx(payload, rel=1e-3)
    assert loads.byte_rates.max() <= loads.links[0].bandwidth


def test_tensor_parallel_exchanges_are_where_their_operations_are() -> None:
    """Bins of a block without an exchange carry nothing: a kernel's time is no collective's."""
    result = simulate(Scenario.from_mapping(PAIR | {"layout": {"tp": 8, "pp": 1, "dp": 2}}))
    (port,) = {
        link.source for link in result.link_loads().links if link.source == "gpu0" and link.kind.value == "nvlink"
    }
    other = next(link.target for link in result.link_loads().links if link.source == port)
    loads = result.link_loads((port, other), bins=5_000)
    spans = result.operation_spans(0)
    blocks = result.program.programs[0].tasks
    moves = [
        blocks[task].block.operations[operation].exchange is not None  # type: ignore[union-attr]
        for task, operation in zip(spans.task.tolist(), spans.operation.tolist(), strict=True)
    ]
    middle, width = (loads.bin_edges[1:] + loads.bin_edges[:-1]) / 2, loads.bin_edges[1]
    during = np.zeros(len(middle), bool)
    for start, end in zip(spans.start[moves].tolist(), spans.end[moves].tolist(), strict=True):
        during |= (middle > start - width) & (middle < end + width)
    outside = result.trace.rank_events(0)
    for row in outside[result.trace.stream[outside] != 0].tolist():
        during |= (middle > result.trace.start[row] - width) & (middle < result.trace.end[row] + width)
    assert 0.1 < during.mean() < 0.9
    assert (loads.bytes_by_bin[0, ~during] == 0.0).all()
    assert loads.bytes_by_bin[0, during].sum() > 0.0


def test_a_table_has_a_row_for_each_link_and_bin() -> None:
    result = simulate(Scenario.from_mapping(PAIR))
    loads = result.link_loads(("nic0.0", "leaf0.0"), ("leaf0.0", "nic1.0"), bins=3)
    table = loads.to_columns()
    assert {len(values) for values in table.values()} == {6}
    assert table["source"].tolist() == ["nic0.0"] * 3 + ["leaf0.0"] * 3
    assert table["start"].tolist() == [*loads.bin_edges[:-1].tolist()] * 2
    assert table["bytes_per_second"].tolist() == [*loads.byte_rates[0].tolist(), *loads.byte_rates[1].tolist()]


def test_what_is_not_there_or_too_much_is_said() -> None:
    result = simulate(Scenario.from_mapping(PAIR))
    with pytest.raises(InputError, match=r"no link leads from nic0.0 to leaf0.1; from nic0.0 links lead to"):
        result.link_loads(("nic0.0", "leaf0.1"))
    with pytest.raises(InputError, match="bins: 0; 1 is the fewest"):
        result.link_loads(bins=0)
    with pytest.raises(InputError, match="links in 50,000,000 bins are too many; name some links"):
        result.link_loads(bins=50_000_000)
