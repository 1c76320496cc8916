"""Analysis of a trace some classes at a time is that of all of it."""

import numpy as np
import pytest
from hypothesis import given

from clustersim.cost.timing import Bottleneck, CommTiming, Provenance
from clustersim.program.task import CommOp
from clustersim.results import class_blocks, trace_table
from clustersim.results.provenance import busy_time_items
from clustersim.results.step_times import step_times
from clustersim.results.time_breakdown import compute_breakdown
from clustersim.results.time_losses import matmul_share
from tests.results.random_trace_cases import trace_cases
from tests.results.trace_cases import TraceCase


def comm_timing(_: CommOp) -> CommTiming:
    return CommTiming(np.ones(1), Provenance.PUBLISHED, Bottleneck.BANDWIDTH, "ring", "leaf")


def analysis(case: TraceCase) -> list[object]:
    """Everything that is computed some events at a time."""
    table, timing = case.trace_table, case.segment_timing
    items = busy_time_items(table, timing, comm_timing)
    return [
        *compute_breakdown(table, timing).seconds.ravel().tolist(),
        *step_times(table).tolist(),
        *table.segment_run_counts,
        *sorted(item.seconds for item in items),
        matmul_share(table, timing),
    ]


@given(trace_cases())
def test_blocks_of_classes_give_what_all_classes_give(case: TraceCase) -> None:
    whole = analysis(case)
    with pytest.MonkeyPatch.context() as patch:
        for module in (class_blocks, trace_table):
            patch.setattr(module, "BLOCK_EVENTS", 3)
        in_blocks = analysis(case)
    assert in_blocks == pytest.approx(whole, rel=1e-9, abs=1e-9)
