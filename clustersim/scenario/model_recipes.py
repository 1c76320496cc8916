"""What does a framework's recipe set for a model, where a scenario does not say it?

A recipe of a framework is more than its kernels (`recipes` in topologies/frameworks): it chooses the dispatcher, CUDA
graphs, overlaps and recomputation for a model on an accelerator, in each version of the software. A file of
topologies/model_recipes, with the name of the framework, has these. `recipe_settings` finds the entry of a scenario
and returns what it sets as keys of the scenario's file; keys that the file states stay as they are.

CUDA graphs over Transformer Engine's scopes capture everything but the experts if attention is among them, and so
little without it that it counts as nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from clustersim.common import data_files
from clustersim.common.errors import InputError
from clustersim.model.framework import GraphCapture
from clustersim.scenario.config.scenario import ScenarioConfig
from clustersim.scenario.config.training import RecomputeMode

_CATEGORY: Final = "model_recipes"
_ALL_TO_ALL: Final = "alltoall"
_HYBRIDEP: Final = "hybridep"
# NVIDIA-NeMo/Megatron-Bridge v0.3.0 to v0.5.1, scripts/performance/utils/overrides.py (`moe_hybridep_num_sms`)
_HYBRIDEP_SMS: Final = 32
_FULL_ITERATION: Final = "full_iteration"
_FULL_LAYER: Final = "full_layer"
_MXFP8: Final = "mxfp8"
_GRAPHS: Final = "framework.cuda_graphs"
_ATTENTION_SCOPE: Final = "attn"
_DISPATCHER: Final = "layout.dispatcher"
_OVERLAP: Final = "layout.overlap_moe_expert_parallel_comm"
_DELAYED_WGRAD: Final = "layout.delay_wgrad_compute"
_RECOMPUTE: Final = "training.recompute"
_OF_ALL_RECIPES: Final[Mapping[str, Any]] = {"layout.etp": 1}  # of models with experts


@dataclass(frozen=True, slots=True)
class ModelRecipe:
    """What a recipe sets for one model.

    model: preset; accelerators, formats: files of accelerators and values of `training.precision.compute`; versions:
    of the framework; dispatcher: of tokens; overlap: dispatch overlaps compute, with delayed weight gradients; graphs:
    none, full_iteration, full_layer, or Transformer Engine's scopes; recompute: modules; ep: expert parallelism that
    selects the recipe, None: any; capacity: capacity factor to which experts are padded.
    """

    model: str
    accelerators: tuple[str, ...]
    formats: tuple[str, ...]
    versions: tuple[str, ...]
    dispatcher: str
    overlap: bool
    graphs: str | tuple[str, ...]
    recompute: tuple[str, ...]
    ep: int | None = None
    capacity: float | None = None

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> "ModelRecipe":
        """Read an entry of a file."""
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in mapping.items()
        }
        return cls(**fields)

    def settings(self, *, is_interleaved: bool) -> Iterator[tuple[str, Any]]:
        """Keys of a scenario with their values; is_interleaved: without a pipeline, or with several chunks.

        Other pipelines have nothing to overlap dispatch with (megatron/core/transformer/transformer_config.py).
        """
        yield _DISPATCHER, self.dispatcher
        if self.dispatcher == _HYBRIDEP:
            yield "layout.dispatcher_num_sms", _HYBRIDEP_SMS
        if self.overlap and is_interleaved:
            yield _OVERLAP, True
            yield _DELAYED_WGRAD, True
        yield _GRAPHS, self._graph_capture
        yield _RECOMPUTE, {"modules": [*self.recompute]} if self.recompute else "none"
        if self.capacity is not None:
            yield "model.experts.capacity_factor", self.capacity

    @property
    def _graph_capture(self) -> bool | str:
        if isinstance(self.graphs, str):
            return self.graphs in (_FULL_ITERATION, _FULL_LAYER)
        return GraphCapture.OUTSIDE_EXPERTS.value if _ATTENTION_SCOPE in self.graphs else False


@dataclass(frozen=True, slots=True)
class ModelRecipes:
    """A file of recipes.

    versions: of the framework, oldest first; formats: keys by format; models: keys by model and recipe (or `any`);
    high_precision_attention: accelerators, by model, on which recipes with graphs of iterations keep attention in 16
    bits.
    """

    versions: Mapping[str, Mapping[str, str]]
    formats: Mapping[str, Mapping[str, Any]]
    models: Mapping[str, Mapping[str, Mapping[str, Any]]]
    high_precision_attention: Mapping[str, Sequence[str]]
    recipes: tuple[ModelRecipe, ...]

    def format_settings(self, recipe: ModelRecipe, config: ScenarioConfig, accelerator: str) -> dict[str, Any]:
        """What a recipe with graphs of iterations sets in MXFP8."""
        if config.training.precision.compute != _MXFP8 or not self._captures_iterations(recipe, config):
            return {}
        is_high_precision = accelerator in self.high_precision_attention.get(recipe.model, ())
        attention = {} if is_high_precision else {"training.precision.attention": _MXFP8}
        return {"training.overheads.grouping": "fused"} | attention

    def _captures_iterations(self, recipe: ModelRecipe, config: ScenarioConfig) -> bool:
        """Whether whole iterations are captured: by the recipe, or by the file where its version can."""
        if not _is_stated(config, _GRAPHS):
            return recipe.graphs == _FULL_ITERATION
        versions = {version for other in self.recipes if other.graphs == _FULL_ITERATION for version in other.versions}
        return config.framework.cuda_graphs is True and self.version_of(config) in versions

    def version_of(self, config: ScenarioConfig) -> str:
        """The version of a scenario's software, else the newest."""
        return config.framework.version or [*self.versions][-1]


def load_model_recipes(framework: str) -> ModelRecipes | None:
    """The recipes of a packaged framework; None where none are known."""
    if framework not in data_files.list_names(_CATEGORY):
        return None
    path = data_files.find_file(_CATEGORY, framework)
    return _read_model_recipes(path, data_files.read_text(path))


@lru_cache(maxsize=4)
def _read_model_recipes(path: Path, text: str) -> ModelRecipes:
    content = data_files.parse_mapping(path, text)
    recipes = tuple(map(ModelRecipe.from_mapping, content["recipes"]))
    return ModelRecipes(**content | {"recipes": recipes})


def recipe_settings(config: ScenarioConfig, base_dir: Path) -> dict[str, Any]:
    """Values by key of the scenario's file that its framework's recipe sets and the file does not state."""
    framework, model = config.framework, config.model.preset or ""
    recipes = load_model_recipes(framework.name) if framework.recipe else None
    if recipes is None:
        return {}
    settings = {**recipes.formats.get(config.training.precision.compute, {})}
    if model in recipes.models:
        by_recipe = recipes.models[model]
        settings |= {**_OF_ALL_RECIPES, **by_recipe.get("any", {}), **by_recipe.get(framework.recipe or "", {})}
    accelerator = _accelerator(config, base_dir)
    recipe = _find_recipe(recipes, config, accelerator) if framework.recipe == "performance" else None
    if recipe is not None:
        is_interleaved = config.layout.pp == 1 or config.schedule.interleaved is not None
        settings |= dict(recipe.settings(is_interleaved=is_interleaved))
        settings |= recipes.format_settings(recipe, config, accelerator or "")
    return _without_conflicts({key: value for key, value in settings.items() if not _is_stated(config, key)}, config)


def _find_recipe(recipes: ModelRecipes, config: ScenarioConfig, accelerator: str | None) -> ModelRecipe | None:
    """The recipe of the scenario's model, accelerator, format and version; that of its ep if there are several."""
    version = recipes.version_of(config)
    compute = config.training.precision.compute
    matching = [
        recipe
        for recipe in recipes.recipes
        if recipe.model == config.model.preset
        and accelerator in recipe.accelerators
        and compute in recipe.formats
        and version in recipe.versions
    ]
    selected = (recipe for recipe in matching if recipe.ep in (config.layout.ep, None))
    return next(selected, matching[0] if matching else None)


def _accelerator(config: ScenarioConfig, base_dir: Path) -> str | None:
    """The file of the cluster's accelerator; None where it is not named."""
    cluster = config.cluster
    if isinstance(cluster.accelerator, str):
        return cluster.accelerator
    try:
        path = (
            data_files.resolve_relative(base_dir, cluster.path)
            if cluster.path
            else data_files.find_file("clusters", cluster.name or "")
        )
        name = data_files.read_mapping(path).get("accelerator")
    except InputError:  # reading the cluster says so
        return None
    return name if isinstance(name, str) else None


def _is_stated(config: ScenarioConfig, key: str) -> bool:
    """Whether the scenario's file has the key, or `none` in place of one of the sections above it."""
    section: Any = config
    for name in key.split("."):
        if section is None:
            return True
        if name not in section.model_fields_set:
            return False
        section = getattr(section, name)
    return True


def _without_conflicts(settings: Mapping[str, Any], config: ScenarioConfig) -> dict[str, Any]:
    """What the file does not exclude: options of another dispatcher, overlaps where whole layers are recomputed."""
    excluded: set[str] = set()
    if _DISPATCHER not in settings:
        excluded.add("layout.dispatcher_num_sms")
    recompute = config.training.recompute
    recomputes_layers = (
        _RECOMPUTE not in settings and recompute.modules is None and recompute.mode is RecomputeMode.FULL
    )
    overlaps = settings.get(_OVERLAP, config.layout.overlap_moe_expert_parallel_comm) and not recomputes_layers
    if not overlaps:
        excluded.add(_OVERLAP)
    if not overlaps or config.layout.data.strategy().shards_parameters:
        excluded.add(_DELAYED_WGRAD)
    if overlaps or settings.get(_DISPATCHER, config.layout.dispatcher.value) != _ALL_TO_ALL:
        excluded.add("layout.moe_shared_expert_overlap")
    return {key: value for key, value in settings.items() if key not in excluded}
