"""What has a recipe set, of a run that took it as it stands?

Notes of a row say `recipe defaults` where its source names the recipe and not what it sets. Here that is added to them
in the words that notes of other rows have. Since Megatron Bridge 0.5 tokens of mixtures in MXFP8 on Blackwell travel by
Hybrid-EP beside compute, and the whole iteration is captured: NVIDIA-NeMo/Megatron-Bridge@067f987,
src/megatron/bridge/perf_recipes/qwen/common.py (`_enable_hybridep_full_iteration_mxfp8`), and of DeepSeek the same
(`_enable_deepseek_full_iteration_mxfp8`). What recipes of BF16 set is said by `mixtures`.
"""

from typing import Final

from clustersim.validation.cases import Case
from clustersim.validation.mixtures import RECIPE, public_model

_BLACKWELL: Final = ("b200", "b300", "gb200", "gb300")
_IN_MXFP8: Final = ("qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3")
_SETS: Final = (
    "moe_flex_dispatcher_backend=hybridep",
    "moe_a2a_overlap=True",
    "cuda_graph_impl=full_iteration",
)


def completed(case: Case) -> Case:
    """The row, with what its recipe sets in its notes."""
    notes = case.text("notes")
    if RECIPE not in notes or case.text("precision") != "mxfp8" or case.text("gpu") not in _BLACKWELL:
        return case
    if public_model(case) not in _IN_MXFP8:
        return case
    return Case(case.cells | {"notes": "; ".join((notes, *_SETS))}, case.line)
