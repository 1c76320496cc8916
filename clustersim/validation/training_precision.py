"""In which number formats did a published run train?

A row's `precision` is a word. `mxfp8` says how products scale their operands; `fp8` does not: it is what the software
means by it. Software also has habits of its own for what it keeps: whether the matrices that have narrow products are
stored in their format (Megatron-LM's `fp8_param_gather`) and in which they are gathered. A word of which nothing says
what it means is no prediction.

Sources, by software: NVIDIA/NeMo, scripts/performance/helpers.py (`set_precision_configs`: "ds" unless told otherwise,
first and last layers not in BF16) and llm/recipes/precision/mixed_precision.py; NVIDIA/dgxc-benchmarking, launch.sh of
v25.10 and later (`-fr cs`; Nemotron-4, Grok-1), and configure.sh of v24.11.1 (`fp8_params`);
NVIDIA-NeMo/Megatron-Bridge, scripts/performance/utils/precision.py (`get_precision_config`: first_last_layers_bf16 =
False) and training/mixed_precision.py, v0.2 to v0.5; NVIDIA/Megatron-LM, training/arguments.py (`--fp8-recipe delayed`)
and core/distributed/param_and_grad_buffer.py (`_post_param_sync`: MXFP8 parameters are gathered in BF16 and then cast);
yanring/Megatron-MoE-ModelZoo, sbatch_benchmarking.sh; mosaicml/composer, core/precision.py (`DelayedScaling`), and
mosaicml/llm-foundry, submit_benchmarks.py (`fc_type` te); pytorch/torchtitan, docs/float8.md of 2024; google/maxtext,
`quantization: fp8` (Flax' Fp8DotGeneralOp, delayed scaling).
"""

import re
from collections.abc import Mapping
from typing import Final

from clustersim.common.dtypes import DType
from clustersim.model.recipe_files import load_recipe
from clustersim.validation.cases import CannotPredictError, Case

WIDE: Final = ("bf16", "fp16")
Words = Mapping[str, Mapping[str, str]]
"""What `training.precision` says, by the word of a row."""

_OWN: Final = ("fp8-current", "fp8-blockwise", "fp8-rowwise", "fp8-tensorwise", "mxfp8", "nvfp4")
NAMED: Final[Words] = {name: {"compute": name} for name in _OWN}
_BF16_MOMENTS: Final = {"moments": "bf16"}
_FP8_STORED: Final = {"stored": "fp8"}
_MXFP8_STORED: Final = {"compute": "mxfp8", "stored": "mxfp8", "gathered": "bf16"}
MEGATRON: Final[Words] = {
    **NAMED,
    "fp8": {"compute": "fp8"},
    "fp8 (delayed)": {"compute": "fp8"},
    "fp8 (tensorwise)": {"compute": "fp8-current"},
    "fp8 (blockwise)": {"compute": "fp8-blockwise"},
    "fp8 (mxfp8)": {"compute": "mxfp8"},
}
ZOO: Final[Words] = {
    **NAMED,
    "fp8": {"compute": "fp8-blockwise", "stored": "fp8-blockwise", **_BF16_MOMENTS},
    "fp8-blockwise": {"compute": "fp8-blockwise", "stored": "fp8-blockwise", **_BF16_MOMENTS},
    "mxfp8": {**_MXFP8_STORED, **_BF16_MOMENTS},
}
NEMO: Final[Words] = {**NAMED, "fp8": {"compute": "fp8", **_FP8_STORED}}
BRIDGE: Final[Words] = {**NAMED, "fp8": {"compute": "fp8-current", **_FP8_STORED}, "mxfp8": _MXFP8_STORED}
DELAYED: Final[Words] = {**NAMED, "fp8": {"compute": "fp8"}}
TORCHAO: Final[Words] = {**NAMED, "fp8-mixed": {"compute": "fp8-tensorwise", "gathered": "fp8"}}

# as notes have it; Transformer Engine's attention has the linear layers' scales where it can
NARROW_ATTENTION: Final = "fp8_dot_product_attention=True"
_ATTENDED: Final = (DType.FP8.value, DType.MXFP8.value)
_STORED: Final = "fp8-param-gather"  # as notes say it
_RELEASE: Final = re.compile(r"dgxc-benchmarking v(\d+\.\d+)")  # of which a locator names the file
_CURRENT_SINCE: Final = 25.10


def formats_of(case: Case, words: Words) -> Mapping[str, str]:
    """What `training.precision` says of a row; words: its software's. Raise CannotPredictError if nothing says it."""
    word = case.text("precision")
    if is_wide(case):
        return {"compute": word}
    if word not in words:
        software = case.text("framework") or "software that is not stated"
        named = f"precision {word}" if word else "precision"
        raise CannotPredictError(f"{named} of {software}: which recipe it is, is not stated", owed=False)
    said = (BRIDGE if _current(case, words) else words)[word]
    if NARROW_ATTENTION in case.text("notes"):
        said = {**said, "attention": word if word in _ATTENDED else DType.FP8.value}
    return {"stored": load_recipe(said["compute"]).matmul_formats.forward.value, **said} if _stored(case) else said


def _current(case: Case, words: Words) -> bool:
    """Whether it is of a release of NVIDIA's recipes that scales by what it finds in a tensor."""
    release = _RELEASE.search(case.text("locator"))
    return words is NEMO and release is not None and float(release[1]) >= _CURRENT_SINCE


def _stored(case: Case) -> bool:
    return _STORED in case.text("notes")


def is_wide(case: Case) -> bool:
    """Whether a row's format has no scales."""
    return case.text("precision") in WIDE


def is_narrow(case: Case) -> bool:
    """Whether a row names a format of fewer than 16 bits."""
    return not is_wide(case) and case.text("precision") != ""
