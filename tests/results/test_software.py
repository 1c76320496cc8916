"""The software of an answer: what runs, and whether the file says so."""

from typing import Any

import pytest

from clustersim import Scenario, simulate
from clustersim.model.training import ALL_FUSED, FusedKernel
from clustersim.report.labels import describe_software
from clustersim.results.software import software_of
from tests.sentences import parts

BASE_MAPPING: dict[str, Any] = {
    "model": "llama-tiny",
    "cluster": {"name": "dgx-h100", "gpus": 8},
    "layout": {"data": "fsdp"},
    "training": {"sequence": 256, "global_batch": 8},
}


def load_scenario(*overrides: str) -> Scenario:
    return Scenario.from_mapping(BASE_MAPPING, overrides)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ((), "pytorch ... unfused kernels ... sdpa attention ... torch loss (assumed: ... no framework)"),
        (("framework=pytorch",), "pytorch · unfused kernels · sdpa attention · torch loss"),
        (
            ("framework={name: torchtitan, version: 2024-07-01, torch_compile: true}",),
            "torchtitan 2024-07-01, compiled ... unfused optimizer ... flash2 attention ... torch loss",
        ),
        (("framework=ideal",), "ideal · fused kernels · flash attention · fused loss"),
        (
            ("framework={name: megatron-bridge, recipe: performance}",),
            "megatron-bridge performance recipe ... fused kernels ... flash attention ... fused loss",
        ),
        (
            ("framework=megatron", "training.fused=[norm, optimizer]", "training.attention=flash2"),
            "megatron ... unfused rotary, activation, residual, softmax ... flash2 attention ... vocab_parallel loss",
        ),
    ],
)
def test_the_software_is_named(overrides: tuple[str, ...], sentence: str) -> None:
    assert parts(sentence).fullmatch(describe_software(load_scenario(*overrides)))


def test_the_json_says_what_was_assumed() -> None:
    assumed = simulate(load_scenario()).to_json()["software"]
    stated = software_of(load_scenario("framework=transformers")).to_json()
    assert (assumed["framework"], assumed["assumed"], assumed["fused"]) == ("pytorch", True, [])
    assert (stated["framework"], stated["assumed"], stated["fused"]) == ("transformers", False, ["optimizer"])
    assert (assumed["gradients"], stated["gradients"]) == ("fp32", "bf16")


def test_what_a_file_states_wins_over_the_framework() -> None:
    stated = load_scenario("framework=transformers", "training.fused=true", "training.precision.gradients=fp32")
    software = software_of(stated)
    assert frozenset(software.fused) == ALL_FUSED
    assert software.gradients == "fp32"
    compiled = software_of(load_scenario("framework={name: pytorch, torch_compile: true}"))
    assert compiled.unfused == (FusedKernel.OPTIMIZER,)


def test_a_host_that_costs_nothing_is_never_slower() -> None:
    """Every kernel of the ideal stack is one that others run too, launched in no time."""
    ideal = simulate(load_scenario("framework=ideal")).step_time
    for name in ("pytorch", "torchtitan", "transformers", "megatron"):
        assert simulate(load_scenario(f"framework={name}")).step_time >= ideal
