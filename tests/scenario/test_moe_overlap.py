"""Overlap of MoE communication with computation in a scenario file: defaults and exclusions."""

from typing import Any

import pytest

from clustersim import Scenario
from clustersim.common.errors import InputError
from clustersim.schedules.dual_pipe_v import DualPipeV
from clustersim.schedules.interleaved import Interleaved
from clustersim.schedules.overlapped_1f1b import Overlapped1F1B

BASE_MAPPING: dict[str, Any] = {
    "model": "deepseek-v2-lite",
    "cluster": {"name": "dgx-h100", "gpus": 16},
    "layout": {"pp": 2, "ep": 8, "overlap_moe_expert_parallel_comm": True, "layers_per_stage": [6, 7, 7, 7]},
    "schedule": "interleaved",
    "training": {"sequence": 2048, "global_batch": 64},
}


def load_scenario(*overrides: str) -> Scenario:
    return Scenario.from_mapping(BASE_MAPPING, overrides=list(overrides))


def test_overlap_runs_combined_1f1b() -> None:
    assert load_scenario().effective_schedule == Overlapped1F1B(Interleaved(2))
    assert load_scenario("layout.overlap_moe_expert_parallel_comm=false").effective_schedule == Interleaved(2)


def test_dualpipev_overlaps_by_default() -> None:
    """But not with ep 1, where no tokens are exchanged."""
    default_layout = {
        key: value for key, value in BASE_MAPPING["layout"].items() if key != "overlap_moe_expert_parallel_comm"
    }
    default_mapping = {**BASE_MAPPING, "layout": default_layout}
    assert not Scenario.from_mapping(default_mapping).layout.overlap_moe_expert_parallel_comm
    dual = Scenario.from_mapping({**default_mapping, "schedule": "dualpipev"})
    assert dual.layout.overlap_moe_expert_parallel_comm
    assert dual.effective_schedule == DualPipeV()
    assert not dual.with_overrides("layout.ep=1").layout.overlap_moe_expert_parallel_comm
    assert not dual.with_overrides(
        "layout.overlap_moe_expert_parallel_comm=false"
    ).layout.overlap_moe_expert_parallel_comm


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["training.recompute=full"], r"training\.recompute full.*tokens again in backward"),
        (["training.recompute.modules=[moe]"], r"excludes training.recompute modules: \[moe\]"),
        (["layout.ep=1"], r"overlaps MoE communication.*layout\.ep is 1; write false"),
        (
            ["layout.dispatcher=allgather"],
            "dispatcher allgather; dispatcher alltoall or deepep or deepep_v2 or deepep_uccl or hybridep",
        ),
        (["schedule=bfs"], "schedule bfs has not; schedule interleaved or dualpipev"),
        (
            ["schedule=1f1b", "layout.layers_per_stage=even", "model.layers=26"],
            "several chunks.*schedule 1f1b has one; schedule interleaved or dualpipev",
        ),
        (
            ["layout.delay_wgrad_compute=true", "layout.data=fsdp"],
            "is not modelled where each backward gathers weights",
        ),
        (["layout.moe_shared_expert_overlap=true"], "exclude each other; write one of them"),
    ],
)
def test_moe_overlap_exclusions(overrides: list[str], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        load_scenario(*overrides)


WITHOUT_OVERLAP = "layout.overlap_moe_expert_parallel_comm=false"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["layout.delay_wgrad_compute=true"], "write layout.overlap_moe_expert_parallel_comm: true, too"),
        (
            ["layout.moe_shared_expert_overlap=true", "layout.dispatcher=allgather"],
            "is not for dispatcher allgather; dispatcher alltoall",
        ),
        (
            ["layout.moe_shared_expert_overlap=true", "model.experts.shared=0"],
            "needs shared experts and tokens that travel",
        ),
        (["layout.moe_shared_expert_overlap=true", "layout.ep=1"], "needs shared experts and tokens that travel"),
        (
            ["layout.moe_shared_expert_overlap=true", "training.recompute.modules=[shared_experts]"],
            r"training\.recompute modules: \[shared_experts\]; leave that out",
        ),
    ],
)
def test_overlap_options_need_overlap(overrides: list[str], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        load_scenario(WITHOUT_OVERLAP, *overrides)
