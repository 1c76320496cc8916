"""Multi-head latent attention (MLA) in a scenario file; error messages."""

from typing import Any

import pytest

from clustersim import Scenario
from clustersim.common.errors import InputError
from clustersim.model.attention_spec import LatentAttention
from clustersim.model.presets import load_preset

BASE_MAPPING: dict[str, Any] = {
    "model": "deepseek-v3",
    "cluster": {"name": "dgx-h100", "gpus": 64},
    "training": {"sequence": 2048, "global_batch": 64},
}
DEEPSEEK_V2_MLA = "q_lora_rank: 1536, kv_lora_rank: 512, qk_nope_head_dim: 128, qk_rope_head_dim: 64, v_head_dim: 128"
INLINE = "layers: 60, hidden: 5120, heads: 128, vocab: 102400, max_positions: 163840, name: deepseek-v2"


def load_scenario(model: str) -> Scenario:
    return Scenario.from_mapping(BASE_MAPPING, overrides=[f"model={model}"])


def test_inline_dimensions_equal_deepseek_v2() -> None:
    experts = "{count: 160, top_k: 6, ffn: 1536, shared: 3072, num_groups: 8, group_topk: 3, dense_layers: 1}"
    written = load_scenario(f"{{{INLINE}, ffn: 12288, mla: {{{DEEPSEEK_V2_MLA}}}, experts: {experts}}}")
    assert written.model == load_preset("deepseek-v2")
    assert Scenario.from_mapping(written.to_mapping()) == written


def test_omitted_mla_keys_come_from_the_preset() -> None:
    model = load_scenario("{preset: deepseek-v3, heads: 64, mla: {kv_lora_rank: 1024}}").model
    assert model.distinct_attentions == (LatentAttention(64, 1536, 1024, 128, 64, 128),)
    assert model.distinct_moes == load_preset("deepseek-v3").distinct_moes


def test_query_rank_0_disables_query_compression() -> None:
    assert load_scenario("{preset: deepseek-v3, mla: {q_lora_rank: 0}}").model.distinct_attentions[
        0
    ] == LatentAttention(128, None, 512, 128, 64, 128)


def test_mla_replaces_other_attention() -> None:
    (mla,) = load_scenario(f"{{preset: llama3-8b, mla: {{{DEEPSEEK_V2_MLA}}}}}").model.distinct_attentions
    assert mla == LatentAttention(32, 1536, 512, 128, 64, 128)


def test_mla_heads_need_not_divide_hidden() -> None:
    model = load_scenario(
        f"{{layers: 2, hidden: 1000, heads: 16, vocab: 512, ffn: 512, mla: {{{DEEPSEEK_V2_MLA}}}}}"
    ).model
    assert model.distinct_attentions[0].heads == 16


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (
            "{preset: llama3-8b, mla: {kv_lora_rank: 512}}",
            r"mla: missing keys: qk_nope_head_dim, qk_rope_head_dim, v_head_dim.*\{q_",
        ),
        ("{preset: deepseek-v3, mla: {kv_lora_rank: 0}}", r"model.mla.kv_lora_rank: 0 is too small; .* 1"),
        ("{preset: deepseek-v3, mla: {kv_rang: 1}}", r"model.mla.kv_rang: unknown key; did you mean kv_lora_rank\?"),
        ("{preset: deepseek-v3, kv_heads: 8}", r"kv_heads: latent attention has heads of its own dimensions"),
        (
            f"{{preset: llama3-8b, window: 512, mla: {{{DEEPSEEK_V2_MLA}}}}}",
            r"window: latent attention has heads of its own",
        ),
        ("{preset: deepseek-v3, window_attn_skip_freq: 2}", r"window_attn_skip_freq 2 needs a window"),
        (
            f"{{preset: gpt3-1.3b, mla: {{{DEEPSEEK_V2_MLA}}}}}",
            r"mla needs rotary positions; gpt3-1.3b has learned ones",
        ),
        ("{preset: deepseek-v3, mla: 512}", r"model.mla: 512 .*write {q_lora_rank"),
    ],
)
def test_invalid_mla_settings_have_one_line_errors(model: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as refused:
        load_scenario(model)
    assert "\n" not in str(refused.value)
