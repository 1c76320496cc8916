"""What has a recipe set, of a run that took it as it stands?

Notes of a row say `recipe defaults` where its source names the recipe and not what it sets. Here that is added to them
in the words that notes of other rows have. Since Megatron Bridge 0.5 tokens of mixtures in MXFP8 on Blackwell travel by
Hybrid-EP beside compute, and the whole iteration is captured: NVIDIA-NeMo/Megatron-Bridge@067f987,
src/megatron/bridge/perf_recipes/qwen/common.py (`_enable_hybridep_full_iteration_mxfp8`), and of DeepSeek the same
(`_enable_deepseek_full_iteration_mxfp8`). Those that capture the whole iteration, and they alone, run a fused grouped
MLP and attention in the format of products, but for DeepSeek-V3's attention on GB200 (v0.5.0 and v0.5.1,
scripts/performance/configs/{qwen,deepseek,gpt_oss}/*_workload_base_configs.py). What recipes of BF16 set is said by
`mixtures`.
"""

from collections.abc import Iterator
from typing import Final

from clustersim.validation.cases import Case
from clustersim.validation.moe_settings import FUSED_MLP, RECIPE, public_model
from clustersim.validation.training_precision import NARROW_ATTENTION

_WHOLE: Final = "cuda_graph_impl=full_iteration"
_WHOLE_NAMES: Final = (_WHOLE, "full-iteration CUDA graph")
_BRIDGE: Final = "megatron-bridge"
_BLACKWELL: Final = ("b200", "b300", "gb200", "gb300")
_IN_MXFP8: Final = ("qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3")
_WIDE_ATTENTION: Final = (("deepseek-v3", "gb200"),)
_SETS: Final = ("moe_flex_dispatcher_backend=hybridep", "moe_a2a_overlap=True", _WHOLE)


def completed(case: Case) -> Case:
    """The row, with what its recipe sets in its notes."""
    sets = [*_sets(case)] if case.text("precision") == "mxfp8" and case.text("gpu") in _BLACKWELL else []
    return Case(case.cells | {"notes": "; ".join((case.text("notes"), *sets))}, case.line) if sets else case


def _sets(case: Case) -> Iterator[str]:
    notes, model = case.text("notes"), public_model(case)
    defaults = RECIPE in notes and model in _IN_MXFP8
    if defaults:
        yield from _SETS
    captured = any(name in notes for name in _WHOLE_NAMES) and case.text("framework").startswith(_BRIDGE)
    if defaults or (captured and model is not None):
        yield FUSED_MLP
        if (model, case.text("gpu")) not in _WIDE_ATTENTION:
            yield NARROW_ATTENTION
