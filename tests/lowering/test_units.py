"""What stages consist of: parameters, gradients, recomputation."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from clustersim.lowering.units import Unit, UnitBuilder
from clustersim.model.kernels import KernelKind
from clustersim.model.layer_stack import BlockForm
from clustersim.model.presets import load_preset
from clustersim.model.training import (
    AttentionBackend,
    FullRecompute,
    NoRecompute,
    Recompute,
    SelectiveOpRecompute,
    SelectiveRecompute,
    Training,
)
from clustersim.model.transformer import layer_parameter_count, norm_parameter_count, parameter_count
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.program.task import WorkType
from tests.lowering.plans import SMALL, TRAINING, planned
from tests.uniform_models import stage

MODELS = ["llama3-8b", "llama3-405b", "gpt3-175b", "gpt2-small", "qwen2.5-7b", "llama2-70b"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pp", [1, 4])
def test_stages_together_hold_the_whole_model(name: str, pp: int) -> None:
    """Without tensor parallelism exactly; a tied embedding is held twice where its two uses are on two stages."""
    model = load_preset(name)
    plan = planned(Layout(pp=pp), Training(1024, 8), model)
    twice = model.vocab * model.hidden if model.tied_embeddings and pp > 1 else 0
    assert sum(plan.parameter_count(stage) for stage in plan.stages) == parameter_count(model) + twice


@pytest.mark.parametrize("name", ["llama3-8b", "gpt3-175b", "llama2-70b"])
@pytest.mark.parametrize("tp", [2, 8])
def test_tensor_ranks_together_hold_the_model_and_copies_of_what_is_not_split(name: str, tp: int) -> None:
    """Megatron repeats on every tensor rank: norms, learned positions, and the biases of row-parallel products.

    Two such biases of `hidden` a layer (attention output and second MLP matrix), and one final norm.
    """
    model = load_preset(name)
    plan = planned(Layout(tp=tp), Training(1024, 8), replace(model, vocab=model.vocab // tp * tp))
    model = plan.model
    biases = 2 * model.hidden if model.linear_bias else 0
    repeated = model.layer_count * (2 * norm_parameter_count(model) + biases) + norm_parameter_count(model)
    if name.startswith("gpt"):
        repeated += model.max_positions * model.hidden
    held = tp * sum(plan.parameter_count(stage) for stage in plan.stages)
    assert held == parameter_count(model) + (tp - 1) * repeated


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recompute", [NoRecompute(), SelectiveRecompute(), FullRecompute(), FullRecompute(3)])
def test_backward_completes_every_gradient_of_its_stage(name: str, recompute: Recompute) -> None:
    plan = planned(Layout(pp=2), Training(1024, 8, recompute=recompute), load_preset(name))
    units = UnitBuilder(plan)
    for part in plan.stages:
        marked = sum(operation.gradient_count for unit in units.stage_units(part) for operation in unit.backward)
        assert marked == plan.parameter_count(part)


def test_units_are_the_embedding_the_layers_and_the_head() -> None:
    plan = planned(Layout())
    units = UnitBuilder(plan).stage_units(stage(plan.model, 0, 4, embedding=True, head=True))
    assert [unit.name for unit in units] == ["embedding", *["layer"] * 4, "head"]
    assert units[1].parameter_count == layer_parameter_count(SMALL, *SMALL.distinct_specs)


def test_a_tied_matrix_counts_once_where_both_ends_are_on_one_stage() -> None:
    tied = planned(Layout(), model=replace(SMALL, tied_embeddings=True))
    assert tied.parameter_count(tied.stages[0]) == parameter_count(tied.model)
    (kernel,) = [
        operation.kernel
        for operation in UnitBuilder(tied).stage_units(tied.stages[0])[-1].backward
        if operation.kernel and operation.kernel.name == "head.logits.weight_gradient"
    ]
    assert kernel.flops == 2 * 64 * 64 * 256  # the product is still done


@pytest.mark.parametrize(
    ("recompute", "layers"), [(NoRecompute(), 0), (FullRecompute(), 4), (FullRecompute(3), 3), (FullRecompute(9), 4)]
)
def test_full_recomputation_runs_so_many_layers_forward_again(recompute: Recompute, layers: int) -> None:
    plan = planned(Layout(), replace(TRAINING, recompute=recompute))
    units = UnitBuilder(plan).stage_units(plan.stages[0])
    again = [
        [operation.body for operation in unit.backward if operation.work_type is WorkType.RECOMPUTE] for unit in units
    ]
    assert sum(bool(part) for part in again) == layers
    for unit, part in zip(units, again, strict=True):
        if part:
            assert unit.name == "layer"
            assert part == [item.body for item in unit.forward]
            assert [element.work_type for element in unit.backward[: len(part)]] == [WorkType.RECOMPUTE] * len(part)


def test_selective_recomputation_runs_every_layers_attention_core_again() -> None:
    plan = planned(Layout(), replace(TRAINING, recompute=SelectiveRecompute()))
    for unit in UnitBuilder(plan).stage_units(plan.stages[0]):
        again = [operation.kernel for operation in unit.backward if operation.work_type is WorkType.RECOMPUTE]
        assert [kernel.kind for kernel in again if kernel] == [KernelKind.ATTENTION_FORWARD] * (unit.name == "layer")


def _again(plan: Plan) -> list[str]:
    """Names of the kernels that a layer runs again."""
    (found,) = {tuple(_names(unit)) for unit in UnitBuilder(plan).stage_units(plan.stages[0]) if unit.name == "layer"}
    return list(found)


def _names(unit: Unit) -> Iterator[str]:
    for operation in unit.backward:
        if operation.work_type is WorkType.RECOMPUTE:
            yield operation.kernel.name if operation.kernel is not None else "exchange"


@pytest.mark.parametrize(
    ("model", "recompute", "left_out"),
    [
        # the sum with the residual stream saves nothing, and the last product has saved its input before it runs
        ({}, FullRecompute(), ["mlp.down", "mlp.residual"]),
        # dropout saves its mask, a norm its statistics, both behind the product
        ({"dropout": True}, FullRecompute(), []),
        ({"block": BlockForm.POST_NORM}, FullRecompute(), ["mlp.residual"]),
        # all of the core's last product, but what softmax makes of scores is read by it
        ({}, SelectiveRecompute(), ["attention.context"]),
        ({}, SelectiveOpRecompute(), ["mlp.residual"]),
    ],
)
def test_recomputation_that_stops_early_leaves_out_what_nobody_reads(
    model: dict[str, Any], recompute: Recompute, left_out: list[str]
) -> None:
    """torch.utils.checkpoint's hooks stop at the last tensor that is saved (its `_recomputation_hook`)."""
    training = replace(TRAINING, recompute=recompute, attention=AttentionBackend.STANDARD)
    block = model.get("block", BlockForm.PRE_NORM)
    given = replace(load_preset("llama-tiny"), dropout="dropout" in model)
    given = replace(given, stack=tuple(replace(run, spec=replace(run.spec, block=block)) for run in given.stack))
    whole, early = (_again(planned(Layout(), replace(training, early_stop=stops), given)) for stops in (False, True))
    assert early == whole[: len(whole) - len(left_out)]
    assert whole[len(early) :] == left_out


def test_flash_attention_is_run_again_whole_as_it_saves_its_result() -> None:
    training = replace(TRAINING, recompute=SelectiveRecompute(), early_stop=True)
    assert _again(planned(Layout(), training)) == ["attention.core"]


def test_the_sum_behind_a_last_product_is_not_sent_again() -> None:
    """Of a layer's two all-reduces forward, recomputation that stops early needs the first only."""
    training = replace(TRAINING, recompute=FullRecompute())
    whole, early = (
        _again(planned(Layout(tp=2), replace(training, early_stop=stops))).count("exchange") for stops in (False, True)
    )
    assert (whole, early) == (2, 1)


def test_early_stop_keeps_what_backward_runs_but_for_the_recomputation() -> None:
    training = replace(TRAINING, recompute=FullRecompute())
    passes = [
        [
            operation
            for unit in UnitBuilder(plan).stage_units(plan.stages[0])
            for operation in unit.backward
            if operation.work_type is not WorkType.RECOMPUTE
        ]
        for plan in (planned(Layout(tp=2), replace(training, early_stop=stops)) for stops in (False, True))
    ]
    assert passes[0] == passes[1]
