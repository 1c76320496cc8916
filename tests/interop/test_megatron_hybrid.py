"""Hybrid models of Megatron-LM: patterns of layers, their stages, and the way back."""

from typing import Any

import pytest

from clustersim.build import build_plan
from clustersim.common.errors import InputError
from clustersim.interop.export import export_scenario
from clustersim.interop.megatron_export import megatron_script
from clustersim.interop.megatron_hybrid import pattern_from_ratios
from clustersim.interop.megatron_import import import_megatron
from clustersim.interop.registry import EXPORTERS
from clustersim.model.flops import model_flops
from clustersim.model.layer_stack import layer_specs
from clustersim.model.mixers.gated_delta_net import GatedDeltaNet
from clustersim.model.mixers.mamba2 import Mamba2
from clustersim.model.presets import load_preset
from clustersim.model.sparse_attention_spec import DeepseekSparseAttention
from clustersim.model.training import FullRecompute
from clustersim.model.transformer import parameter_count
from clustersim.scenario import Scenario

NEMOTRON = (
    "torchrun --nproc_per_node 8 --nnodes 2 pretrain_hybrid.py --bf16 --micro-batch-size 1 --global-batch-size 64 "
    "--disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type none --squared-relu "
    "--normalization RMSNorm --hidden-size 4096 --ffn-hidden-size 21504 --num-attention-heads 32 --kv-channels 128 "
    "--group-query-attention --num-query-groups 8 --is-hybrid-model --mamba-num-heads 128 --seq-length 8192 "
    "--max-position-embeddings 8192 --spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec "
    "--vocab-size 131072 --attention-dropout 0 --hidden-dropout 0 --tensor-model-parallel-size 4 --sequence-parallel "
)
PATTERN = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
SMALL = (
    "pretrain_gpt.py --micro-batch-size 1 --global-batch-size 8 --hidden-size 256 --num-attention-heads 4 "
    "--seq-length 512 --max-position-embeddings 512 --vocab-size 1024 --num-layers 8 --position-embedding-type rope "
)


def _import(text: str, gpus: int = 16) -> dict[str, Any]:
    return import_megatron(text, "run", gpu_count=gpus).mapping


def _scenario(text: str, gpus: int = 16) -> Scenario:
    return Scenario.from_mapping({"name": "run", **_import(text, gpus)})


@pytest.mark.parametrize("flag", ["--hybrid-layer-pattern", "--hybrid-override-pattern"])
def test_the_arguments_of_nemotron_h_are_its_preset(flag: str) -> None:
    model = _scenario(f"{NEMOTRON} {flag} '{PATTERN}'").model
    assert parameter_count(model) == parameter_count(load_preset("nemotron-h-8b"))
    assert [(spec.mixer, spec.mlp is None) for spec in layer_specs(model.stack)] == [
        (spec.mixer, spec.mlp is None) for spec in layer_specs(load_preset("nemotron-h-8b").stack)
    ]


def test_bars_are_between_pipeline_stages() -> None:
    first, second = PATTERN[:30], PATTERN[30:]
    scenario = _scenario(f"{NEMOTRON} --pipeline-model-parallel-size 2 --hybrid-layer-pattern '{first}|{second}'")
    assert scenario.layout.layers_per_stage == (30, 22)


def test_a_pattern_decides_the_number_of_layers_whatever_else_says() -> None:
    text = f"{NEMOTRON} --num-layers 4 --hybrid-layer-pattern '{PATTERN}'"
    assert _scenario(text).model.layer_count == len(PATTERN)
    assert any(
        "--num-layers 4 is passed over: the pattern has 52" in note
        for note in import_megatron(text, "run", gpu_count=16).assumptions
    )


def test_ratios_space_attention_and_mlps_evenly() -> None:
    pattern = pattern_from_ratios(56, 0.08, 0.5)
    assert (len(pattern), pattern.count("*"), pattern.count("-")) == (56, 4, 28)
    assert pattern[0] == "M"
    text = f"{NEMOTRON} --num-layers 56 --hybrid-attention-ratio 0.08 --hybrid-mlp-ratio 0.5"
    assert _import(text)["model"]["hybrid_layer_pattern"] == pattern


def test_a_pattern_without_the_experts_that_are_given_is_refused() -> None:
    """Pai-Megatron-Patch's Qwen3-Next: its M is a gated delta net, and its - a layer with experts."""
    with pytest.raises(InputError, match="num-experts"):
        _import(f"{NEMOTRON} --hybrid-layer-pattern '{PATTERN}' --num-experts 512")


def test_gated_delta_nets_between_attention() -> None:
    text = SMALL + "--experimental-attention-variant gdn --linear-attention-freq 4 --linear-num-value-heads 16"
    specs = layer_specs(_scenario(text + " --linear-num-key-heads 8 --attention-output-gate", gpus=1).model.stack)
    assert [isinstance(spec.mixer, GatedDeltaNet) for spec in specs] == 2 * [True, True, True, False]
    assert all(spec.mlp is not None for spec in specs)


def test_what_is_exported_is_imported_again() -> None:
    scenario = _scenario(f"{NEMOTRON} --hybrid-layer-pattern '{PATTERN}'")
    assert _scenario(megatron_script(scenario)).model.stack == scenario.model.stack
    assert any(isinstance(mixer, Mamba2) for mixer in scenario.model.distinct_mixers)


@pytest.mark.parametrize("program", ["megatron", "primus"])
def test_layers_of_mamba_and_experts_are_two_of_a_pattern(program: str) -> None:
    """Granite 4: as many weights and model FLOP, in twice as many layers, of which twice as many are recomputed."""
    mapping = {
        "model": "granite-4.0-h-small",
        "cluster": {"name": "dgx-h100", "gpus": 16},
        "layout": {"pp": 2, "ep": 8, "data": "zero1"},
        "training": {"sequence": 4096, "global_batch": 64, "recompute": {"layers": 3}},
        "framework": "megatron",
    }
    scenario = Scenario.from_mapping(mapping)
    exporter = EXPORTERS[program]
    result = export_scenario(scenario, exporter)
    again = Scenario.from_mapping({"name": "run", **exporter.parse(result.text, "run", "dgx-h100", 16).mapping})
    assert any(difference.startswith("model.layers: 40") for difference in result.differences)
    assert (scenario.model.layer_count, again.model.layer_count) == (40, 80)
    assert again.training.recompute == FullRecompute(6)
    assert parameter_count(again.model) == parameter_count(scenario.model)
    assert model_flops(again.model, again.training) == model_flops(scenario.model, scenario.training)
    plans = build_plan(scenario), build_plan(again)
    assert len({tuple(map(plan.parameter_count, plan.stages)) for plan in plans}) == 1


@pytest.mark.parametrize("mtp_layers", [0, 1])
def test_mtp_layers_like_the_last_layer_are_exported(mtp_layers: int) -> None:
    """Megatron-LM's are as the last layer of the stack, which is Qwen3-Next's attention, too."""
    training = {"sequence": 4096, "global_batch": 8}
    model = {"preset": "qwen3-next-80b-a3b", "mtp_layers": mtp_layers}
    mapping = {"model": model, "training": training, "framework": "megatron"}
    script = megatron_script(Scenario.from_mapping({**mapping, "cluster": {"name": "dgx-h100", "gpus": 8}}))
    assert ("--mtp-num-layers 1" in script) == bool(mtp_layers)
    assert "--linear-attention-freq 4" in script


def test_a_model_without_attention_states_the_heads_that_megatron_requires() -> None:
    scenario = _scenario(f"{NEMOTRON} --hybrid-layer-pattern 'MMMM'")
    script = megatron_script(scenario)
    assert "--num-attention-heads 64" in script  # 4096 / 64
    assert _scenario(script).model.stack == scenario.model.stack


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        ("kimi-linear-48b-a3b", r"cannot express the mixers \(Kimi delta attention\) of kimi"),
        ("zamba2-1.2b", "cannot express the shared blocks of zamba2"),
        ("rwkv7-0.1b", r"cannot express the .*mixers \(RWKV-7\)"),
    ],
)
def test_what_megatron_does_not_have_is_named(preset: str, message: str) -> None:
    scenario = Scenario.from_mapping(
        {
            "model": preset,
            "cluster": {"name": "dgx-h100", "gpus": 8},
            "training": {"sequence": 1024, "global_batch": 8},
        }
    )
    with pytest.raises(InputError, match=message):
        export_scenario(scenario, EXPORTERS["megatron"])


@pytest.mark.parametrize(
    "flags",
    [
        f"--pipeline-model-parallel-size 2 --hybrid-layer-pattern '{PATTERN[:30]}|{PATTERN[30:]}/*-/*-'",
        f"--hybrid-override-pattern '{PATTERN}' --mtp-num-layers 2 --mtp-hybrid-override-pattern '*-'",
    ],
)
def test_multi_token_prediction_layers_are_read_and_written(flags: str) -> None:
    scenario = _scenario(f"{NEMOTRON} {flags}")
    mtp = scenario.model.mtp_spec
    assert scenario.model.mtp_layers == 2
    assert mtp is not None
    assert mtp.attention is not None
    assert mtp.mlp is not None
    exported = _scenario(megatron_script(scenario)).model
    assert (exported.stack, exported.mtp_layers, exported.mtp_spec) == (scenario.model.stack, 2, mtp)


def test_mtp_layers_that_no_pattern_describes_are_refused() -> None:
    with pytest.raises(InputError, match="--mtp-num-layers: the pattern does not say which layers"):
        _import(f"{NEMOTRON} --hybrid-layer-pattern '{PATTERN}' --mtp-num-layers 1")


def test_mtp_layers_of_several_kinds_are_refused() -> None:
    with pytest.raises(InputError, match="/MM is no multi-token prediction layer"):
        _scenario(f"{NEMOTRON} --hybrid-layer-pattern '{PATTERN}/MM'")


SPARSE = (
    f"{SMALL} --swiglu --multi-latent-attention --q-lora-rank 64 --kv-lora-rank 64 --qk-layernorm --qk-head-dim 32 "
    "--qk-pos-emb-head-dim 16 --v-head-dim 32 --disable-bias-linear --normalization RMSNorm --attention-dropout 0 "
    "--hidden-dropout 0 --untie-embeddings-and-output-weights --experimental-attention-variant dsa "
    "--dsa-indexer-n-heads 8 --dsa-indexer-head-dim 32 --dsa-indexer-topk 128 --dsa-indexer-loss-coeff 0.01 "
)


@pytest.mark.parametrize("backend", ["cudnn", "tilelang"])
def test_sparse_attention_is_read_and_written(backend: str) -> None:
    scenario = _scenario(f"{SPARSE} --dsa-indexer-use-sparse-loss --dsa-kernel-backend {backend}", gpus=8)
    (sparse,) = scenario.model.distinct_mixers
    assert isinstance(sparse, DeepseekSparseAttention)
    assert (sparse.latent.q_lora_rank, sparse.index_heads, sparse.index_head_dim, sparse.index_topk) == (64, 8, 32, 128)
    assert _scenario(megatron_script(scenario), gpus=8).model.stack == scenario.model.stack


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--dsa-indexer-use-sparse-loss", "--dsa-kernel-backend: none computes all scores unfused"),
        ("--dsa-kernel-backend cudnn", r"--dsa-indexer-use-sparse-loss:.*loss over selected keys"),
        (
            "--dsa-kernel-backend cudnn --dsa-indexer-use-sparse-loss --dsa-indexer-topk-freq 4",
            "--dsa-indexer-topk-freq: layers that share selected keys",
        ),
    ],
)
def test_sparse_attention_that_is_not_modelled_is_refused(flags: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        _import(f"{SPARSE} {flags}", gpus=8)
