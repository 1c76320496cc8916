"""Invariants of MoE layouts: experts sharded like dense layers change nothing; no rank is left out."""

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
from tests.laws.timelines import assert_same_trace
from tests.strategies import CLUSTERS, mappings

EXPERT_GROUPS = {name for name, comm_group in COMM_GROUPS.items() if comm_group.mesh == EXPERT_MESH}
SINGLE_EXPERT = {"count": 1, "top_k": 1, "ffn": 128}


@st.composite
def dense_mappings(draw: st.DrawFn) -> dict[str, Any]:
    """A scenario without experts."""
    mapping = draw(mappings())
    assume("experts" not in mapping["model"])
    return mapping


@given(dense_mappings())
@examples(25)
def test_a_single_expert_equals_the_dense_model_exactly(mapping: dict[str, Any]) -> None:
    dense = simulate(Scenario.from_mapping(mapping))
    model = {key: value for key, value in mapping["model"].items() if key != "ffn"}
    moe = simulate(Scenario.from_mapping({**mapping, "model": model | {"experts": SINGLE_EXPERT}}))
    assert moe.step_time == dense.step_time
    assert moe.model_flops == dense.model_flops
    assert [ledger.peak for ledger in moe.ledgers] == [memory_ledger.peak for memory_ledger in dense.ledgers]
    assert_same_trace(moe.trace, dense.trace, relative=0.0)


def test_group_members_with_different_other_groups_run_a_segment_equally() -> None:
    """Ranks 0 and 1 share an expert group; rank 1, unlike 0, also synchronizes with rank 4 over the sequence."""
    mapping = {
        "model": {"family": "llama", "layers": 8, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 256}
        | {"experts": {"count": 4, "top_k": 1, "ffn": 128}},
        "cluster": {**CLUSTERS["racks"], "gpus": 6},
        "layout": {"cp": 2, "dp": 3, "ep": 2, "order": ["dp", "cp", "tp", "pp"]},
        "framework": "pytorch",
        "training": {"sequence": 128, "global_batch": 3},
    }
    folded = Scenario.from_mapping(mapping)
    unfolded_scenario = Scenario.from_mapping({**mapping, "cost": {"symmetry": "off", "coalesce": False}})
    assert_same_trace(simulate(folded).trace, simulate(unfolded_scenario).trace, relative=1e-9)


@given(mappings())
@examples(25)
def test_experts_sharded_like_the_dense_layers_need_no_expert_mesh(mapping: dict[str, Any]) -> None:
    """Megatron-LM's layouts before experts had a mesh: etp is tp, and ep is 1."""
    assume("experts" in mapping["model"])
    sharded = Scenario.from_mapping(
        {**mapping, "layout": mapping["layout"] | {"ep": 1, "etp": mapping["layout"]["tp"]}}
    )
    assert not EXPERT_GROUPS.intersection(process_groups(sharded.layout, sharded.placement))


@given(mappings())
@examples(25)
def test_experts_are_whole_where_a_file_does_not_shard_them(mapping: dict[str, Any]) -> None:
    """And a model without experts has no mesh of experts, whatever its tp."""
    layout = {key: value for key, value in mapping["layout"].items() if key != "etp"}
    scenario = Scenario.from_mapping({**mapping, "layout": layout})
    has_experts = bool(scenario.model.distinct_routed_moes)
    assert scenario.layout.effective_etp == (1 if has_experts else scenario.layout.tp)
    if has_experts:
        stated = Scenario.from_mapping({**mapping, "layout": layout | {"etp": 1}})
        assert simulate(stated).step_time == simulate(scenario).step_time
    else:
        assert not scenario.layout.has_expert_mesh


@st.composite
def folded_layouts(draw: st.DrawFn) -> Layout:
    """Experts folded onto the ranks of all other axes."""
    tp, cp, dp, pp = (draw(st.sampled_from(sizes)) for sizes in ([1, 2, 4], [1, 2], [1, 2, 3, 4, 8], [1, 2, 3]))
    data_ranks = tp * cp * dp
    etp = draw(st.sampled_from([index for index in range(1, data_ranks + 1) if data_ranks % index == 0]))
    ep = draw(st.sampled_from([item for item in range(1, data_ranks // etp + 1) if data_ranks // etp % item == 0]))
    order = (*draw(st.permutations(["tp", "cp", "dp"])), "pp")
    return Layout(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp, order=order)


@given(folded_layouts())
@examples(100)
def test_every_rank_is_in_one_expert_group_of_its_own_stage(layout: Layout) -> None:
    """Each rank is in one group of every kind; except for pipeline groups, members are of one stage.

    An expert-parallel group and an expert-data-parallel group have at most one rank in common.
    """
    assume(layout.has_expert_mesh)
    stage = layout.mesh.rank_coordinates(PIPELINE)
    groups = process_groups(layout, looped_placement(layout.pp))
    for name in EXPERT_GROUPS:
        members = groups[name].members
        assert sorted(members.reshape(-1).tolist()) == list(range(layout.world_size))
        if not COMM_GROUPS[name].crosses_stages:
            assert (stage[members] == stage[members[:, :1]]).all()
    expert_members, same_experts = groups["etp_ep"].members, groups["edp"].members
    assert expert_members.shape[1] * same_experts.shape[1] == layout.tp * layout.cp * layout.dp
    replica_group = np.argsort(same_experts.reshape(-1)) // same_experts.shape[1]
    assert all(len(set(replica_group[group].tolist())) == len(group) for group in expert_members)


@given(mappings(), st.sampled_from(["ddp", "fsdp"]))
@examples(25)
def test_expert_memory_of_all_ranks_is_the_models(mapping: dict[str, Any], data: str) -> None:
    """2 bytes a parameter, once over all ranks where they are sharded, and on every replica where not."""
    assume("experts" in mapping["model"])
    mapping["layout"]["data"], mapping["training"]["precision"] = data, "bf16"
    scenario = Scenario.from_mapping(mapping)
    plan, layout = build_plan(scenario), scenario.layout
    (group,) = (parameter_group for parameter_group in plan.parameter_groups if parameter_group.name == "experts")
    footprint = build_footprint(scenario, plan)
    counts = (footprint.weights_by_group(rank)["experts"][0] for rank in range(layout.pp))
    expert_bytes = (
        sum(counts) * footprint.bytes_per_parameter(group)[MemoryCategory.PARAMETERS] * layout.world_size / layout.pp
    )
    matrices = 3 if mapping["model"]["family"] == "llama" else 2
    layers = sum(run.count for run in scenario.model.stack if isinstance(run.spec.mlp, MoeMlp))
    replicas = layout.tp * layout.cp * layout.dp // (layout.ep * layout.effective_etp)
    assert expert_bytes == pytest.approx(2 * layers * 4 * matrices * 64 * 128 * (replicas if data == "ddp" else 1))
