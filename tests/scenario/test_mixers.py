"""Mixers of a scenario's model: patterns, alternation, groups of a stack; what follows for layouts and steps."""

from dataclasses import replace
from typing import Any

import pytest

from clustersim import Scenario, simulate
from clustersim.common.errors import InputError
from clustersim.model.attention_spec import FullAttention, LatentAttention
from clustersim.model.layer_stack import DenseMlp, LayerSpec, MoeMlp, layer_specs
from clustersim.model.mixers.gated_delta_net import GatedDeltaNet
from clustersim.model.mixers.kimi_delta_attention import KimiDeltaAttention
from clustersim.model.mixers.lightning_attention import LightningAttention
from clustersim.model.mixers.mamba1 import Mamba1
from clustersim.model.mixers.mamba2 import Mamba2
from clustersim.model.sparse_attention_spec import DeepseekSparseAttention
from clustersim.model.transformer import parameter_count

SIZES: dict[str, Any] = {"hidden": 512, "heads": 8, "ffn": 1024, "vocab": 2048}
MAMBA = {"num_heads": 16, "head_dim": 64, "state_dim": 64, "num_groups": 4}
DELTA = {"num_key_heads": 4, "num_value_heads": 8, "key_head_dim": 64, "value_head_dim": 64}
KDA = {"num_heads": 8, "key_head_dim": 32, "value_head_dim": 64}
MOBA = {"chunk_size": 256, "topk": 2}
LINEAR = {
    **{"mamba": MAMBA, "gated_delta_net": DELTA, "kda": KDA, "lightning": {"num_heads": 8, "head_dim": 64}},
    "mamba1": {"channels": 1024, "step_rank": 32},
}


def _scenario(model: dict[str, Any], gpus: int = 8, **sections: dict[str, Any]) -> Scenario:
    training = {"sequence": 1024, "global_batch": 16, **sections.pop("training", {})}
    layout = sections.pop("layout", {"dp": gpus})
    return Scenario.from_mapping(
        {
            "model": {**SIZES, **model},
            "cluster": {"name": "dgx-h100", "gpus": gpus},
            "layout": layout,
            "training": training,
            **sections,
        }
    )


def _layers(model: dict[str, Any]) -> tuple[LayerSpec, ...]:
    return layer_specs(_scenario(model).model.stack)


def test_a_pattern_gives_each_layer_its_mixer_or_its_mlp() -> None:
    specs = _layers({"hybrid_layer_pattern": "MGKLS*-E", **LINEAR, "experts": {"count": 4, "top_k": 2, "ffn": 256}})
    kinds = [type(spec.mixer or spec.mlp) for spec in specs]
    linear = [Mamba2, GatedDeltaNet, KimiDeltaAttention, LightningAttention, Mamba1]
    assert kinds == [*linear, FullAttention, DenseMlp, MoeMlp]
    assert all((spec.mixer is None) is not (spec.mlp is None) for spec in specs)
    assert [spec.mlp.ffn for spec in specs if spec.mlp is not None] == [1024, 256]


def test_latent_attention_has_a_letter_of_its_own() -> None:
    mla = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64}
    assert isinstance(_layers({"hybrid_layer_pattern": "+-", "mla": mla})[0].mixer, LatentAttention)


def test_multi_token_prediction_layers_have_letters_behind_the_others() -> None:
    """Attention before an MLP is a layer of both; they are wrapped as those of other models are."""
    hybrid = _scenario({"hybrid_layer_pattern": "M-M*-/*-/*-", "mamba": MAMBA}).model
    (mtp,) = hybrid.mtp_stack
    assert (hybrid.layer_count, hybrid.mtp_layers, mtp.count) == (5, 2, 2)
    assert isinstance(mtp.spec.mixer, FullAttention)
    assert isinstance(mtp.spec.mlp, DenseMlp)
    dense = _scenario({"layers": 4, "mtp_layers": 2}).model
    added = [parameter_count(model) - parameter_count(replace(model, mtp_layers=0)) for model in (hybrid, dense)]
    assert added[0] == added[1]


def test_a_step_of_a_hybrid_with_mtp_layers_takes_what_these_do() -> None:
    steps = [
        simulate(
            _scenario({"hybrid_layer_pattern": f"M-M*-{mtp}", "mamba": MAMBA}, layout={"pp": 2, "dp": 4})
        ).step_time
        for mtp in ("", "/*-", "/*-/*-")
    ]
    assert steps[0] < steps[1] < steps[2]


def test_changes_of_all_layers_reach_multi_token_prediction_layers() -> None:
    changed = {"preset": "qwen3-next-80b-a3b", "heads": 32, "mtp_layers": 1, "experts": {"count": 8, "top_k": 2}}
    mapping = {"model": changed, "cluster": {"name": "dgx-h100", "gpus": 8}, "layout": {"dp": 8}}
    model = Scenario.from_mapping({**mapping, "training": {"sequence": 1024, "global_batch": 8}}).model
    (mtp,) = model.mtp_stack
    assert mtp.spec.attention is not None
    assert mtp.spec.moe is not None
    assert (mtp.spec.attention.heads, mtp.spec.moe.experts) == (32, 8)


def test_sparse_attention_has_a_letter_of_its_own() -> None:
    mla = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64}
    specs = _layers({"hybrid_layer_pattern": "D-", "mla": mla, "dsa": {"index_topk": 256}})
    assert isinstance(specs[0].mixer, DeepseekSparseAttention)


def test_attention_in_every_nth_layer() -> None:
    specs = _layers({"layers": 8, "linear_attention_freq": 4, "gated_delta_net": DELTA})
    assert [isinstance(spec.mixer, GatedDeltaNet) for spec in specs] == 2 * [True, True, True, False]


def test_groups_of_a_stack_may_have_mixers_of_their_own() -> None:
    stack = [{"layers": 2, "mixer": "mamba"}, {"layers": 1}, {"layers": 1, "mixer": "none"}]
    specs = _layers({"mamba": MAMBA, "stack": stack})
    assert [type(spec.mixer) for spec in specs] == [Mamba2, Mamba2, FullAttention, type(None)]


def test_a_model_without_attention_needs_no_heads() -> None:
    model = {key: size for key, size in SIZES.items() if key != "heads"} | {"hybrid_layer_pattern": "M-"}
    scenario = Scenario.from_mapping(
        {
            **{"model": {**model, "mamba": MAMBA}, "cluster": {"name": "dgx-h100", "gpus": 8}, "layout": {"dp": 8}},
            "training": {"sequence": 1024, "global_batch": 8},
        }
    )
    assert scenario.model.distinct_attentions == ()
    assert simulate(scenario).step_time > 0


@pytest.mark.parametrize(
    "layout", [{"dp": 8}, {"tp": 2, "pp": 2, "dp": 2, "sequence_parallel": True}, {"cp": 4, "dp": 2}]
)
def test_a_hybrid_without_linear_layers_is_the_dense_model_to_the_digit(layout: dict[str, Any]) -> None:
    """Layers of mixer and MLP apart take the time of layers that have both: stages hold as many of either."""
    dense = _scenario({"layers": 4}, layout=layout)
    halves = _scenario({"hybrid_layer_pattern": "*-*-*-*-"}, layout=layout)
    assert parameter_count(halves.model) == parameter_count(dense.model)
    results = [simulate(scenario) for scenario in (dense, halves)]
    assert results[1].step_time == pytest.approx(
        results[0].step_time, rel=1e-3
    )  # one pass of gradients more to wait for
    assert results[1].model_flops == results[0].model_flops
    alternating = _scenario({"layers": 4, "stack": [{"layers": 4, "mixer": "attention"}]}, layout=layout)
    assert simulate(alternating).step_time == results[0].step_time


@pytest.mark.parametrize("kind", ["mamba", "gated_delta_net", "kda", "lightning", "mamba1"])
@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "dp": 4, "sequence_parallel": True},
        {"pp": 4, "dp": 2},
        {"dp": 8, "data": {"fsdp": {}}},
    ],
)
@pytest.mark.parametrize("recompute", ["none", "full", "selective_op"])
def test_every_mixer_runs_in_every_layout(kind: str, layout: dict[str, Any], recompute: str) -> None:
    model = {"layers": 4, "mixer": kind, kind: LINEAR[kind]}
    result = simulate(_scenario(model, layout=layout, training={"recompute": {"mode": recompute}}))
    assert result.step_time > 0


@pytest.mark.parametrize("kind", ["mamba", "gated_delta_net", "kda", "lightning"])
def test_context_parallel_ranks_exchange_tokens_or_states(kind: str) -> None:
    model = {"layers": 4, "mixer": kind, kind: LINEAR[kind]}
    one, four = (
        simulate(_scenario(model, layout={"cp": cp, "dp": 8 // cp}, training={"sequence": 65536, "global_batch": 8}))
        for cp in (1, 4)
    )
    assert one.step_time < four.step_time < 2 * one.step_time


def test_steps_grow_linearly_with_the_sequence_where_no_layer_has_attention() -> None:
    """Four times the tokens, hardly more than four times the time; attention takes more."""
    times = {
        kind: [
            simulate(
                _scenario(
                    {"layers": 8, "mixer": kind, **({"mamba": MAMBA} if kind == "mamba" else {})},
                    training={"sequence": sequence, "global_batch": 8},
                )
            ).step_time
            for sequence in (16384, 65536)
        ]
        for kind in ("mamba", "attention")
    }
    assert times["mamba"][1] < 4.1 * times["mamba"][0]
    assert times["attention"][1] > 5 * times["attention"][0]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"hybrid_layer_pattern": "M*X", "mamba": MAMBA}, "letter 'X' is no layer"),
    ({"hybrid_layer_pattern": "M*|M", "mamba": MAMBA}, "layout.layers_per_stage"),
    ({"hybrid_layer_pattern": "M*-/MM", "mamba": MAMBA}, "/MM is no multi-token prediction layer"),
    ({"hybrid_layer_pattern": "M*-/*-/M-", "mamba": MAMBA}, "/M- is no multi-token prediction layer"),
    ({"hybrid_layer_pattern": "M*-/", "mamba": MAMBA}, "/ is no multi-token prediction layer"),
    ({"hybrid_layer_pattern": "M*-", "mtp_layers": 1, "mamba": MAMBA}, "has 0 multi-token prediction layers"),
    ({"hybrid_layer_pattern": "M*-/*-", "mtp_layers": 2, "mamba": MAMBA}, "but mtp_layers is 2"),
    ({"hybrid_layer_pattern": "+-"}, "+ is multi-head latent attention; give mla"),
    ({"hybrid_layer_pattern": "D-"}, "D is DeepSeek's sparse attention; give mla and dsa"),
    ({"layers": 4, "mixer": "moba"}, "moba: is missing"),
    ({"layers": 4, "mixer": "moba", "window": 64, "moba": MOBA}, "causal attention without a window"),
    ({"layers": 4, "mixer": "moba", "attention_sinks": True, "moba": MOBA}, "moba has no attention_sinks"),
    ({"hybrid_layer_pattern": "M*-", "layers": 4, "mamba": MAMBA}, "has 3 layers, but layers is 4"),
    ({"hybrid_layer_pattern": "M*E", "mamba": MAMBA}, "give experts"),
    ({"hybrid_layer_pattern": "G*-"}, "gated_delta_net: is missing"),
    ({"hybrid_layer_pattern": "+-"}, "+ is multi-head latent attention; give mla"),
    ({"layers": 4, "mixer": "kda"}, "kda: is missing"),
    ({"layers": 4, "mixer": "mamba3"}, "unknown"),
    ({"layers": 8, "linear_attention_freq": 4}, "needs the sizes of one linear mixer"),
    ({"layers": 8, "linear_attention_freq": 4, "mamba": MAMBA, "kda": KDA}, "it has several of mamba, kda"),
    ({"mixer": "mamba", "hybrid_layer_pattern": "M", "mamba": MAMBA}, "keep one"),
    ({"layers": 4, "causal": False, "window": 128}, "causal: false has no window"),
    ({"layers": 4, "mixer": "gated_delta_net", "gated_delta_net": {**DELTA, "num_value_heads": 9}}, "not a multiple"),
]


@pytest.mark.parametrize(("model", "reason"), BAD, ids=[reason for _, reason in BAD])
def test_mistakes_are_named_in_one_sentence(model: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError) as error:
        _scenario(model)
    assert reason in str(error.value)


def test_a_pattern_of_a_preset_whose_layers_differ_is_refused() -> None:
    with pytest.raises(InputError, match="differ already"):
        Scenario.from_mapping(
            {
                "model": {"preset": "jamba-1.5-mini", "hybrid_layer_pattern": "M-"},
                "cluster": {"name": "dgx-h100", "gpus": 8},
                "training": {"sequence": 1024, "global_batch": 8},
            }
        )


@pytest.mark.parametrize(
    ("kind", "layout", "reason"),
    [
        ("mamba", {"tp": 8}, "layout.tp: 8 does not divide the 4 mamba_num_groups"),
        ("gated_delta_net", {"tp": 8}, "layout.tp: 8 does not divide the 4 linear_num_key_heads"),
        ("mamba1", {"cp": 2, "dp": 4}, "how Mamba 1 works on a part of one is not known"),
        ("gated_delta_net", {"tp": 4, "cp": 2, "dp": 4}, "tp 4 x cp 4 do not divide"),
    ],
)
def test_layouts_that_a_mixer_has_no_rule_for(kind: str, layout: dict[str, Any], reason: str) -> None:
    gpus = 8
    if "tp 4 x" in reason:
        layout, gpus = {"tp": 4, "cp": 4, "dp": 1}, 16
    with pytest.raises(InputError) as error:
        _scenario({"layers": 4, "mixer": kind, kind: LINEAR[kind]}, gpus, layout=layout)
    assert reason in str(error.value)


def test_block_attention_runs_in_every_layout_and_pays_off_where_sequences_are_long() -> None:
    model = {"layers": 4, "mixer": "moba", "moba": {"chunk_size": 2048, "topk": 2}}
    for layout in ({"tp": 2, "dp": 4}, {"pp": 2, "dp": 4}, {"dp": 8, "data": "fsdp"}):
        assert simulate(_scenario(model, layout=layout)).step_time > 0
    long = {"sequence": 131072, "global_batch": 8}
    times = [simulate(_scenario(one, training=long)).step_time for one in (model, {"layers": 4})]
    assert times[0] < times[1]
