"""DualPipe in a scenario file: user-facing degrees of one pipeline, internally two mirrored pipelines."""

from typing import Any

import pytest

from clustersim import Scenario
from clustersim.common.errors import InputError
from clustersim.report.labels import describe_layout
from clustersim.report.result_timeline import describe_stage_placement
from clustersim.schedules.dual_pipe import DualPipe
from tests.sentences import parts

BASE_MAPPING: dict[str, Any] = {
    "model": {"preset": "deepseek-v2-lite", "layers": 16},
    "cluster": {"name": "dgx-h100", "gpus": 32},
    "layout": {"pp": 8, "ep": 4},
    "schedule": "dualpipe",
    "training": {"sequence": 1024, "global_batch": 64},
}


def load_scenario(*overrides: str) -> Scenario:
    return Scenario.from_mapping(BASE_MAPPING, overrides=list(overrides))


def test_one_pipeline_in_the_file_runs_as_two() -> None:
    scenario = load_scenario()
    assert (scenario.layout.pp, scenario.layout.dp, scenario.layout.mirrored) == (4, 8, True)
    assert (
        scenario.layout.as_configured.pp,
        scenario.layout.as_configured.dp,
        scenario.layout.as_configured.mirrored,
    ) == (8, 4, False)
    assert scenario.layout.world_size == scenario.layout.as_configured.world_size == 32
    assert scenario.effective_schedule == DualPipe()
    assert scenario.microbatch_count == 8
    assert describe_layout(scenario).startswith("pp 8 · dp 4 · ep 4")
    assert "2 x 8 microbatches of 1" in describe_layout(scenario)
    assert parts("8 pipeline ranks in pairs: pipeline rank 0 ... stages 0, 7, and so").search(
        describe_stage_placement(scenario)
    )


def test_expert_communication_overlaps_by_default() -> None:
    assert load_scenario().layout.overlap_moe_expert_parallel_comm
    assert not load_scenario("layout.ep=1").layout.overlap_moe_expert_parallel_comm


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["layout.pp=5"], r"layout\.pp: 5.*dualpipe.*pairs.*pp 4 or 8"),
        (["layout.pp=2"], r"layout\.pp: 2.*dualpipe.*pairs.*pp 4"),
        (["layout.pp=1"], "layout.pp: 1, .*; pp 4 fits"),
        (["training.global_batch=56"], "needs as many microbatches each way, 16 in all, not 14"),
        (["training.global_batch=60"], "multiple of dp 4 x 2 ways of dualpipe x microbatch 1 = 8; global_batch 64"),
        (["training.global_batch=4"], "feed at most 4 .* microbatches of 1, but dp is 4 x 2 ways of dualpipe"),
        (["layout.ep=8"], "8 x etp 1 does not divide the 4 ranks of tp x cp x dp"),
        (["layout.pp=32", "layout.ep=1"], "pp 32 x 1 chunks = 32 stages, .* has only 16 layers"),
        (["layout.dp=8"], "pp 8 x dp 8 = 64 ranks.*32 GPUs; dp 4"),
        (["layout.data={zero: {stage: 1, shard: 3}}"], r"shard 3.*4 ranks \(dp 4\)"),
    ],
)
def test_invalid_dualpipe_settings_are_rejected(overrides: list[str], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        load_scenario(*overrides)


def test_changes_use_the_file_degrees() -> None:
    assert load_scenario().with_overrides("layout.pp=4").layout.pp == 2
    assert load_scenario().with_overrides("schedule=1f1b").layout.pp == 8
