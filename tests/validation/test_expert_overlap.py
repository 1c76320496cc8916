"""How much of expert communication is concurrent with matmuls and attention, like for like with a published profile?

Qwen3-30B on 16 H100 with Hybrid-EP, NVIDIA-NeMo/Megatron-Bridge@067f987,
skills/nemo-mbridge-perf-expert-parallel-overlap: of 8.25 s of communication 9 ms without overlap, of 10.83 s 3.96 s
with it; 24.71 s a step without, 20.99 s with it.
"""

from typing import Any

import numpy as np
import pytest

from clustersim import RenderedResult, Scenario, simulate
from clustersim.model.kernels import TENSOR_CORE_KINDS
from clustersim.program.task import ComputeTask, Stream
from clustersim.results.intervals import Intervals, intersect

MAPPING: dict[str, Any] = {
    "model": "qwen3-30b-a3b",
    "cluster": {"name": "dgx-h100", "gpus": 16},
    "layout": {"ep": 16, "dispatcher": "hybridep", "data": {"zero": {"stage": 1, "bucket": "megatron"}}},
    "training": {"sequence": 4096, "global_batch": 1024, "overheads": {"router_loss": True}},
    "framework": {"name": "megatron-bridge", "recipe": "performance"},
}


def run(*, overlap: bool) -> RenderedResult:
    layout = MAPPING["layout"] | {"overlap_moe_expert_parallel_comm": overlap}
    return simulate(Scenario.from_mapping({**MAPPING, "layout": layout}))


def communication_and_hidden_seconds(result: RenderedResult) -> tuple[float, float]:
    """Seconds of dispatches and combines of rank 0, and of those concurrent with matmuls and attention."""
    tasks, spans, events = result.program.programs[0].tasks, result.operation_spans(0), result.trace
    is_matmul, is_tokens = np.zeros((2, len(spans)), dtype=bool)
    for index, (task_id, operation_index) in enumerate(zip(spans.task.tolist(), spans.operation.tolist(), strict=True)):
        task = tasks[task_id]
        assert isinstance(task, ComputeTask)
        operation = task.segment.operations[operation_index]
        is_matmul[index] = operation.kernel is not None and operation.kernel.kind in TENSOR_CORE_KINDS
        is_tokens[index] = operation.moe_comm is not None
    ep_events = events.rank_events(0, Stream.EP)
    travelling = _union(events.start[ep_events], events.end[ep_events])
    in_segments = _union(spans.start[is_tokens], spans.end[is_tokens])
    total = travelling.seconds.sum() + in_segments.seconds.sum()
    if not len(travelling):
        return float(total), 0.0
    *_, hidden = intersect(travelling, _union(spans.start[is_matmul], spans.end[is_matmul]))
    return float(total), float(hidden.seconds.sum())


def _union(start: np.ndarray, end: np.ndarray) -> Intervals:
    return Intervals(np.zeros(len(start), dtype=np.int64), start, end).merge_overlapping()


def test_the_step_is_right_and_too_much_is_hidden() -> None:
    """`docs/models.md` says by how much, and why the step is right nevertheless."""
    result, (without, nothing) = run(overlap=True), communication_and_hidden_seconds(run(overlap=False))
    total, hidden = communication_and_hidden_seconds(result)
    assert nothing == 0.0
    assert result.step_time == pytest.approx(20.99, rel=0.15)  # too short: ranks whose hosts differ are not modelled
    assert total == pytest.approx(10.83, rel=0.1)
    assert total == pytest.approx(without, rel=0.01)  # kernels spin for late ranks as little as without overlap
    assert 3.96 / 10.83 < hidden / total < 0.9
