"""Precision recipes in a scenario file: reading, error messages, and changing to another recipe."""

from typing import Any

import pytest

from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError
from clustersim.model.precision_recipe import PrecisionRecipe, WeightCastTiming
from clustersim.model.recipe_files import load_recipe
from clustersim.scenario import Scenario
from clustersim.scenario.changes.precision import default_recipe_name
from clustersim.simulation import simulate
from tests.sentences import parts


def scenario_mapping(cluster: str = "dgx-h100", **overrides: Any) -> dict[str, Any]:
    training = {"sequence": 512, "global_batch": 16, **overrides.pop("training", {})}
    return {
        "model": "llama-tiny",
        "cluster": {"name": cluster, "gpus": 8},
        "layout": {"dp": 8},
        "training": training,
        **overrides,
    }


def load_precision_recipe(precision: object, cluster: str = "dgx-h100", **overrides: Any) -> PrecisionRecipe:
    return Scenario.from_mapping(
        scenario_mapping(cluster, training={"precision": precision}, **overrides)
    ).training.recipe


def error_message(precision: object, cluster: str = "dgx-h100", **overrides: Any) -> str:
    with pytest.raises(InputError) as caught:
        load_precision_recipe(precision, cluster, **overrides)
    return str(caught.value)


def test_recipe_by_name() -> None:
    recipe = load_precision_recipe("fp8-current")
    assert recipe == load_recipe("fp8-current")
    assert recipe.compute is DType.FP8
    assert recipe.name == "fp8-current"


def test_recipe_options() -> None:
    recipe = load_precision_recipe(
        {
            "compute": "fp8",
            "gradients": "bf16",
            "num_layers_at_start_in_bf16": 1,
            "num_layers_at_end_in_bf16": 2,
            "stored": "fp8",
        }
    )
    assert recipe.weight_formats.gradients is DType.BF16
    assert (recipe.num_layers_at_start_in_bf16, recipe.num_layers_at_end_in_bf16) == (1, 2)
    assert recipe.matrix_formats.stored is DType.FP8
    assert recipe.matrix_formats.gathered is DType.FP8  # defaults to the stored dtype
    separate_gather = load_precision_recipe({"compute": "fp8", "stored": "fp8", "gathered": "bf16"})
    assert separate_gather.matrix_formats.gathered is DType.BF16


def test_casts_depend_on_accelerator_and_sharding() -> None:
    """Hopper needs a transposed copy of FP8 operands, Blackwell does not; sharded weights are cast in each pass."""
    hopper, blackwell = load_precision_recipe("fp8").casts, load_precision_recipe("fp8", "hgx-b200").casts
    assert hopper is not None
    assert blackwell is not None
    assert (hopper.input.copies, blackwell.input.copies) == (2, 1)
    sharded = load_precision_recipe("fp8", layout={"dp": 8, "data": "fsdp"}).casts
    assert sharded is not None
    assert (hopper.weight_timing, sharded.weight_timing) == (WeightCastTiming.STEP, WeightCastTiming.PASS)


@pytest.mark.parametrize(
    ("precision", "cluster", "expected"),
    [
        ("fp9", "dgx-h100", "'fp9' is unknown; did you mean fp8?"),
        ("mxfp4", "dgx-h100", "'mxfp4' is unknown; did you mean mxfp8?"),
        ("fp8", "dgx-a100", "a100-sxm-80gb has no fp8 peak ... fp32, tf32, bf16, fp16; b200-sxm-180gb,"),
        ({"compute": "bf16", "num_layers_at_start_in_bf16": 1}, "dgx-h100", "num_layers_at_start_in_bf16 ... mxfp8"),
        ({"compute": "fp8", "stored": "mxfp8"}, "dgx-h100", "stored: fp8 has nothing in mxfp8; bf16 or fp8 fits"),
        (
            {"compute": "fp8", "attention": "fp8"},
            "dgx-h100",
            "attention: fp8 ... h100-sxm-80gb; b200-sxm-180gb, b300-sxm-288gb, gb200, gb300",
        ),
        (
            {"compute": "bf16", "attention": "fp8"},
            "dgx-h100",
            "attention is about recipes such as mxfp8, but compute is",
        ),
        (
            {"compute": "fp8", "attention": "nvfp4"},
            "dgx-h100",
            "attention: 'nvfp4' is unknown; choose one of fp8, mxfp8",
        ),
        ({"compute": "fp8", "stored": "fp8", "master": "none"}, "dgx-h100", "name a master format"),
        (
            {"compute": "fp8", "num_layers_at_end_in_bf16": 9},
            "dgx-h100",
            "num_layers_at_end_in_bf16: 9 ... llama-tiny has 8 layers; num_layers_at_end_in_bf16 8",
        ),
        (
            {"compute": "fp8", "num_layers_at_end_in_bf16": -1},
            "dgx-h100",
            "training.precision.num_layers_at_end_in_bf16",
        ),
    ],
)
def test_invalid_precision_is_rejected(precision: object, cluster: str, expected: str) -> None:
    assert parts(expected).search(error_message(precision, cluster))


def test_scaling_blocks_must_divide_dimensions() -> None:
    odd = {"preset": "llama-tiny", "ffn": 1000}
    assert parts("fp8 ... blocks of 16 ... ffn of llama-tiny is 1000; ffn 992 or 1008").search(
        error_message("fp8", model=odd)
    )
    few = {"training": {"precision": "fp8", "sequence": 520, "global_batch": 16}}
    with pytest.raises(InputError, match="520 tokens on a rank; sequence 512 or 528"):
        Scenario.from_mapping(scenario_mapping(**few))


def test_lora_with_low_precision_matmuls_is_rejected() -> None:
    adapters = {"training": {"precision": "fp8", "lora": {"rank": 16}}}
    with pytest.raises(InputError, match="adapters with matmuls in fp8 are not modelled"):
        Scenario.from_mapping(scenario_mapping(**adapters))


@pytest.mark.parametrize(
    ("framework", "names"),
    [
        ("pytorch", ("fp8-rowwise", "mxfp8-torchao", "nvfp4-torchao")),
        ("torchtitan", ("fp8-rowwise", "mxfp8-torchao", "nvfp4-torchao")),
        ("megatron", ("fp8-current", "mxfp8", "nvfp4")),
        ("ideal", ("fp8-current", "mxfp8", "nvfp4")),
    ],
)
def test_the_recipe_of_a_format_is_the_frameworks_default(framework: str, names: tuple[str, ...]) -> None:
    """Torchao's where the framework is PyTorch, else Transformer Engine's."""
    scenario = Scenario.from_mapping(scenario_mapping(framework=framework))
    assert tuple(default_recipe_name(scenario, dtype) for dtype in (DType.FP8, DType.MXFP8, DType.NVFP4)) == names


@pytest.mark.parametrize(
    ("framework", "is_eager"),
    [
        ("pytorch", True),
        ("torchtitan", True),
        ({"name": "torchtitan", "torch_compile": True}, False),
        ("megatron", False),
        ("ideal", False),
    ],
)
def test_casts_are_fused_unless_layers_run_operation_by_operation(framework: object, is_eager: bool) -> None:
    casts = load_precision_recipe("fp8-tensorwise", framework=framework).casts
    assert casts is not None
    assert casts.eager is is_eager
    assert load_precision_recipe("fp8-current", framework=framework).casts == load_recipe("fp8-current").casts


def test_dtype_flops_and_cast_time_of_a_result() -> None:
    """All layer matmul FLOP are FP8; attention and logits are not. Cast time is a fraction of the step."""
    high_precision, low_precision = (
        simulate(Scenario.from_mapping(scenario_mapping(training={"precision": precision})))
        for precision in ("bf16", "fp8")
    )
    assert high_precision.format_usage is None
    assert high_precision.to_json()["formats"] is None
    dtype_usage = low_precision.format_usage
    assert dtype_usage is not None
    assert sum(dtype_usage.flop_shares.values()) == pytest.approx(1.0)
    hidden, ffn, layers, vocab, tokens = 512, 1408, 8, 32000, 512 * 16
    kv = (
        hidden
        * low_precision.scenario.model.distinct_attentions[0].kv_heads
        // low_precision.scenario.model.distinct_attentions[0].heads
    )
    matrices = layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * ffn)
    assert dtype_usage.flops[DType.FP8] == pytest.approx(6 * tokens * matrices)
    assert dtype_usage.flops[DType.BF16] > 6 * tokens * vocab * hidden
    assert 0.0 < dtype_usage.quantization_seconds < low_precision.step_time
    assert low_precision.mfu * low_precision.peak_flops == pytest.approx(low_precision.achieved_flops_per_gpu)
    dtype_json = low_precision.to_json()["formats"]
    assert dtype_json["flops_over_bf16_peak"] == pytest.approx(low_precision.achieved_flops_per_gpu / 989e12)
