"""Laws of experts: where they are spread like all else they are nothing new, and no rank or expert is left out."""

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from clustersim import Scenario, simulate
from clustersim.build import build_plan
from clustersim.memory.footprint import MemoryCategory
from clustersim.model.layer_stack import MoeMlp
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import COMM_GROUPS, EXPERT_MESH, PIPELINE
from clustersim.parallel.process_groups import process_groups
from clustersim.program.placement import looped_placement
from clustersim.results.memory_check import build_footprint
from tests.conftest import examples
from tests.laws.timelines import same
from tests.strategies import CLUSTERS, mappings

SHARED_OUT = {name for name, role in COMM_GROUPS.items() if role.mesh == EXPERT_MESH}
ONE = {"count": 1, "top_k": 1, "ffn": 128}


@st.composite
def plain(draw: st.DrawFn) -> dict[str, Any]:
    """A scenario without experts."""
    mapping = draw(mappings())
    assume("experts" not in mapping["model"])
    return mapping


@given(plain())
@examples(25)
def test_one_expert_for_every_token_is_the_dense_model_to_the_digit(mapping: dict[str, Any]) -> None:
    dense = simulate(Scenario.from_mapping(mapping))
    model = {key: value for key, value in mapping["model"].items() if key != "ffn"}
    routed = simulate(Scenario.from_mapping({**mapping, "model": model | {"experts": ONE}}))
    assert routed.step_time == dense.step_time
    assert routed.model_flops == dense.model_flops
    assert [ledger.peak for ledger in routed.ledgers] == [memory_ledger.peak for memory_ledger in dense.ledgers]
    same(routed.trace, dense.trace, relative=0.0)


def test_two_who_meet_run_a_block_alike_where_one_meets_others_too() -> None:
    """Ranks 0 and 1 meet for experts; rank 1, which holds another part of the sequence than 4, meets that, too."""
    mapping = {
        "model": {"family": "llama", "layers": 8, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 256}
        | {"experts": {"count": 4, "top_k": 1, "ffn": 128}},
        "cluster": {**CLUSTERS["racks"], "gpus": 6},
        "layout": {"cp": 2, "dp": 3, "ep": 2, "order": ["dp", "cp", "tp", "pp"]},
        "framework": "pytorch",
        "training": {"sequence": 128, "global_batch": 3},
    }
    folded = Scenario.from_mapping(mapping)
    every = Scenario.from_mapping({**mapping, "cost": {"symmetry": "off", "coalesce": False}})
    same(simulate(folded).trace, simulate(every).trace, relative=1e-9)


@given(mappings())
@examples(25)
def test_experts_cut_like_all_else_are_the_layout_without_a_mesh_of_their_own(mapping: dict[str, Any]) -> None:
    """Megatron-LM's layouts before experts had one: etp is tp, and ep is 1."""
    assume("experts" in mapping["model"])
    layout = {key: value for key, value in mapping["layout"].items() if key not in ("ep", "etp")}
    older = Scenario.from_mapping({**mapping, "layout": layout})
    folded = Scenario.from_mapping({**mapping, "layout": layout | {"ep": 1, "etp": layout["tp"]}})
    assert not SHARED_OUT.intersection(process_groups(folded.layout, folded.placement))
    first, second = simulate(older), simulate(folded)
    assert second.step_time == first.step_time
    same(second.trace, first.trace, relative=0.0)


@st.composite
def folded(draw: st.DrawFn) -> Layout:
    """Experts folded onto the ranks of all other axes."""
    tp, cp, dp, pp = (draw(st.sampled_from(sizes)) for sizes in ([1, 2, 4], [1, 2], [1, 2, 3, 4, 8], [1, 2, 3]))
    room = tp * cp * dp
    etp = draw(st.sampled_from([index for index in range(1, room + 1) if room % index == 0]))
    ep = draw(st.sampled_from([item for item in range(1, room // etp + 1) if room // etp % item == 0]))
    order = (*draw(st.permutations(["tp", "cp", "dp"])), "pp")
    return Layout(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp, order=order)


@given(folded())
@examples(100)
def test_every_rank_has_its_place_among_experts_on_its_own_stage(layout: Layout) -> None:
    """Each rank is in one group of every role; but for the pipeline's, members are of one stage.

    Ranks with parts of all experts and ranks with the same experts meet in one rank at most.
    """
    assume(layout.has_expert_mesh)
    stage = layout.mesh.rank_coordinates(PIPELINE)
    groups = process_groups(layout, looped_placement(layout.pp))
    for name in SHARED_OUT:
        members = groups[name].members
        assert sorted(members.reshape(-1).tolist()) == list(range(layout.world_size))
        if not COMM_GROUPS[name].crosses_stages:
            assert (stage[members] == stage[members[:, :1]]).all()
    parts, same_experts = groups["etp_ep"].members, groups["edp"].members
    assert parts.shape[1] * same_experts.shape[1] == layout.tp * layout.cp * layout.dp
    row = np.argsort(same_experts.reshape(-1)) // same_experts.shape[1]
    assert all(len(set(row[group].tolist())) == len(group) for group in parts)


@given(mappings(), st.sampled_from(["ddp", "fsdp"]))
@examples(25)
def test_memory_of_experts_of_all_ranks_is_what_the_model_has(mapping: dict[str, Any], data: str) -> None:
    """2 bytes a parameter, once on all ranks together where they are sharded, and on every replica where not."""
    assume("experts" in mapping["model"])
    mapping["layout"]["data"] = data
    scenario = Scenario.from_mapping(mapping)
    plan, layout = build_plan(scenario), scenario.layout
    (group,) = (parameter_group for parameter_group in plan.parameter_groups if parameter_group.name == "experts")
    footprint = build_footprint(scenario, plan)
    counts = (footprint.weights_by_group(rank)["experts"][0] for rank in range(layout.pp))
    held = sum(counts) * footprint.bytes_per_parameter(group)[MemoryCategory.PARAMETERS] * layout.world_size / layout.pp
    matrices = 3 if mapping["model"]["family"] == "llama" else 2
    layers = sum(run.count for run in scenario.model.stack if isinstance(run.spec.mlp, MoeMlp))
    replicas = layout.tp * layout.cp * layout.dp // (layout.ep * layout.effective_etp)
    assert held == pytest.approx(2 * layers * 4 * matrices * 64 * 128 * (replicas if data == "ddp" else 1))
