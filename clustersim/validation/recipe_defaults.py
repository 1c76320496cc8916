"""What does a recipe set, for a run that used it unchanged?

The notes of a row say `recipe defaults` where its source names the recipe and not its settings. Here the
settings are appended to the notes, spelled as in the notes of other rows. Since Megatron Bridge 0.5, MoE
models in MXFP8 on Blackwell dispatch tokens by Hybrid-EP overlapped with compute, and the full iteration is
captured in a CUDA graph: NVIDIA-NeMo/Megatron-Bridge@067f987,
src/megatron/bridge/perf_recipes/qwen/common.py (`_enable_hybridep_full_iteration_mxfp8`), and for DeepSeek
the same (`_enable_deepseek_full_iteration_mxfp8`). Recipes with full-iteration graphs, and only these, run
a fused grouped MLP and attention in the matmuls' format, except DeepSeek-V3's attention on GB200 (v0.5.0
and v0.5.1, scripts/performance/configs/{qwen,deepseek,gpt_oss}/*_workload_base_configs.py). The settings of
BF16 recipes are in `moe_settings`.
"""

from collections.abc import Iterator
from typing import Final

from clustersim.validation.cases import ValidationCase
from clustersim.validation.moe_settings import FUSED_MLP_NOTE, RECIPE_NOTE, matching_preset
from clustersim.validation.training_precision import FP8_ATTENTION_NOTE

_FULL_ITERATION: Final = "cuda_graph_impl=full_iteration"
_FULL_ITERATION_NOTES: Final = (_FULL_ITERATION, "full-iteration CUDA graph")
_BRIDGE: Final = "megatron-bridge"
_BLACKWELL: Final = ("b200", "b300", "gb200", "gb300")
_MXFP8_MODELS: Final = ("qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3")
_HIGH_PRECISION_ATTENTION: Final = (("deepseek-v3", "gb200"),)
_DEFAULT_NOTES: Final = ("moe_flex_dispatcher_backend=hybridep", "moe_a2a_overlap=True", _FULL_ITERATION)


def with_recipe_notes(case: ValidationCase) -> ValidationCase:
    """The case with the settings of its recipe appended to its notes."""
    extra_notes = [*_recipe_notes(case)] if case.text("precision") == "mxfp8" and case.text("gpu") in _BLACKWELL else []
    return (
        ValidationCase(case.cells | {"notes": "; ".join((case.text("notes"), *extra_notes))}, case.line_number)
        if extra_notes
        else case
    )


def _recipe_notes(case: ValidationCase) -> Iterator[str]:
    notes, model = case.text("notes"), matching_preset(case)
    uses_defaults = RECIPE_NOTE in notes and model in _MXFP8_MODELS
    if uses_defaults:
        yield from _DEFAULT_NOTES
    is_full_iteration = any(name in notes for name in _FULL_ITERATION_NOTES) and case.text("framework").startswith(
        _BRIDGE
    )
    if uses_defaults or (is_full_iteration and model is not None):
        yield FUSED_MLP_NOTE
        if (model, case.text("gpu")) not in _HIGH_PRECISION_ATTENTION:
            yield FP8_ATTENTION_NOTE
