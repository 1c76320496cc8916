"""Invariants of DualPipe: DualPipeV on half the ranks with twice the replicas, plus crossing messages."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim import Scenario, simulate
from clustersim.parallel.data_parallel_strategy import DdpStrategy, FullyShard, Zero1
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import PIPELINE
from clustersim.program.task import CommOp
from clustersim.schedules.dual_pipe import DualPipe
from clustersim.schedules.dual_pipe_v import DualPipeV
from clustersim.schedules.validation import dry_run
from tests.closed_form.fixed_durations import FixedDurations, Step
from tests.conftest import examples
from tests.laws.timelines import assert_same_trace

DATA = st.sampled_from([DdpStrategy(), Zero1(), FullyShard()])


@given(st.integers(2, 4), st.integers(1, 2), st.integers(0, 3), DATA, st.sampled_from([0.0, 0.25, 1.0]), st.booleans())
@examples(40)
def test_dualpipe_takes_dualpipev_plus_crossing_messages(
    half_ranks: int, dp: int, extra_microbatches: int, data: Any, message: float, overlap: bool
) -> None:
    """One second for each forward and each half of a backward of a stage; with free messages the times are equal.

    Per microbatch one activation and one gradient cross over, where a V's last rank hands them to itself: the
    step takes no less for that, and no more than if all of these crossed one after the other.
    """
    microbatches = 2 * half_ranks + extra_microbatches

    def crossing_seconds(comm_op: CommOp) -> float:
        return message if comm_op.comm_group == "pp_across" else 0.0

    fixed = FixedDurations(1.0, 1.0, 1.0, comm_seconds={"activations": crossing_seconds, "gradients": crossing_seconds})
    degrees: dict[str, Any] = {"pp": half_ranks, "dp": 2 * dp, "data": data, "overlap_p2p_comm": overlap}
    dualpipe_seconds = Step(2 * half_ranks, Layout(**degrees, mirrored=True), DualPipe(), microbatches).step_seconds(
        fixed
    )
    dualpipev_seconds = Step(2 * half_ranks, Layout(**degrees), DualPipeV(), microbatches).step_seconds(fixed)
    assert dualpipev_seconds <= dualpipe_seconds <= dualpipev_seconds + 2 * microbatches * message
    if overlap:
        assert (
            dualpipev_seconds
            == dry_run(DualPipeV().order(half_ranks, microbatches), forward=1, backward=2, weight=1).makespan
        )


BASE: dict[str, Any] = {
    "model": {
        "layers": 8, "hidden": 512, "heads": 8, "kv_heads": 4, "ffn": 1024, "vocab": 1024, "max_positions": 512,
        "experts": {"count": 4, "top_k": 2, "ffn": 1024},
    },
    "cluster": {"name": "dgx-h100", "gpus": 16},
    "schedule": "dualpipe",
    "framework": {"name": "ideal", "launch": "10 us"},
}  # fmt: skip


@st.composite
def dualpipe_mappings(draw: st.DrawFn) -> dict[str, Any]:
    """A MoE model on 16 GPUs in bidirectional pipelines."""
    pp = draw(st.sampled_from([4, 8]))
    tp = draw(st.sampled_from([1, 2]))
    ep = draw(st.sampled_from([item for item in (1, 2, 4) if 16 // pp % (item * tp) == 0]))
    layout = {
        "tp": tp, "pp": pp, "ep": ep, "sequence_parallel": tp > 1,
        "data": draw(st.sampled_from(["ddp", "zero1", "fsdp"])), "overlap_p2p_comm": draw(st.booleans()),
    }  # fmt: skip
    training = {"sequence": 512, "global_batch": draw(st.integers(2, 3)) * pp * 16 // (tp * pp)}
    return {**BASE, "layout": layout, "training": training}


@given(dualpipe_mappings(), st.sampled_from(["shared", "uncontended"]))
@examples(40)
def test_dualpipe_folding_and_coalescing_change_no_time(mapping: dict[str, Any], network: str) -> None:
    """Opposite ranks are equivalent; segments run as one event or operation by operation."""
    folded = simulate(Scenario.from_mapping({**mapping, "cost": {"network": network}}))
    assert len(folded.trace.simulated_ranks) <= mapping["layout"]["pp"] // 2 * mapping["layout"]["tp"]
    for cost in ({"symmetry": "off"}, {"coalesce": False}):
        other = simulate(Scenario.from_mapping({**mapping, "cost": {"network": network, **cost}}))
        assert other.step_time == pytest.approx(folded.step_time, rel=1e-9)
        assert_same_trace(other.trace, folded.trace, relative=1e-9)


@given(dualpipe_mappings())
@examples(20)
def test_dualpipe_memory_and_flops_equal_dualpipev(mapping: dict[str, Any]) -> None:
    """Each rank and its opposite hold a copy of the same two stages, as two DualPipeV replicas do."""
    dualpipe = Scenario.from_mapping(mapping)
    layout = {**mapping["layout"], "pp": mapping["layout"]["pp"] // 2}
    dualpipev = Scenario.from_mapping({**mapping, "layout": layout, "schedule": "dualpipev"})
    assert simulate(dualpipe).peak_memory == simulate(dualpipev).peak_memory
    assert simulate(dualpipe).model_flops == simulate(dualpipev).model_flops


def test_a_slow_rank_slows_both_directions_equally() -> None:
    """The opposite rank has the same stages: slowing either costs the same where messages cost the same."""
    mapping = {**BASE, "layout": {"pp": 4, "ep": 1}, "training": {"sequence": 512, "global_batch": 32}}
    layout = Scenario.from_mapping(mapping).layout
    pipeline_coordinate = layout.as_configured.mesh.rank_coordinates(PIPELINE)
    step_times = []
    for coordinate in (1, 2):
        rank = int(np.flatnonzero(pipeline_coordinate == coordinate)[0])
        slow = {**mapping, "degradations": {"slow": [{"gpus": [rank], "speed": 0.5}]}}
        step_times.append(simulate(Scenario.from_mapping(slow)).step_time)
    healthy = simulate(Scenario.from_mapping(mapping)).step_time
    assert step_times[0] == pytest.approx(step_times[1], rel=1e-3)
    assert step_times[0] > 1.3 * healthy
