"""Laws of DualPipe: it is DualPipeV on half the ranks with twice the replicas, but for what crosses at the turn."""

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
from tests.closed_form.fixed_durations import Fixed, Step
from tests.conftest import examples
from tests.laws.timelines import same

DATA = st.sampled_from([DdpStrategy(), Zero1(), FullyShard()])


@given(st.integers(2, 4), st.integers(1, 2), st.integers(0, 3), DATA, st.sampled_from([0.0, 0.25, 1.0]), st.booleans())
@examples(40)
def test_it_takes_what_dual_pipe_v_takes_and_what_crosses_over(
    half: int, dp: int, more: int, data: Any, message: float, overlap: bool
) -> None:
    """A second for each forward and half of a backward of a stage. Free messages: as long, to the last digit.

    Of a microbatch one activation and one gradient cross over, where a V's last rank hands them on: the step takes no
    less for that, and no more than if all of these crossed one after the other.
    """
    microbatches = 2 * half + more

    def crossing(exchange: CommOp) -> float:
        return message if exchange.comm_group == "pp_across" else 0.0

    fixed = Fixed(1.0, 1.0, 1.0, exchanges={"activations": crossing, "gradients": crossing})
    degrees: dict[str, Any] = {"pp": half, "dp": 2 * dp, "data": data, "pipeline_overlap": overlap}
    both = Step(2 * half, Layout(**degrees, mirrored=True), DualPipe(), microbatches).seconds(fixed)
    halved = Step(2 * half, Layout(**degrees), DualPipeV(), microbatches).seconds(fixed)
    assert halved <= both <= halved + 2 * microbatches * message
    if overlap:
        assert halved == dry_run(DualPipeV().order(half, microbatches), forward=1, backward=2, weight=1).makespan


PLAN: dict[str, Any] = {
    "model": {
        "layers": 8, "hidden": 512, "heads": 8, "kv_heads": 4, "ffn": 1024, "vocab": 1024, "max_positions": 512,
        "experts": {"count": 4, "top_k": 2, "ffn": 1024},
    },
    "cluster": {"name": "dgx-h100", "gpus": 16},
    "schedule": "dualpipe",
}  # fmt: skip


@st.composite
def plans(draw: st.DrawFn) -> dict[str, Any]:
    """A mixture on 16 GPUs in pipelines that run towards each other."""
    pp = draw(st.sampled_from([4, 8]))
    tp = draw(st.sampled_from([1, 2]))
    ep = draw(st.sampled_from([item for item in (1, 2, 4) if 16 // pp % (item * tp) == 0]))
    layout = {
        "tp": tp, "pp": pp, "ep": ep, "sequence_parallel": tp > 1,
        "data": draw(st.sampled_from(["ddp", "zero1", "fsdp"])), "pipeline_overlap": draw(st.booleans()),
    }  # fmt: skip
    training = {"sequence": 512, "global_batch": draw(st.integers(2, 3)) * pp * 16 // (tp * pp)}
    return {**PLAN, "layout": layout, "training": training}


@given(plans(), st.sampled_from(["shared", "uncontended"]))
@examples(40)
def test_folded_it_is_what_it_is_unfolded(mapping: dict[str, Any], network: str) -> None:
    """Ranks that face each other are alike; blocks as one event or operation by operation."""
    folded = simulate(Scenario.from_mapping({**mapping, "cost": {"network": network}}))
    assert len(folded.trace.simulated_ranks) <= mapping["layout"]["pp"] // 2 * mapping["layout"]["tp"]
    for cost in ({"symmetry": "off"}, {"coalesce": False}):
        other = simulate(Scenario.from_mapping({**mapping, "cost": {"network": network, **cost}}))
        assert other.step_time == pytest.approx(folded.step_time, rel=1e-9)
        same(other.trace, folded.trace, relative=1e-9)


@given(plans())
@examples(20)
def test_a_rank_holds_what_dual_pipe_vs_holds(mapping: dict[str, Any]) -> None:
    """Each rank and the one opposite hold a copy of the same two stages, as two of DualPipeV's replicas do."""
    both = Scenario.from_mapping(mapping)
    layout = {**mapping["layout"], "pp": mapping["layout"]["pp"] // 2}
    halved = Scenario.from_mapping({**mapping, "layout": layout, "schedule": "dualpipev"})
    assert simulate(both).peak_memory == simulate(halved).peak_memory
    assert simulate(both).model_flops == simulate(halved).model_flops


def test_a_slow_rank_is_felt_by_both_pipelines() -> None:
    """The rank opposite has its stages, too: either of the two slows the step alike where messages are alike."""
    mapping = {**PLAN, "layout": {"pp": 4, "ep": 1}, "training": {"sequence": 512, "global_batch": 32}}
    layout = Scenario.from_mapping(mapping).layout
    place = layout.as_configured.mesh.rank_coordinates(PIPELINE)
    taken = []
    for at in (1, 2):
        rank = int(np.flatnonzero(place == at)[0])
        slow = {**mapping, "disturbances": {"slow": [{"gpus": [rank], "speed": 0.5}]}}
        taken.append(simulate(Scenario.from_mapping(slow)).step_time)
    healthy = simulate(Scenario.from_mapping(mapping)).step_time
    assert taken[0] == pytest.approx(taken[1], rel=1e-3)
    assert taken[0] > 1.3 * healthy
