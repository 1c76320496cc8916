"""Laws of pairs: tokens of one microbatch travel beside the computation of another, and nothing is lost."""

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
from clustersim.program.task import CollectiveTask, ComputeTask, Stream
from tests.conftest import examples
from tests.laws.timelines import same

MODEL = {
    "layers": 8, "hidden": 1024, "heads": 8, "kv_heads": 4, "ffn": 2048, "vocab": 2048, "max_positions": 1024,
    "experts": {"count": 8, "top_k": 2, "ffn": 2048, "shared": 1024},
}  # fmt: skip
OVERLAP = "layout.overlap_expert_communication"


@st.composite
def mappings(draw: st.DrawFn) -> dict[str, Any]:
    """A mixture on 8 GPUs, in which tokens travel beside computation."""
    tp, pp = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (1, 4)]))
    room = 8 // pp
    ep = draw(st.sampled_from([item for item in (2, 4, 8) if room % item == 0]))
    schedule = draw(st.sampled_from(["interleaved", "dualpipev"] if pp > 1 else ["1f1b"]))
    etp = draw(st.sampled_from([element for element in {1, tp} if room % (ep * element) == 0]))
    layout = {
        "tp": tp, "pp": pp, "ep": ep, "etp": etp, "sequence_parallel": tp > 1,
        "overlap_expert_communication": True,
        "dispatcher": draw(st.sampled_from(["alltoall", "deepep", "hybridep"])),
        "data": draw(st.sampled_from(["ddp", "zero1", "zero2"])),
        "delay_wgrad": draw(st.booleans()),
        "pipeline_overlap": draw(st.booleans()),
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


def parts(mapping: dict[str, Any], **changes: object) -> RenderedResult:
    """A result of the same with other costs."""
    return simulate(Scenario.from_mapping({**mapping, "cost": mapping["cost"] | changes}))


@given(mappings())
@examples(10)
def test_a_pair_takes_no_longer_than_its_passes_in_turn_nor_less_than_the_longest(mapping: dict[str, Any]) -> None:
    """The same order, its pairs side by side and in turn; nobody shares links, kernels are not slowed.

    From when both passes have begun, the rank always computes or sends, so they are done in at most what they take one
    after the other, and in no less than what all they compute takes, nor what they send.
    """
    mapping["layout"] = mapping["layout"] | {"delay_wgrad": False}
    mapping["cost"] = {"network": "uncontended", "interference": 0.0}
    beside = Scenario.from_mapping(mapping)
    order = beside.effective_schedule.order(beside.layout.pp, beside.microbatch_count)
    rows = [",".join(map(str, steps)) for steps in order]
    told = {"orders": {"rows": rows, "placement": list(beside.placement.stage_ranks)}}
    written = Scenario.from_mapping({**mapping, "schedule": told})
    paired, in_turn = simulate(beside), simulate(written.with_overrides(f"{OVERLAP}=false"))
    assert simulate(written).step_time == paired.step_time
    if beside.layout.pp == 1:
        assert paired.step_time <= in_turn.step_time * (1 + 1e-9)
    for rank in paired.trace.simulated_ranks.tolist():
        spans, alone = _spans(paired, rank), _spans(in_turn, rank)
        for pair in (
            step for step in order[int(paired.program.program_index[rank])] if isinstance(step, OverlappedPair)
        ):
            both = np.array([*spans[pair.forward], *spans[pair.backward]])
            passes = [np.array(alone[action]) for action in pair]
            took = sum(float((times[:, 1] - times[:, 0]).sum()) for times in passes)
            begun = max(spans[action][0][0] for action in pair)
            assert both[:, 1].max() - begun <= took * (1 + 1e-9)
            computes = float((both[:, 1] - both[:, 0]).sum())
            assert both[:, 1].max() - both[:, 0].min() >= max(computes, took - computes) * (1 - 1e-9)


def _spans(result: RenderedResult, rank: int) -> dict[Action, list[tuple[float, float]]]:
    """When the compute tasks of each action ran on a rank."""
    tasks, trace = result.program.programs[int(result.program.program_index[rank])].tasks, result.trace
    found: dict[Action, list[tuple[float, float]]] = {}
    for row in trace.rank_events(rank, Stream.COMPUTE).tolist():
        task = tasks[int(trace.task[row])]
        if isinstance(task, ComputeTask) and task.action is not None:
            found.setdefault(task.action, []).append((float(trace.start[row]), float(trace.end[row])))
    return found


@st.composite
def uneven(draw: st.DrawFn) -> dict[str, Any]:
    """The same, whose loads may differ by rank, layer and step, or whose shared experts are beside tokens instead."""
    mapping = draw(mappings())
    mapping["training"]["expert_load"] = draw(st.sampled_from(["balanced", 0.3]))
    if draw(st.booleans()) and mapping["layout"]["dispatcher"] == "alltoall":
        mapping["layout"] |= {
            "overlap_expert_communication": False, "delay_wgrad": False, "overlap_shared_experts": True,
        }  # fmt: skip
    return mapping | {"steps": draw(st.integers(1, 2))}


@given(uneven())
@examples(10)
def test_folded_is_unfolded_and_coalesced_is_fine_grained(mapping: dict[str, Any]) -> None:
    folded = parts(mapping)
    same(folded.trace, parts(mapping, symmetry="off").trace, relative=1e-9)
    same(folded.trace, parts(mapping, coalesce=False).trace, relative=1e-9)


@given(mappings(), st.booleans())
@examples(20)
def test_cohorts_of_pairs_are_ranks_one_by_one(mapping: dict[str, Any], drawn: bool) -> None:
    """Every rank with what it waited and was slowed; no order of pairs needs a clock."""
    mapping["training"] |= {"expert_load": 0.3 if drawn else "balanced"}
    made = build_simulation(Scenario.from_mapping({**mapping, "cost": {"network": "uncontended", "symmetry": "off"}}))
    assert can_vectorize(made.program)
    together = VectorizedEngine(made.program, made.classes, made.cost, None).simulate_all()
    assert together is not None
    same(together, simulate_scalar(made.program, made.classes, made.cost)[0], relative=1e-9)


@given(uneven())
@examples(10)
def test_parts_sum_to_the_step_and_what_is_inside_blocks_to_them(mapping: dict[str, Any]) -> None:
    result = parts(mapping)
    assert np.allclose(result.breakdown.seconds.sum(axis=1), result.trace.makespan / result.scenario.steps)
    assert (result.breakdown.seconds >= 0.0).all()
    assert sum(result.to_json()["critical_path_s"].values()) == pytest.approx(
        result.trace.makespan / result.scenario.steps
    )
    rank = int(result.trace.simulated_ranks[0])
    inside = result.operation_spans(rank)
    rows = result.trace.rank_events(rank, Stream.COMPUTE)
    ends = dict(zip(result.trace.task[rows].tolist(), result.trace.end[rows].tolist(), strict=True))
    last = dict(zip(inside.task.tolist(), inside.end.tolist(), strict=True))
    assert [last[task] for task in sorted(last)] == pytest.approx([ends[task] for task in sorted(last)], rel=1e-9)


@given(mappings())
@examples(10)
def test_a_pair_does_what_its_passes_do(mapping: dict[str, Any]) -> None:
    """The same kernels as often as in turn, and tokens sent as often: inside blocks or beside them."""
    beside = Scenario.from_mapping({**mapping, "layout": mapping["layout"] | {"delay_wgrad": False}})
    in_turn = beside.with_overrides(f"{OVERLAP}=false")
    assert _work(simulate(beside)) == _work(simulate(in_turn))


def _work(result: RenderedResult) -> list[dict[str, int]]:
    """How often each rank program runs each kernel and exchange, by name."""
    counts: list[dict[str, int]] = []
    for program in result.program.programs:
        found: dict[str, int] = {}
        for task in program.tasks:
            does = [operation.body for operation in task.segment.operations] if isinstance(task, ComputeTask) else []
            does += [task.comm_op] if isinstance(task, CollectiveTask) else []
            for doe in does:
                name = doe.name if hasattr(doe, "name") else f"{doe.kernel.name} {doe.comm_op.name}"
                found[name] = found.get(name, 0) + 1
        counts.append(found)
    return counts
