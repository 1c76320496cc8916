"""What does a framework's recipe set for a model, where a scenario does not say it?

A recipe of a framework is more than its kernels (`recipes` in topologies/frameworks): it chooses the dispatcher, CUDA
graphs, overlaps and recomputation for a model on an accelerator, in each version of the software. A file of
topologies/model_recipes, with the name of the framework, has these. `recipe_settings` finds the entry of a scenario
and returns what it sets as keys of the scenario's file; keys that the file states stay as they are.

CUDA graphs over Transformer Engine's scopes capture everything but the experts if attention is among them, and so
little without it that it counts as nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from clustersim.common import data_files
from clustersim.common.errors import InputError
from clustersim.model.framework import GraphCapture
from clustersim.model.framework_versions import selected_version
from clustersim.scenario.config.scenario import ScenarioConfig
from clustersim.scenario.config.training import RecomputeMode

_CATEGORY: Final = "model_recipes"
_ALL_TO_ALL: Final = "alltoall"
_FULL_ITERATION: Final = "full_iteration"
_FULL_LAYER: Final = "full_layer"
_MXFP8: Final = "mxfp8"
_GRAPHS: Final = "framework.cuda_graphs"
_ATTENTION_SCOPE: Final = "attn"
_DISPATCHER: Final = "layout.dispatcher"
_NUM_SMS: Final = "layout.dispatcher_num_sms"
_OVERLAP: Final = "layout.overlap_moe_expert_parallel_comm"
_DELAYED_WGRAD: Final = "layout.delay_wgrad_compute"
_RECOMPUTE: Final = "training.recompute"
_LAYERS: Final = RecomputeMode.FULL.value
_OF_ALL_RECIPES: Final[Mapping[str, Any]] = {"layout.etp": 1}  # of models with experts


class OverlapUse(Enum):
    """Where a recipe overlaps dispatch with compute: NEVER, wherever Megatron can (ALWAYS), with a PIPELINE alone."""

    NEVER = "never"
    ALWAYS = "always"
    PIPELINE = "pipeline"

    def applies(self, *, is_pipelined: bool, is_interleaved: bool) -> bool:
        """Whether it overlaps; pipelines without chunks have nothing to overlap dispatch with.

        Source: megatron/core/transformer/transformer_config.py.
        """
        if self is OverlapUse.NEVER:
            return False
        return is_interleaved if is_pipelined else self is OverlapUse.ALWAYS


@dataclass(frozen=True, slots=True)
class ModelRecipe:
    """What a recipe sets for one model.

    model: preset; versions: of the framework; recipe: of the framework's file; accelerators, formats: files of
    accelerators and values of `training.precision.compute`, (): any; dispatcher: of tokens, None: the layout's;
    overlap: where dispatch overlaps compute; delayed_wgrad: with delayed weight gradients; graphs: none,
    full_iteration, full_layer, or Transformer Engine's scopes, None: as without a recipe; recompute: modules, or a mode
    (of whole layers only without overlap, which excludes it), None: as without a recipe; ep: expert parallelism that
    selects the recipe, None: any; capacity: capacity factor to which experts are padded; settings: other keys of a
    scenario.
    """

    model: str
    versions: tuple[str, ...]
    recipe: str = "performance"
    accelerators: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    dispatcher: str | None = None
    overlap: OverlapUse = OverlapUse.NEVER
    delayed_wgrad: bool = True
    graphs: str | tuple[str, ...] | None = None
    recompute: str | tuple[str, ...] | None = None
    ep: int | None = None
    capacity: float | None = None
    other_settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> "ModelRecipe":
        """Read an entry of a file."""
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in mapping.items()
        }
        return cls(**fields | {"overlap": OverlapUse(fields.get("overlap", OverlapUse.NEVER.value))})

    def is_for(self, accelerator: str | None, compute: str) -> bool:
        """Whether it is of an accelerator and a format of matmuls."""
        return (not self.accelerators or accelerator in self.accelerators) and (
            not self.formats or compute in self.formats
        )

    def settings(self, *, is_pipelined: bool, is_interleaved: bool) -> Iterator[tuple[str, Any]]:
        """Keys of a scenario with their values."""
        overlaps = self.overlap.applies(is_pipelined=is_pipelined, is_interleaved=is_interleaved)
        if self.dispatcher is not None:
            yield _DISPATCHER, self.dispatcher
        if overlaps:
            yield _OVERLAP, True
            yield _DELAYED_WGRAD, self.delayed_wgrad
        if self.graphs is not None:
            yield _GRAPHS, self._graph_capture
        if self.recompute is not None:
            yield _RECOMPUTE, self._recompute(overlaps=overlaps)
        if self.capacity is not None:
            yield "model.experts.capacity_factor", self.capacity
        yield from self.other_settings.items()

    def _recompute(self, *, overlaps: bool) -> Any:
        if isinstance(self.recompute, tuple):
            return {"modules": [*self.recompute]} if self.recompute else "none"
        return "none" if overlaps and self.recompute == _LAYERS else self.recompute

    @property
    def _graph_capture(self) -> bool | str:
        if isinstance(self.graphs, str):
            return self.graphs in (_FULL_ITERATION, _FULL_LAYER)
        return GraphCapture.OUTSIDE_EXPERTS.value if _ATTENTION_SCOPE in (self.graphs or ()) else False


@dataclass(frozen=True, slots=True)
class ModelRecipes:
    """A file of recipes.

    versions: of the framework, oldest first (of dates, each is that of code from then on); models: keys by model and
    recipe (or `any`); of_recipe: keys by recipe, whatever the model; formats: keys by format; dispatchers: keys that go
    with a dispatcher of a recipe; high_precision_attention: accelerators, by model, on which recipes with graphs of
    iterations keep attention in 16 bits.
    """

    versions: Mapping[str, Mapping[str, str]]
    models: Mapping[str, Mapping[str, Mapping[str, Any]]]
    recipes: tuple[ModelRecipe, ...]
    of_recipe: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    formats: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    dispatchers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    high_precision_attention: Mapping[str, Sequence[str]] = field(default_factory=dict)

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
        return selected_version(config.framework.name, config.framework.version or "", self.versions)


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
    framework = config.framework
    recipes = load_model_recipes(framework.name) if framework.recipe else None
    if recipes is None:
        return {}
    accelerator = _accelerator(config, base_dir)
    recipe = _find_recipe(recipes, config, accelerator)
    settings = _general_settings(recipes, config) | (
        _settings_of(recipe, recipes, config) | recipes.format_settings(recipe, config, accelerator or "")
        if recipe is not None
        else {}
    )
    return _without_conflicts({key: value for key, value in settings.items() if not _is_stated(config, key)}, config)


def _general_settings(recipes: ModelRecipes, config: ScenarioConfig) -> dict[str, Any]:
    """What recipes set whatever the accelerator: of all models, of a format, of a model."""
    recipe, model = config.framework.recipe or "", config.model.preset or ""
    settings = {**recipes.of_recipe.get(recipe, {}), **recipes.formats.get(config.training.precision.compute, {})}
    if model not in recipes.models:
        return settings
    by_recipe = recipes.models[model]
    return settings | {**_OF_ALL_RECIPES, **by_recipe.get("any", {}), **by_recipe.get(recipe, {})}


def _settings_of(recipe: ModelRecipe, recipes: ModelRecipes, config: ScenarioConfig) -> dict[str, Any]:
    """What the recipe of a model sets, and what goes with its dispatcher."""
    is_interleaved = config.schedule.interleaved is not None
    settings = dict(recipe.settings(is_pipelined=config.layout.pp > 1, is_interleaved=is_interleaved))
    return {**recipes.dispatchers.get(recipe.dispatcher or "", {}), **settings}


def _find_recipe(recipes: ModelRecipes, config: ScenarioConfig, accelerator: str | None) -> ModelRecipe | None:
    """The recipe of the scenario's model, accelerator, format and version; that of its ep if there are several."""
    compute = config.training.precision.compute
    of_model = [
        recipe
        for recipe in recipes.recipes
        if recipe.model == config.model.preset
        and recipe.recipe == config.framework.recipe
        and recipe.is_for(accelerator, compute)
    ]
    version = recipes.version_of(config) if of_model else ""
    matching = [recipe for recipe in of_model if version in recipe.versions]
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
        excluded.add(_NUM_SMS)
    recompute = config.training.recompute
    recomputes_layers = (
        _RECOMPUTE not in settings and recompute.modules is None and recompute.mode is RecomputeMode.FULL
    )
    overlaps = settings.get(_OVERLAP, config.layout.overlap_moe_expert_parallel_comm) and not recomputes_layers
    if not overlaps:
        excluded.add(_OVERLAP)
    if not overlaps or config.layout.data.shards_parameters:
        excluded.add(_DELAYED_WGRAD)
    if overlaps or settings.get(_DISPATCHER, config.layout.dispatcher.value) != _ALL_TO_ALL:
        excluded.add("layout.moe_shared_expert_overlap")
    return {key: value for key, value in settings.items() if key not in excluded}
