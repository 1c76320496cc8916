"""MoE presets have the total and active parameters of their released weights."""

import pytest

from clustersim.model.layer_stack import DenseMlp, layer_specs
from clustersim.model.preset_moe import MOE_PRESETS
from clustersim.model.presets import load_preset
from clustersim.model.transformer import active_parameter_count, embedding_parameter_count, parameter_count

# Llama 4's: 34 layers of 4 x 1408^2 + 2 x 1408 x 5632 with biases and two norms; patches, class, positions, two
# norms; adapter and projector.
VISION = (
    34 * (4 * 1408 * 1409 + 2 * 1408 * 5632 + 5632 + 1408 + 4 * 1408)
    + (588 + 1 + 577 + 4) * 1408
    + (5632 * 4096 + 4096 * 4096 + 4096 * 5120)
)

# Elements of the released checkpoints, minus what is no weight of the text model or is not modelled.
RELEASED = {
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "llama4-scout": 108_641_793_536 - VISION,
    "llama4-maverick": 401_583_781_376 - VISION,
    # the MTP layer, with a separate embedding and logits matrix; score corrections
    "glm-4.5": 358_337_791_296
    - (5120 * 128 * (2 * 96 + 2 * 8) + (96 + 2 * 8 + 2) * 128 + 160 * 5120 + 161 * 3 * 5120 * 1536)
    - (2 * 5120**2 + 5 * 5120 + 2 * 151552 * 5120)
    - 90 * 160,
    "olmoe-1b-7b": 6_919_161_856,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200 - 58 * 256,  # score corrections, which are no weights
    # with an indexer in each layer: queries, keys with their norm, weights of its heads
    "deepseek-v3.2": 671_026_419_200 - 58 * 256 + 61 * (1536 * 64 * 128 + 7168 * 128 + 2 * 128 + 7168 * 64),
    "moonlight-16b-a3b": 15_960_111_936 - 26 * 64 - 27 * 64,  # these, and 32 frequencies a layer in FP32, of BF16 sizes
    "kimi-k2": 1_026_408_232_448 - 60 * 384,
}

# Billions as printed, and how many tables (token table, logits matrix) the source excludes.
TOTAL = {"qwen2-57b-a14b": "57.4", "dbrx": "132"}  # of their model cards
ACTIVE = {
    "mixtral-8x7b": ("12.9", 0),  # mistral.ai, "Mixtral of experts"
    "mixtral-8x22b": ("39", 0),  # mistral.ai, "Cheaper, better, faster, stronger"
    "qwen2-57b-a14b": ("14", 0),  # arXiv:2407.10671, section 2.2
    "qwen3-235b-a22b": ("22", 0),  # arXiv:2505.09388, section 2
    "gpt-oss-20b": ("3.61", 1),  # arXiv:2508.10925, Table 1: the logits matrix counts, the token table does not
    "gpt-oss-120b": ("5.13", 1),
    "llama4-scout": ("17", 0),  # model card of both
    "llama4-maverick": ("17", 0),
    "glm-4.5": ("32", 2),  # arXiv:2508.06471, Table 1: neither counts
    "olmoe-1b-7b": ("1.3", 0),  # arXiv:2409.02060, abstract
    "dbrx": ("36", 0),  # databricks, "Introducing DBRX"
    "deepseek-v2": ("21", 0),  # arXiv:2405.04434, section 3.1.2
    "deepseek-v3": ("36.6", 1),  # README_WEIGHTS.md: the logits matrix counts
    "moonlight-16b-a3b": ("2.24", 2),  # arXiv:2502.16982, Table 3
}


def _billions(count: int, printed: str) -> str:
    return f"{count / 1e9:.{len(printed.partition('.')[2])}f}"


@pytest.mark.parametrize(("name", "count"), RELEASED.items())
def test_parameters_are_those_of_the_released_weights(name: str, count: int) -> None:
    assert parameter_count(load_preset(name)) == count


@pytest.mark.parametrize(("name", "printed"), TOTAL.items())
def test_other_models_round_to_the_printed_count(name: str, printed: str) -> None:
    assert _billions(parameter_count(load_preset(name)), printed) == printed


@pytest.mark.parametrize(("name", "printed", "tables"), [(name, *printed) for name, printed in ACTIVE.items()])
def test_active_parameters_round_to_the_printed_count(name: str, printed: str, tables: int) -> None:
    model = load_preset(name)
    assert _billions(active_parameter_count(model) - tables * model.vocab * model.hidden, printed) == printed


@pytest.mark.parametrize(
    ("name", "total", "active", "error"),
    [
        # arXiv:2507.20534, Table 2 prints 1.04 T, of which the released 61 layers have 1.026
        ("kimi-k2", 1.04e12, 32.6e9, 0.015),
        # x.ai, "Open release of Grok-1": 314 billion, of which a token meets 25 %; the published sizes make 315.7
        ("grok-1", 314e9, 314e9 / 4, 0.07),
        # arXiv:2405.04434, appendix B.1: 2.4 billion; without the token table it is 2.45, with it 2.66
        ("deepseek-v2-lite", 15.7e9, 2.4e9, 0.11),
        # arXiv:2505.09388: 3.3 billion, "A3B"; all that a token meets are 3.35
        ("qwen3-30b-a3b", 30.5e9, 3.3e9, 0.02),
    ],
)
def test_rounded_counts_are_near(name: str, total: float, active: float, error: float) -> None:
    model = load_preset(name)
    assert parameter_count(model) == pytest.approx(total, rel=0.015)
    assert active_parameter_count(model) == pytest.approx(active, rel=error)


def test_all_moe_presets_are_tested() -> None:
    names = {moe_preset.model.name for moe_preset in MOE_PRESETS}
    assert names == RELEASED.keys() | TOTAL.keys() | {"grok-1"}
    assert names == ACTIVE.keys() | {"kimi-k2", "grok-1", "qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3.2"}


def test_only_inactive_experts_are_excluded_from_active_parameters() -> None:
    """Embeddings count in full."""
    model = load_preset("mixtral-8x7b")
    assert parameter_count(model) - active_parameter_count(model) == 32 * 6 * 3 * 4096 * 14336
    assert embedding_parameter_count(model) == 32000 * 4096


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("deepseek-v3", "ddd" + 58 * "m"),
        ("deepseek-v2", "d" + 59 * "m"),
        ("glm-4.5", "ddd" + 89 * "m"),
        ("llama4-maverick", 24 * "dm"),
        ("llama4-scout", 48 * "m"),
    ],
)
def test_dense_layers_are_the_published_ones(name: str, expected: str) -> None:
    layers = layer_specs(load_preset(name).stack)
    assert "".join("d" if isinstance(spec.mlp, DenseMlp) else "m" for spec in layers) == expected


@pytest.mark.parametrize(
    ("name", "groups", "limit"), [("deepseek-v3", 8, 4), ("deepseek-v2", 8, 3), ("kimi-k2", 1, None)]
)
def test_router_group_limits_are_the_published_ones(name: str, groups: int, limit: int | None) -> None:
    (moe,) = load_preset(name).distinct_moes
    assert (moe.router.num_groups, moe.router.group_topk) == (groups, limit)
