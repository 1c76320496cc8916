"""Invariants of MoE overlap: one microbatch's dispatch overlaps another's computation, and no work is lost."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim import RenderedResult, Scenario, simulate
from clustersim.build import build_simulation
from clustersim.engine.engine import simulate_scalar
from clustersim.engine.vectorized.engine import VectorizedEngine, can_vectorize
from clustersim.program.action import Action, OverlappedPair
from clustersim.program.task import CollectiveTask, ComputeTask, LaunchOp, Stream
from clustersim.results.comm_overlap import compute_overlap
from tests.conftest import examples
from tests.laws.timelines import assert_same_trace

MODEL = {
    "layers": 8, "hidden": 1024, "heads": 8, "kv_heads": 4, "ffn": 2048, "vocab": 2048, "max_positions": 1024,
    "experts": {"count": 8, "top_k": 2, "ffn": 2048, "shared": 1024},
}  # fmt: skip
OVERLAP_KEY = "layout.overlap_moe_expert_parallel_comm"
WGRAD_OFF = "layout.delay_wgrad_compute=false"


@st.composite
def mappings(draw: st.DrawFn) -> dict[str, Any]:
    """A MoE model on 8 GPUs with overlapped expert communication."""
    tp, pp = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (1, 4)]))
    ranks_per_stage = 8 // pp
    ep = draw(st.sampled_from([item for item in (2, 4, 8) if ranks_per_stage % item == 0]))
    schedule = draw(st.sampled_from(["interleaved", "dualpipev"] if pp > 1 else ["1f1b"]))
    etp = draw(st.sampled_from([element for element in {1, tp} if ranks_per_stage % (ep * element) == 0]))
    layout = {
        "tp": tp, "pp": pp, "ep": ep, "etp": etp, "sequence_parallel": tp > 1,
        "overlap_moe_expert_parallel_comm": True,
        "dispatcher": draw(st.sampled_from(["alltoall", "deepep", "hybridep"])),
        "data": draw(st.sampled_from(["ddp", "zero1", "zero2"])),
        "delay_wgrad_compute": draw(st.booleans()),
        "overlap_p2p_comm": draw(st.booleans()),
    }  # fmt: skip
    microbatches = 2 * pp * draw(st.integers(1, 2))
    dense_first = draw(st.booleans())
    experts = MODEL["experts"] | ({"dense_layers": 1} if dense_first else {})
    return {
        "model": MODEL | {"experts": experts},
        "cluster": {"name": "dgx-h100", "gpus": 8},
        "layout": layout,
        "schedule": schedule,
        "training": {
            "sequence": 1024, "global_batch": microbatches * (8 // (tp * pp)),
            "recompute": draw(st.sampled_from(["none", {"modules": ["moe_act", "layernorm"]}])),
        },
        "cost": {"network": draw(st.sampled_from(["shared", "uncontended"]))},
    }  # fmt: skip


def simulate_with_cost(mapping: dict[str, Any], **changes: object) -> RenderedResult:
    """The result of the mapping with other `cost` settings."""
    return simulate(Scenario.from_mapping({**mapping, "cost": mapping["cost"] | changes}))


@given(mappings())
@examples(10)
def test_an_overlapped_pair_takes_between_its_longest_pass_and_the_sum(mapping: dict[str, Any]) -> None:
    """The same order with its pairs overlapped and sequential; no shared links, no kernel interference, no host time.

    Once both passes have started, the rank always computes or sends, so they end within the sum of their
    sequential times, and take no less than all their computation, nor than all their communication.
    """
    mapping["layout"] = mapping["layout"] | {"delay_wgrad_compute": False}
    mapping["cost"] = {"network": "uncontended", "interference": 0.0}
    mapping["framework"] = "ideal"
    overlapped = Scenario.from_mapping(mapping)
    order = overlapped.effective_schedule.order(overlapped.layout.pp, overlapped.microbatch_count)
    lines = [",".join(map(str, steps)) for steps in order]
    schedule = {"orders": {"rows": lines, "placement": list(overlapped.placement.stage_ranks)}}
    custom = Scenario.from_mapping({**mapping, "schedule": schedule})
    overlapped_result, sequential_result = simulate(overlapped), simulate(custom.with_overrides(f"{OVERLAP_KEY}=false"))
    assert simulate(custom).step_time == overlapped_result.step_time
    if overlapped.layout.pp == 1:
        assert overlapped_result.step_time <= sequential_result.step_time * (1 + 1e-9)
    for rank in overlapped_result.trace.simulated_ranks.tolist():
        spans, sequential_spans = _action_spans(overlapped_result, rank), _action_spans(sequential_result, rank)
        for pair in (
            step
            for step in order[int(overlapped_result.program.program_index[rank])]
            if isinstance(step, OverlappedPair)
        ):
            pair_times = np.array([*spans[pair.forward], *spans[pair.backward]])
            passes = [np.array(sequential_spans[action]) for action in pair]
            sequential_seconds = sum(float((times[:, 1] - times[:, 0]).sum()) for times in passes)
            both_started = max(spans[action][0][0] for action in pair)
            assert pair_times[:, 1].max() - both_started <= sequential_seconds * (1 + 1e-9)
            compute_seconds = float((pair_times[:, 1] - pair_times[:, 0]).sum())
            assert pair_times[:, 1].max() - pair_times[:, 0].min() >= max(
                compute_seconds, sequential_seconds - compute_seconds
            ) * (1 - 1e-9)


@given(mappings(), st.sampled_from([True, False]), st.floats(0.0, 0.5))
@examples(15)
def test_overlap_is_never_slower_than_none(mapping: dict[str, Any], captured: bool, interference: float) -> None:
    """Also where communication slows kernels. Only a host that launches too late may win, which overlap denies a lead.

    While tokens travel without overlap, the host runs ahead; interleaved phases begin without that lead
    (`cost.host_launch`), so the time in which they wait for launches is not counted here, and graphs have none.
    """
    mapping["layout"] |= {"tp": 1, "pp": 1, "etp": 1, "sequence_parallel": False}
    mapping |= {"schedule": "1f1b", "framework": {"name": "megatron", "cuda_graphs": captured}}
    mapping["cost"] = {"network": "uncontended", "interference": interference}
    overlapped = Scenario.from_mapping(mapping)
    results = simulate(overlapped), simulate(overlapped.with_overrides(f"{OVERLAP_KEY}=false", WGRAD_OFF))
    with_overlap, without = (result.step_time for result in results)
    late = 0.0 if captured else results[0].breakdown.mean_seconds()["kernel launch"]
    assert with_overlap - late <= without * (1 + 1e-9)


def _action_spans(result: RenderedResult, rank: int) -> dict[Action, list[tuple[float, float]]]:
    """(start, end) of the compute tasks of each action on a rank."""
    tasks, trace = result.program.programs[int(result.program.program_index[rank])].tasks, result.trace
    spans: dict[Action, list[tuple[float, float]]] = {}
    for event_index in trace.rank_events(rank, Stream.COMPUTE).tolist():
        task = tasks[int(trace.task[event_index])]
        if isinstance(task, ComputeTask) and task.action is not None:
            spans.setdefault(task.action, []).append((float(trace.start[event_index]), float(trace.end[event_index])))
    return spans


@st.composite
def imbalanced_mappings(draw: st.DrawFn) -> dict[str, Any]:
    """The same with optional load imbalance, or with shared experts overlapping the dispatch instead."""
    mapping = draw(mappings())
    mapping["training"]["expert_load"] = draw(st.sampled_from(["balanced", 0.3]))
    if draw(st.booleans()):
        mapping["layout"] |= {
            "overlap_moe_expert_parallel_comm": False, "delay_wgrad_compute": False, "moe_shared_expert_overlap": True,
        }  # fmt: skip
    return mapping | {"steps": draw(st.integers(1, 2))}


@given(imbalanced_mappings())
@examples(10)
def test_overlap_folding_and_coalescing_change_no_time(mapping: dict[str, Any]) -> None:
    folded = simulate_with_cost(mapping)
    assert_same_trace(folded.trace, simulate_with_cost(mapping, symmetry="off").trace, relative=1e-9)
    assert_same_trace(folded.trace, simulate_with_cost(mapping, coalesce=False).trace, relative=1e-9)


@given(mappings(), st.booleans())
@examples(20)
def test_overlapped_vectorized_engine_equals_the_scalar_engine(mapping: dict[str, Any], drawn: bool) -> None:
    """Every rank including its waiting and slowdown; no order of overlapped pairs needs a clock."""
    mapping["training"] |= {"expert_load": 0.3 if drawn else "balanced"}
    prepared = build_simulation(
        Scenario.from_mapping({**mapping, "cost": {"network": "uncontended", "symmetry": "off"}})
    )
    assert can_vectorize(prepared.program)
    vectorized_trace = VectorizedEngine(prepared.program, prepared.classes, prepared.cost, None).simulate_all()
    assert vectorized_trace is not None
    assert_same_trace(
        vectorized_trace, simulate_scalar(prepared.program, prepared.classes, prepared.cost)[0], relative=1e-9
    )


@given(imbalanced_mappings())
@examples(10)
def test_categories_sum_to_the_step_and_operations_end_with_their_tasks(mapping: dict[str, Any]) -> None:
    result = simulate_with_cost(mapping)
    assert np.allclose(result.breakdown.seconds.sum(axis=1), result.trace.makespan / result.scenario.steps)
    assert (result.breakdown.seconds >= 0.0).all()
    overlap = compute_overlap(result.trace_table, result.cost.time_segment, result.breakdown)
    assert (overlap.hidden >= 0.0).all()
    assert sum(result.to_json()["critical_path_s"].values()) == pytest.approx(
        result.trace.makespan / result.scenario.steps
    )
    rank = int(result.trace.simulated_ranks[0])
    spans = result.operation_spans(rank)
    event_indices = result.trace.rank_events(rank, Stream.COMPUTE)
    task_ends = dict(
        zip(result.trace.task[event_indices].tolist(), result.trace.end[event_indices].tolist(), strict=True)
    )
    operation_ends = dict(zip(spans.task.tolist(), spans.end.tolist(), strict=True))
    assert [operation_ends[task] for task in sorted(operation_ends)] == pytest.approx(
        [task_ends[task] for task in sorted(operation_ends)], rel=1e-9
    )


@given(mappings())
@examples(10)
def test_an_overlapped_pair_runs_the_operations_of_its_passes(mapping: dict[str, Any]) -> None:
    """The same kernels and dispatches as often as sequentially, inside segments or concurrent with them."""
    overlapped = Scenario.from_mapping({**mapping, "layout": mapping["layout"] | {"delay_wgrad_compute": False}})
    sequential = overlapped.with_overrides(f"{OVERLAP_KEY}=false")
    assert _operation_counts(simulate(overlapped)) == _operation_counts(simulate(sequential))


def _operation_counts(result: RenderedResult) -> list[dict[str, int]]:
    """How often each rank program runs each kernel and collective, by name; launches are the host's."""
    counts: list[dict[str, int]] = []
    for program in result.program.programs:
        count_by_name: dict[str, int] = {}
        for task in program.tasks:
            bodies = [operation.body for operation in task.segment.operations] if isinstance(task, ComputeTask) else []
            is_collective = isinstance(task, CollectiveTask) and not isinstance(task.comm_op, LaunchOp)
            bodies += [task.comm_op] if is_collective else []
            for body in bodies:
                name = body.name if hasattr(body, "name") else f"{body.kernel.name} {body.comm_op.name}"
                count_by_name[name] = count_by_name.get(name, 0) + 1
        counts.append(count_by_name)
    return counts
