"""What does a recipe set, for a run that used it unchanged?

A row of a container of NVIDIA's performance tables (`25.11 container` in its locator), or whose notes say
`recipe defaults`, names the recipe and not its settings. For MoE models of Megatron Bridge these are in
`published/bridge_recipes.yaml`, by release; here they are appended to the notes, spelled as in the notes of
other rows, and fill in the recomputation where it is not stated. Rows whose notes list a recipe's settings
(`recipe QWEN3_30B_... @ v0.4.1: ...`, `library recipe @ v0.4.2`) are left as they are.

Recipes with full-iteration graphs, and only these, run a fused grouped MLP and attention in the matmuls'
format, except DeepSeek-V3's attention on GB200 (v0.5.0 and v0.5.1, scripts/performance/configs/
{qwen,deepseek,gpt_oss}/*_workload_base_configs.py; v0.6.0, src/megatron/bridge/perf_recipes/qwen/common.py,
`_enable_hybridep_full_iteration_mxfp8`, and deepseek's `_enable_deepseek_full_iteration_mxfp8`).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from clustersim.common.data_files import read_mapping
from clustersim.validation.cases import PUBLISHED_FOLDER, ValidationCase
from clustersim.validation.moe_settings import FUSED_MLP_NOTE, matching_preset
from clustersim.validation.training_precision import FP8_ATTENTION_NOTE

RECIPE_TABLE: Final = PUBLISHED_FOLDER / "bridge_recipes.yaml"
_DEFAULTS_NOTE: Final = "recipe defaults"  # note that a recipe ran unchanged
_CONTAINER: Final = re.compile(r"\b(\d\d\.\d\d(?:\.\d\d)?) container\b")  # in the locator
_STATED_RECIPE: Final = re.compile(r"\brecipe \S* ?@ v")  # in the notes, followed by its settings
_NEWEST_RELEASE: Final = "26.08"  # of the model cards, whose commit follows it
_FULL_ITERATION: Final = "cuda_graph_impl=full_iteration"
_FULL_ITERATION_NOTES: Final = (_FULL_ITERATION, "full-iteration CUDA graph")
_GRAPH_NOTES: Final = {"none": "", "full_iteration": _FULL_ITERATION, "full_layer": "cuda_graph_impl=local"}
_BRIDGE: Final = "megatron-bridge"
_BLACKWELL: Final = ("b200", "b300", "gb200", "gb300")
_HIGH_PRECISION_ATTENTION: Final = (("deepseek-v3", "gb200"),)


@dataclass(frozen=True, slots=True)
class MoeRecipe:
    """MoE settings of a performance recipe.

    model: preset; gpus, formats: cells of the columns gpu and precision; releases: of the containers; dispatcher:
    backend of the flex dispatcher, or alltoall; overlap: dispatch overlaps compute, with delayed weight gradients;
    graphs: none, full_iteration, full_layer, or Transformer Engine's scopes; recompute: cell of that column; ep:
    expert parallelism that selects the recipe, None: any; capacity: capacity factor to which experts are padded.
    """

    model: str
    gpus: tuple[str, ...]
    formats: tuple[str, ...]
    releases: tuple[str, ...]
    dispatcher: str
    overlap: bool
    graphs: str | tuple[str, ...]
    recompute: str
    ep: int | None = None
    capacity: float | None = None

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> "MoeRecipe":
        """Read an entry of the table."""
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in mapping.items()
        }
        return cls(**fields)

    def matches(self, case: ValidationCase, model: str | None, release: str) -> bool:
        """Whether a run may have used it; `ep` is not compared."""
        is_same_run = (case.text("gpu") in self.gpus) and case.text("precision") in self.formats
        return is_same_run and model == self.model and release in self.releases

    def notes(self, case: ValidationCase) -> Iterator[str]:
        """Its settings as in the notes of rows that state them."""
        is_flex = self.dispatcher != "alltoall"
        yield f"{'moe_flex_dispatcher_backend' if is_flex else 'moe_token_dispatcher_type'}={self.dispatcher}"
        # without interleaving a pipeline has nothing to overlap with (megatron/core/transformer/transformer_config.py)
        if self.overlap and (case.positive_int("pp", 1) == 1 or case.positive_int("vpp", 1) > 1):
            yield "moe_a2a_overlap=True"
        if isinstance(self.graphs, tuple):
            yield f"cuda_graph_impl=transformer_engine, cuda_graph_scope={[*self.graphs]}"
        elif self.graphs != "none":
            yield _GRAPH_NOTES[self.graphs]
        if self.capacity is not None:
            yield f"capacity factor {self.capacity:.1f}, padded"


@cache
def recipe_releases() -> Mapping[str, Mapping[str, str]]:
    """Tag and commit of Megatron Bridge in each container."""
    releases: dict[str, dict[str, str]] = read_mapping(RECIPE_TABLE)["releases"]
    return releases


@cache
def moe_recipes() -> tuple[MoeRecipe, ...]:
    """All recipes of the table."""
    return tuple(map(MoeRecipe.from_mapping, read_mapping(RECIPE_TABLE)["recipes"]))


def with_recipe_notes(case: ValidationCase) -> ValidationCase:
    """The case with the settings of its recipe in its notes, and its recomputation where the row states none."""
    if not case.text("framework").startswith(_BRIDGE):
        return case
    model = matching_preset(case) if case.text("experts") else None
    recipe = _recipe_of(case, model)
    extra_notes = [] if recipe is None else [*recipe.notes(case)]
    notes = "; ".join((case.text("notes"), *extra_notes))
    extra_notes += _full_iteration_notes(case, notes, model)
    if not extra_notes:
        return case
    recompute = case.text("recompute") or ("" if recipe is None else recipe.recompute)
    cells = {"notes": "; ".join((case.text("notes"), *extra_notes)), "recompute": recompute}
    return ValidationCase(case.cells | cells, case.line_number)


def _recipe_of(case: ValidationCase, model: str | None) -> MoeRecipe | None:
    """The recipe of a row that does not list its settings; that of its expert parallelism if there are several."""
    container = _CONTAINER.search(case.text("locator"))
    uses_newest = _DEFAULTS_NOTE in case.text("notes")
    if model is None or not (container or uses_newest) or _STATED_RECIPE.search(case.text("notes")):
        return None
    release = container[1] if container else _NEWEST_RELEASE
    matching = [recipe for recipe in moe_recipes() if recipe.matches(case, model, release)]
    ep = case.positive_int("ep", 1)
    return next((recipe for recipe in matching if recipe.ep in (ep, None)), matching[0] if matching else None)


def _full_iteration_notes(case: ValidationCase, notes: str, model: str | None) -> list[str]:
    """What recipes with full-iteration graphs in MXFP8 have in addition."""
    is_mxfp8 = case.text("precision") == "mxfp8" and case.text("gpu") in _BLACKWELL
    if not is_mxfp8 or model is None or not any(name in notes for name in _FULL_ITERATION_NOTES):
        return []
    has_fp8_attention = (model, case.text("gpu")) not in _HIGH_PRECISION_ATTENTION
    return [FUSED_MLP_NOTE, *([FP8_ATTENTION_NOTE] if has_fp8_attention else [])]
