"""Suggested values are legal: written into the file, each is read without an error."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.errors import InputError
from clustersim.scenario import Scenario
from tests.conftest import examples

DENSE: dict[str, Any] = {
    "model": {"layers": 12, "hidden": 1536, "heads": 24, "kv_heads": 8, "ffn": 6144, "vocab": 32256},
    "cluster": {"name": "dgx-h100", "gpus": 48},
    "layout": {"tp": 4, "pp": 2, "dp": 6, "sequence_parallel": True},
    "training": {"sequence": 2304, "global_batch": 72},
}
MIXTURE: dict[str, Any] = {
    **DENSE,
    "model": {**DENSE["model"], "experts": {"count": 24, "top_k": 2, "ffn": 768}},
    "layout": {**DENSE["layout"], "tp": 1, "pp": 1, "dp": 48, "ep": 8, "data": "zero1"},
    "training": {"sequence": 2304, "global_batch": 144},
}
DEGREE = st.integers(1, 50)
OVERRIDES = st.fixed_dictionaries(
    {},
    optional={
        "layout.tp": DEGREE,
        "layout.cp": st.integers(1, 6),
        "layout.pp": st.integers(1, 20),
        "layout.dp": DEGREE,
        "layout.ep": st.integers(1, 80),
        "layout.etp": st.integers(1, 8),
        "layout.data": st.integers(1, 12).map(lambda shard: {"hsdp": {"shard": shard}}),
        "layout.layers_per_stage": st.lists(st.integers(0, 8), min_size=1, max_size=4),
        "cluster.gpus": st.sampled_from([8, 24, 40, 48, 64, 96]),
        "model.kv_heads": st.integers(1, 24),
        "schedule": st.sampled_from(["interleaved", "dualpipe", "dualpipev", "zb-v"]),
        "training.global_batch": st.integers(1, 300),
        "training.sequence": st.integers(512, 4096),
        "training.recompute": st.integers(1, 30).map(lambda layers: {"layers": layers}),
        "training.lora": st.integers(1, 70).map(lambda rank: {"rank": rank}),
        "training.precision": st.sampled_from(["bf16", "fp8", "fp8-blockwise", "mxfp8"]),
        "layout.cp_kind": st.sampled_from(["ring", "ulysses", "two_dimensional", "hierarchical"]),
        "layout.cp_inner": st.integers(1, 6),
        "model.mtp_layers": st.integers(0, 2),
        "model.head_dim": st.sampled_from([32, 64, 96]),
        "steps": st.sampled_from([1, 1000, 100_000]),
    },
)
MIXTURE_OVERRIDES = st.fixed_dictionaries(
    {},
    optional={
        "model.experts.top_k": st.integers(1, 30),
        "model.experts.num_groups": st.integers(1, 12),
        "model.experts.group_topk": st.integers(1, 12),
        "model.experts.shared": st.sampled_from([768, 770, 1536]),
        "layout.dispatcher": st.sampled_from(["allgather", "alltoall", "deepep", "hybridep"]),
        "layout.overlap_moe_expert_parallel_comm": st.booleans(),
        "layout.moe_shared_expert_overlap": st.booleans(),
        "layout.order": st.permutations(["tp", "cp", "pp", "dp"]),
    },
)
SUGGESTION = re.compile(r"; ([^;]*) fits$")
VALUE = re.compile(r"^(?:(\w+) )?(\[[^]]*\]|\w+)(?: with dp (\d+))?$")
KEYS = {
    **{name: f"layout.{name}" for name in ("tp", "cp", "pp", "dp", "ep", "etp", "layers_per_stage")},
    "gpus": "cluster.gpus", "kv_heads": "model.kv_heads", "vocab": "model.vocab", "hidden": "model.hidden",
    "ffn": "model.ffn", "global_batch": "training.global_batch", "sequence": "training.sequence",
    "precision": "training.precision", "targets": "training.lora.targets", "lora": "training.lora",
    "recompute": "training.recompute", "schedule": "schedule", "layers": "training.recompute.layers",
    "rank": "training.lora.rank", "shard": "layout.data.hsdp.shard", "cp_inner": "layout.cp_inner",
    "dispatcher": "layout.dispatcher", "order": "layout.order", "mtp_layers": "model.mtp_layers", "steps": "steps",
    "top_k": "model.experts.top_k", "num_groups": "model.experts.num_groups", "group_topk": "model.experts.group_topk",
}  # fmt: skip


def problems_of(mapping: dict[str, Any], overrides: list[str]) -> list[str]:
    """The sentences of the error; empty if the scenario is read."""
    try:
        Scenario.from_mapping(mapping, overrides)
    except InputError as error:
        first, *rest = str(error).split("\n  - ")
        return rest or [first.partition(": ")[2]]
    return []


def suggested_overrides(problem: str) -> list[list[str]]:
    """The overrides of each value that a sentence suggests."""
    match = SUGGESTION.search(problem)
    if match is None or match[1].startswith("no other "):
        return []
    name, suggestions = "", []
    for text in re.split(r" or (?![^\[]*\])", match[1]):
        value = VALUE.match(text)
        assert value is not None, problem
        name = value[1] or name
        dp = [] if value[3] is None else [f"layout.dp={value[3]}"]
        suggestions.append([f"{KEYS[name]}={value[2]}", *dp])
    return suggestions


@examples(60)
@given(changes=OVERRIDES, mixture_changes=st.none() | MIXTURE_OVERRIDES)
def test_every_suggested_value_repairs_its_problem(
    changes: dict[str, Any], mixture_changes: dict[str, Any] | None
) -> None:
    """Read with it, the scenario has no problem with that key, and none that it had not before, or that was hidden."""
    mapping = DENSE if mixture_changes is None else MIXTURE
    overrides = [f"{key}={json.dumps(value)}" for key, value in (changes | (mixture_changes or {})).items()]
    problems = problems_of(mapping, overrides)
    known = {problem.partition(":")[0] for problem in problems}
    hides_others = known & {"layout", "schedule", "layout.pp"}
    for problem in problems:
        repaired = problem.partition(":")[0]
        for suggestion in suggested_overrides(problem):
            left = {other.partition(":")[0] for other in problems_of(mapping, [*overrides, *suggestion])}
            assert not left & {repaired, suggestion[0].partition("=")[0]}, (problem, suggestion, left)
            assert hides_others or left <= known - {repaired}, (problem, suggestion, left)


def test_expert_parallelism_is_answered_with_a_value_that_all_rules_accept() -> None:
    """Of 72 ranks and 24 experts: 36 or 72 divide the ranks, and only 24 divides the experts, too."""
    mapping = {
        **MIXTURE, "cluster": {"name": "dgx-h100", "gpus": 72}, "layout": {"tp": 1, "ep": 48, "data": "zero1"},
    }  # fmt: skip
    (first, *_) = problems_of(mapping, [])
    assert "does not divide the 72 ranks" in first
    assert suggested_overrides(first) == [["layout.ep=24"]]
    assert problems_of(mapping, ["layout.ep=24"]) == []


def test_value_that_no_single_key_repairs_is_not_offered() -> None:
    """Of 13 heads tp may be 1 or 13: 13 does not divide the GPUs, and with 1 the 12 sequences are too few."""
    overrides = [
        "model.heads=13", "model.kv_heads=13", "model.head_dim=128", "layout.dp=null", "layout.pp=1",
        "training.global_batch=12",
    ]  # fmt: skip
    (problem,) = problems_of(DENSE, overrides)
    assert "layout.tp: 4 does not divide the 13 heads" in problem
    assert "no other tp alone fits" in problem
    assert not suggested_overrides(problem)


def test_problem_that_hides_others_is_answered_without_them() -> None:
    """The product of the degrees comes first; that the rank of LoRA is no multiple of tp is told afterwards."""
    (problem,) = problems_of(DENSE, ["cluster.gpus=96", "training.lora={rank: 1}"])
    assert suggested_overrides(problem) == [["layout.dp=12"]]
    (hidden,) = problems_of(DENSE, ["cluster.gpus=96", "training.lora={rank: 1}", "layout.dp=12"])
    assert hidden.startswith("training.lora.rank")


@pytest.mark.parametrize(
    ("overrides", "suggestion"),
    [
        (["layout.tp=5"], ["layout.tp=4"]),
        (["layout.pp=4"], ["layout.dp=3"]),
        (["layout.tp=16", "layout.dp=null"], None),
        (["training.global_batch=73"], ["training.global_batch=72"]),
    ],
)
def test_nearest_values_are_offered(overrides: list[str], suggestion: list[str] | None) -> None:
    problems = problems_of(DENSE, overrides)
    offered = [suggested for problem in problems for suggested in suggested_overrides(problem)]
    assert suggestion is None or suggestion in offered
