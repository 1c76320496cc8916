"""Units that stages consist of: parameters, gradients, recomputation."""

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
from tests.lowering.plans import SMALL, TRAINING, make_plan
from tests.parallel.operation_listing import comparable_operations
from tests.uniform_models import uniform_stage

MODELS = ["llama3-8b", "llama3-405b", "gpt3-175b", "gpt2-small", "qwen2.5-7b", "llama2-70b"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pp", [1, 4])
def test_all_stages_hold_the_full_model(name: str, pp: int) -> None:
    """Without tensor parallelism exactly; a tied embedding is held twice where its two uses are on two stages."""
    model = load_preset(name)
    plan = make_plan(Layout(pp=pp), Training(1024, 8), model)
    second_copy = model.vocab * model.hidden if model.tied_embeddings and pp > 1 else 0
    assert sum(plan.parameter_count(stage) for stage in plan.stages) == parameter_count(model) + second_copy


@pytest.mark.parametrize("name", ["llama3-8b", "gpt3-175b", "llama2-70b"])
@pytest.mark.parametrize("tp", [2, 8])
def test_all_tensor_ranks_hold_the_model_and_replicated_copies(name: str, tp: int) -> None:
    """Megatron replicates on every tensor rank: norms, learned positions, and the biases of row-parallel matmuls.

    Two such biases of `hidden` a layer (attention output and second MLP matrix), and one final norm.
    """
    model = load_preset(name)
    plan = make_plan(Layout(tp=tp), Training(1024, 8), replace(model, vocab=model.vocab // tp * tp))
    model = plan.model
    biases = 2 * model.hidden if model.linear_bias else 0
    replicated = model.layer_count * (2 * norm_parameter_count(model) + biases) + norm_parameter_count(model)
    if name.startswith("gpt"):
        replicated += model.max_positions * model.hidden
    held_parameters = tp * sum(plan.parameter_count(stage) for stage in plan.stages)
    assert held_parameters == parameter_count(model) + (tp - 1) * replicated


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recompute", [NoRecompute(), SelectiveRecompute(), FullRecompute(), FullRecompute(3)])
def test_backward_completes_all_gradients_of_its_stage(name: str, recompute: Recompute) -> None:
    plan = make_plan(Layout(pp=2), Training(1024, 8, recompute=recompute), load_preset(name))
    units = UnitBuilder(plan)
    for plan_stage in plan.stages:
        completed = sum(
            operation.gradient_count for unit in units.stage_units(plan_stage) for operation in unit.backward
        )
        assert completed == plan.parameter_count(plan_stage)


def test_units_are_the_embedding_the_layers_and_the_head() -> None:
    plan = make_plan(Layout())
    units = UnitBuilder(plan).stage_units(uniform_stage(plan.model, 0, 4, embedding=True, head=True))
    assert [unit.name for unit in units] == ["embedding", *["layer"] * 4, "head"]
    assert units[1].parameter_count == layer_parameter_count(SMALL, *SMALL.distinct_specs)


def test_a_tied_matrix_counts_once_where_both_ends_are_on_one_stage() -> None:
    tied = make_plan(Layout(), model=replace(SMALL, tied_embeddings=True))
    assert tied.parameter_count(tied.stages[0]) == parameter_count(tied.model)
    (kernel,) = [
        operation.kernel
        for operation in UnitBuilder(tied).stage_units(tied.stages[0])[-1].backward
        if operation.kernel and operation.kernel.name == "head.logits.weight_gradient"
    ]
    assert kernel.flops == 2 * 64 * 64 * 256  # the matmul is still done


@pytest.mark.parametrize(
    ("recompute", "layers"), [(NoRecompute(), 0), (FullRecompute(), 4), (FullRecompute(3), 3), (FullRecompute(9), 4)]
)
def test_full_recompute_reruns_the_selected_layers(recompute: Recompute, layers: int) -> None:
    plan = make_plan(Layout(), replace(TRAINING, recompute=recompute))
    units = UnitBuilder(plan).stage_units(plan.stages[0])
    recomputed = [
        [operation.body for operation in unit.backward if operation.work_type is WorkType.RECOMPUTE] for unit in units
    ]
    assert sum(bool(bodies) for bodies in recomputed) == layers
    for unit, bodies in zip(units, recomputed, strict=True):
        if bodies:
            assert unit.name == "layer"
            assert bodies == [item.body for item in unit.forward]
            assert [element.work_type for element in unit.backward[: len(bodies)]] == [WorkType.RECOMPUTE] * len(bodies)


def test_selective_recompute_reruns_the_attention_cores() -> None:
    plan = make_plan(Layout(), replace(TRAINING, recompute=SelectiveRecompute()))
    for unit in UnitBuilder(plan).stage_units(plan.stages[0]):
        recomputed = [operation.kernel for operation in unit.backward if operation.work_type is WorkType.RECOMPUTE]
        assert [kernel.kind for kernel in recomputed if kernel] == [KernelKind.ATTENTION_FORWARD] * (
            unit.name == "layer"
        )


def _recomputed_kernel_names(plan: Plan) -> list[str]:
    """Names of the kernels that a layer recomputes."""
    (kernel_names,) = {
        tuple(_recomputed_names(unit)) for unit in UnitBuilder(plan).stage_units(plan.stages[0]) if unit.name == "layer"
    }
    return list(kernel_names)


def _recomputed_names(unit: Unit) -> Iterator[str]:
    for operation in unit.backward:
        if operation.work_type is WorkType.RECOMPUTE:
            yield operation.kernel.name if operation.kernel is not None else "comm op"


@pytest.mark.parametrize(
    ("model", "recompute", "left_out"),
    [
        # the residual sum saves nothing, and the last matmul has saved its input before it runs
        ({}, FullRecompute(), ["mlp.down", "mlp.residual"]),
        # dropout saves its mask, a norm its statistics, both after the matmul
        ({"dropout": True}, FullRecompute(), []),
        ({"block": BlockForm.POST_NORM}, FullRecompute(), ["mlp.residual"]),
        # all of the core's last matmul, which reads the softmax result
        ({}, SelectiveRecompute(), ["attention.context"]),
        ({}, SelectiveOpRecompute(), ["mlp.residual"]),
    ],
)
def test_early_stop_skips_unused_recomputation(
    model: dict[str, Any], recompute: Recompute, left_out: list[str]
) -> None:
    """torch.utils.checkpoint's hooks stop at the last tensor that is saved (its `_recomputation_hook`)."""
    training = replace(TRAINING, recompute=recompute, attention=AttentionBackend.STANDARD)
    block = model.get("block", BlockForm.PRE_NORM)
    tested_model = replace(load_preset("llama-tiny"), dropout="dropout" in model)
    tested_model = replace(
        tested_model, stack=tuple(replace(run, spec=replace(run.spec, block=block)) for run in tested_model.stack)
    )
    full_names, early_names = (
        _recomputed_kernel_names(make_plan(Layout(), replace(training, early_stop=stops), tested_model))
        for stops in (False, True)
    )
    assert early_names == full_names[: len(full_names) - len(left_out)]
    assert full_names[len(early_names) :] == left_out


def test_early_stop_reruns_flash_attention_in_full() -> None:
    training = replace(TRAINING, recompute=SelectiveRecompute(), early_stop=True)
    assert _recomputed_kernel_names(make_plan(Layout(), training)) == ["attention.core"]


def test_early_stop_skips_the_last_all_reduce() -> None:
    """Of a layer's two forward all-reduces, recomputation with early stop needs the first only."""
    training = replace(TRAINING, recompute=FullRecompute())
    full_count, early_count = (
        _recomputed_kernel_names(make_plan(Layout(tp=2), replace(training, early_stop=stops))).count("comm op")
        for stops in (False, True)
    )
    assert (full_count, early_count) == (2, 1)


def test_early_stop_changes_only_the_recomputation() -> None:
    training = replace(TRAINING, recompute=FullRecompute())
    passes = [
        comparable_operations(
            operation
            for unit in UnitBuilder(plan).stage_units(plan.stages[0])
            for operation in unit.backward
            if operation.work_type is not WorkType.RECOMPUTE
        )
        for plan in (make_plan(Layout(tp=2), replace(training, early_stop=stops)) for stops in (False, True))
    ]
    assert passes[0] == passes[1]
