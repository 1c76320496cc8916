"""A block that several layers share: closed forms of parameters, FLOP and gathers; what does not fit it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clustersim import Scenario, simulate
from clustersim.build import build_plan
from clustersim.common.errors import InputError
from clustersim.lowering.units import UnitBuilder
from clustersim.model.flops import token_flops
from clustersim.model.hf_config import read_hf_config
from clustersim.model.kernels import KernelKind
from clustersim.model.layer_stack import layer_specs, stack_layers
from clustersim.model.layers import transformer_layer
from clustersim.model.mixer import AttentionFlopConvention
from clustersim.model.operators import LayerShard
from clustersim.model.presets import load_preset
from clustersim.model.training import Training
from clustersim.model.transformer import layer_parameter_count, parameter_count
from clustersim.program.task import CommOp, CommOverlap

# model.safetensors of Zyphra/Zamba2-1.2B: elements in its header
ZAMBA2_1B = 1_215_064_704
SHARED = 2 * 2048 * 3 * 4096 + 4096 * 2048 + 3 * 2048 * 8192 + 3 * 2048
"""Weights of its block: queries, keys and values of stream and embedding, output, MLP, norms."""
TINY: dict[str, Any] = {
    **{"model_type": "zamba2", "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 6},
    **{"num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 128, "n_mamba_heads": 8},
    **{"mamba_d_state": 16, "num_mem_blocks": 2, "adapter_rank": 8},
    "layers_block_type": ["mamba", "hybrid", "hybrid", "mamba", "hybrid", "hybrid"],
}


def _read(folder: Path, **keys: Any) -> Any:
    (folder / "config.json").write_text(json.dumps({**TINY, **keys}))
    return read_hf_config(folder)


def _scenario(layout: dict[str, Any], *overrides: str) -> Scenario:
    mapping = {
        "model": "zamba2-1.2b",
        "cluster": {"name": "dgx-h100", "gpus": 8},
        "layout": layout,
        "training": {"sequence": 1024, "global_batch": 16},
    }
    return Scenario.from_mapping(mapping, overrides)


def test_parameters_are_those_of_the_released_weights() -> None:
    assert parameter_count(load_preset("zamba2-1.2b")) == ZAMBA2_1B


@pytest.mark.parametrize(
    ("name", "sizes", "groups", "attention_adapters"),
    [
        ("zamba2-1.2b", (38, 2048, 64, 128, 1, 6), 1, 3),
        ("zamba2-2.7b", (54, 2560, 80, 64, 2, 9), 1, 0),
        ("zamba2-7b", (81, 3584, 112, 64, 2, 13), 2, 0),
    ],
)
def test_presets_have_the_modules_of_transformers(
    name: str, sizes: tuple[int, ...], groups: int, attention_adapters: int
) -> None:
    """transformers@00511f5, models/zamba2/modeling_zamba2.py. sizes: layers, hidden, heads, state, blocks, uses.

    Each use has the adapters of its block alone (`i % num_mem_blocks == block_id`) and a matrix of its own.
    """
    layers, hidden, heads, state, blocks, uses = sizes
    inner, wide, ffn, rank = 2 * hidden, 2 * hidden, 4 * hidden, 128
    conv = inner + 2 * groups * state
    mamba = hidden * (inner + conv + heads) + 5 * conv + 3 * heads + inner + inner * hidden + hidden
    block = 3 * wide * wide + wide * hidden + 3 * hidden * ffn + wide + hidden
    use = hidden * hidden + rank * (hidden + 2 * ffn) + attention_adapters * 2 * rank * wide
    total = layers * mamba + blocks * block + uses * use + hidden + 32_000 * hidden
    assert parameter_count(load_preset(name)) == total


@pytest.mark.parametrize(
    ("name", "gigabytes", "unused"),
    [("zamba2-7b", "14.71", 0), ("zamba2-2.7b", "5.324", 0), ("zamba2-2.7b", "5.37", 9)],
)
def test_released_files_are_as_large(name: str, gigabytes: str, unused: int) -> None:
    """Of Zamba2-7B-Instruct and Zamba2-2.7B-instruct (4.94 GB and 384 MB) in the format of Transformers.

    Those of Zamba2-2.7B, of an older format, have adapters of either block for all nine uses: nine too many.
    """
    model = load_preset(name)
    adapters = unused * 128 * (model.hidden + 2 * 4 * model.hidden)
    size = 2 * (parameter_count(model) + adapters) / 1e9
    assert size == pytest.approx(float(gigabytes), abs=0.0125)  # the sum of two or three sizes rounded to 5 MB each


def test_every_use_adds_its_adapters_and_its_matrix(tmp_path: Path) -> None:
    hidden, ffn, rank = 64, 256, 8
    block = 2 * hidden * 3 * 128 + 128 * hidden + 3 * hidden * ffn + 3 * hidden
    use = hidden * hidden + rank * (hidden + 2 * ffn)
    inner, maps = 128, 2 * 16
    mamba = hidden * (2 * inner + maps + 8) + inner * hidden + (inner + maps) * 5 + 3 * 8 + inner + hidden
    total = 6 * mamba + 2 * block + 4 * use + hidden + 512 * hidden
    assert parameter_count(_read(tmp_path)) == total
    attention_adapters = 4 * 3 * rank * 2 * (2 * hidden)
    assert parameter_count(_read(tmp_path, use_shared_attention_adapter=True)) == total + attention_adapters


@pytest.mark.parametrize("name", ["zamba2-1.2b", "zamba2-2.7b"])
def test_a_layer_holds_what_the_block_states_and_multiplies_by_all_of_it(name: str) -> None:
    """Six FLOP per token and weight of every use, whoever holds the weights; the stream is doubled before the block."""
    model, tokens = load_preset(name), 512
    for spec in model.distinct_specs:
        layer = transformer_layer(model, spec, Training(tokens, 1), LayerShard(1, tokens, tokens))
        assert layer.parameter_count == layer_parameter_count(model, spec)
        kernels = (
            kernel
            for operator in layer.operators
            for kernel in (*operator.forward, *operator.input_gradient, *operator.weight_gradient)
            if kernel.kind is KernelKind.MATMUL
        )
        elements = sum(mixer.matrix_elements(model.hidden) for mixer in spec.mixers)
        assert sum(kernel.flops for kernel in kernels) == 6.0 * tokens * elements


def test_later_uses_hold_none_of_the_block_and_use_all_of_it() -> None:
    model = load_preset("zamba2-1.2b")
    first, later = (
        transformer_layer(model, spec, Training(512, 1), LayerShard(1, 512, 512))
        for spec in model.distinct_specs
        if spec.shared is not None
    )
    assert first.used_parameters_by_group == first.parameters_by_group == later.used_parameters_by_group
    assert first.parameter_count - later.parameter_count == SHARED


def test_units_of_a_step_use_the_block_six_times() -> None:
    plan = build_plan(_scenario({"data": "fsdp"}))
    units = UnitBuilder(plan).stage_units(plan.stages[0])
    assert sum(unit.parameter_count for unit in units) == ZAMBA2_1B
    assert sum(sum(unit.used_by_group.values()) for unit in units) == ZAMBA2_1B + 5 * SHARED


def test_model_flop_count_each_use(tmp_path: Path) -> None:
    """A model with the uses removed has less by what its uses multiply, and by their attention."""
    model = _read(tmp_path)
    without = replace(model, stack=stack_layers(replace(spec, shared=None) for spec in layer_specs(model.stack)))
    attention = AttentionFlopConvention.FULL
    expected = sum(
        6.0 * spec.shared.matrix_elements(64) + spec.shared.mixing_flops(128, attention)
        for spec in layer_specs(model.stack)
        if spec.shared is not None
    )
    assert token_flops(model, 128) - token_flops(without, 128) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("zamba2-1.2b", {"data": "fsdp"}),
        ("zamba2-1.2b", {"cp": 2}),
        ("zamba2-7b", {"tp": 2, "sequence_parallel": True, "data": "zero1"}),
    ],
)
def test_folded_is_unfolded(model: str, layout: dict[str, Any]) -> None:
    scenario = _scenario(layout, f"model={model}")
    folded, unfolded = simulate(scenario), simulate(scenario.with_overrides("cost.symmetry=off"))
    assert unfolded.step_time == pytest.approx(folded.step_time, rel=1e-9)


@pytest.mark.parametrize(("model", "attentions"), [("zamba2-1.2b", 6), ("falcon-h1-34b", 72)])
def test_attention_before_or_next_to_mamba_exchanges_keys_and_values(model: str, attentions: int) -> None:
    """As often as there is attention, next to the all-to-alls of every layer's Mamba 2."""
    plan = build_plan(_scenario({"cp": 2}, f"model={model}"))
    operations = [operation for unit in UnitBuilder(plan).stage_units(plan.stages[0]) for operation in unit.forward]
    overlaps = [operation.body for operation in operations if isinstance(operation.body, CommOverlap)]
    assert len(overlaps) == attentions
    swaps = [operation.body for operation in operations if isinstance(operation.body, CommOp)]
    assert len(swaps) == 2 * plan.model.layer_count


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("layout.pp=2", "layout.pp: 2 stages split zamba2-1.2b, whose layers with shared attention read .*; pp 1 fits"),
        ("training.lora={rank: 16}", "training.lora with the block that layers of zamba2-1.2b share"),
        ("layout.data=deepspeed_zero3", "layout.data: deepspeed_zero3 with the block"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(override: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        _scenario({}, override)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"layers_block_type": ["mamba"]}, "layers_block_type is 1 values, not one for each of the 6 layers"),
        ({"layers_block_type": 6 * ["m"]}, "layers_block_type of layer 0 is 'm'; mamba and hybrid are modelled"),
        ({"layers_block_type": None}, "has no layers_block_type, which a zamba2 model needs"),
        ({"n_mamba_heads": 7}, "n_mamba_heads 7 does not divide mamba_expand x hidden_size 128"),
        ({"add_bias_linear": True}, "add_bias_linear True is not modelled for zamba2; False is"),
    ],
)
def test_files_at_fault_are_refused(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        _read(tmp_path, **keys)
