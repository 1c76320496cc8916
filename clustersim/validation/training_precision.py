"""In which number formats did a published run train?

A row's `precision` is a name. `mxfp8` says how matmul operands are scaled; `fp8_ratio` does not: its meaning
depends on the software. Software also has defaults for stored tensors: whether weights of low-precision
matmuls are stored in their compute format (Megatron-LM's `fp8_param_gather`), and in which format they are
all-gathered. A name whose meaning is not documented gives no prediction.

Sources, by software: NVIDIA/NeMo, scripts/performance/helpers.py (`set_precision_configs`: "ds" unless
set otherwise, first and last layers not in BF16) and llm/recipes/precision/mixed_precision.py;
NVIDIA/dgxc-benchmarking, launch.sh of v25.10 and later (`-fr cs`; Nemotron-4, Grok-1), and configure.sh of
v24.11.1 (`fp8_params`); NVIDIA-NeMo/Megatron-Bridge, scripts/performance/utils/precision.py
(`get_precision_config`: first_last_layers_bf16 = False) and training/mixed_precision.py, v0.2 to v0.5;
NVIDIA/Megatron-LM, training/arguments.py (`--fp8-recipe delayed`) and
core/distributed/param_and_grad_buffer.py (`_post_param_sync`: MXFP8 parameters are gathered in BF16 and
then cast); yanring/Megatron-MoE-ModelZoo, sbatch_benchmarking.sh; mosaicml/composer, core/precision.py
(`DelayedScaling`), and mosaicml/llm-foundry, submit_benchmarks.py (`fc_type` te); pytorch/torchtitan,
docs/float8.md of 2024, torchtitan/components/quantization (torchao's MXFP8 and NVFP4); google/maxtext,
`quantization: fp8` (Flax' Fp8DotGeneralOp, delayed scaling).
"""

import re
from collections.abc import Mapping
from typing import Final

from clustersim.common.dtypes import DType
from clustersim.model.recipe_files import load_recipe
from clustersim.validation.cases import CannotPredictError, ValidationCase

HIGH_PRECISION: Final = ("bf16", "fp16")
PrecisionConfigs = Mapping[str, Mapping[str, str]]
"""`training.precision` sections by the name in a row."""

_RECIPE_NAMES: Final = ("fp8-current", "fp8-blockwise", "fp8-rowwise", "fp8-tensorwise", "mxfp8", "nvfp4")
BY_RECIPE_NAME: Final[PrecisionConfigs] = {name: {"compute": name} for name in _RECIPE_NAMES}
_BF16_MOMENTS: Final = {"moments": "bf16"}
_FP8_WEIGHTS: Final = {"stored": "fp8"}
_MXFP8_WEIGHTS: Final = {"compute": "mxfp8", "stored": "mxfp8", "gathered": "bf16"}
MEGATRON: Final[PrecisionConfigs] = {
    **BY_RECIPE_NAME,
    "fp8": {"compute": "fp8"},
    "fp8 (delayed)": {"compute": "fp8"},
    "fp8 (tensorwise)": {"compute": "fp8-current"},
    "fp8 (blockwise)": {"compute": "fp8-blockwise"},
    "fp8 (mxfp8)": {"compute": "mxfp8"},
}
MOE_MODEL_ZOO: Final[PrecisionConfigs] = {
    **BY_RECIPE_NAME,
    "fp8": {"compute": "fp8-blockwise", "stored": "fp8-blockwise", **_BF16_MOMENTS},
    "fp8-blockwise": {"compute": "fp8-blockwise", "stored": "fp8-blockwise", **_BF16_MOMENTS},
    "mxfp8": {**_MXFP8_WEIGHTS, **_BF16_MOMENTS},
}
NEMO: Final[PrecisionConfigs] = {**BY_RECIPE_NAME, "fp8": {"compute": "fp8", **_FP8_WEIGHTS}}
BRIDGE: Final[PrecisionConfigs] = {
    **BY_RECIPE_NAME,
    "fp8": {"compute": "fp8-current", **_FP8_WEIGHTS},
    "mxfp8": _MXFP8_WEIGHTS,
}
DELAYED_SCALING: Final[PrecisionConfigs] = {**BY_RECIPE_NAME, "fp8": {"compute": "fp8"}}
TORCHAO: Final[PrecisionConfigs] = {
    **BY_RECIPE_NAME,
    "fp8-mixed": {"compute": "fp8-tensorwise", "gathered": "fp8"},
    "mxfp8": {"compute": "mxfp8-torchao"},
    "nvfp4": {"compute": "nvfp4-torchao"},
}

# text in the notes; Transformer Engine's attention uses the linear layers' scaling where it can
FP8_ATTENTION_NOTE: Final = "fp8_dot_product_attention=True"
_ATTENTION_FORMATS: Final = (DType.FP8.value, DType.MXFP8.value)
_PARAM_GATHER_NOTE: Final = "fp8-param-gather"  # text in the notes
_FP8_ALL_GATHER_NOTE: Final = "with float8 all-gather"  # text in the notes: enable_fsdp_float8_all_gather
_BF16_LAYERS_AT_END: Final = re.compile(r"layers \d+ to (\d+) \w+, \d+ to (\d+) bf16")  # in the notes
_DGXC_RELEASE: Final = re.compile(r"dgxc-benchmarking v(\d+\.\d+)")  # named by the locator
_CURRENT_SCALING_SINCE: Final = 25.10


def training_precision(case: ValidationCase, configs: PrecisionConfigs) -> Mapping[str, str | int]:
    """The `training.precision` section of a row; configs: its software's. Raises CannotPredictError if unknown."""
    name = case.text("precision")
    if is_high_precision(case):
        return {"compute": name}
    if name not in configs:
        software = case.text("framework") or "software that is not stated"
        label = f"precision {name}" if name else "precision"
        raise CannotPredictError(f"{label} of {software}: which recipe it is, is not stated", is_expressible=False)
    config = (BRIDGE if _uses_current_scaling(case, configs) else configs)[name]
    if FP8_ATTENTION_NOTE in case.text("notes"):
        config = {**config, "attention": name if name in _ATTENTION_FORMATS else DType.FP8.value}
    if _stores_low_precision(case):
        config = {"stored": load_recipe(config["compute"]).matmul_formats.forward.value, **config}
    if _FP8_ALL_GATHER_NOTE in case.text("notes"):
        config = {**config, "gathered": DType.FP8.value}
    bf16_layers = _BF16_LAYERS_AT_END.search(case.text("notes"))
    layer_count = int(bf16_layers[2]) - int(bf16_layers[1]) if bf16_layers else 0
    return {**config, "num_layers_at_end_in_bf16": layer_count} if layer_count else config


def _uses_current_scaling(case: ValidationCase, configs: PrecisionConfigs) -> bool:
    """Whether the run used a release of NVIDIA's recipes with current (per-tensor) scaling."""
    release = _DGXC_RELEASE.search(case.text("locator"))
    return configs is NEMO and release is not None and float(release[1]) >= _CURRENT_SCALING_SINCE


def _stores_low_precision(case: ValidationCase) -> bool:
    return _PARAM_GATHER_NOTE in case.text("notes")


def is_high_precision(case: ValidationCase) -> bool:
    """Whether a row's precision is unscaled (bf16 or fp16)."""
    return case.text("precision") in HIGH_PRECISION


def is_low_precision(case: ValidationCase) -> bool:
    """Whether a row states a format of fewer than 16 bits."""
    return not is_high_precision(case) and case.text("precision") != ""
