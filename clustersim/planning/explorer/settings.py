"""Which settings does the explorer page offer, and what is the scenario with some of them?

Tables are computed from scenarios in which a few settings are changed; whatever a table does not name is as
simple as possible (one rank, one sequence, no recomputation), or as in the scenario (attention, loss,
optimizer, framework, cluster).
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, Final

from clustersim.common.cached_method import cached_by, cached_method
from clustersim.hardware.cluster import Cluster
from clustersim.model.layer_stack import LayerSpec, LayerStack
from clustersim.model.lora import Lora
from clustersim.model.mixer import ContextRule
from clustersim.model.precision_recipe import PrecisionRecipe
from clustersim.model.presets import load_preset
from clustersim.model.recompute_modules import RecomputeModule
from clustersim.model.training import (
    DotsSaveableRecompute,
    FullRecompute,
    NoRecompute,
    Recompute,
    SelectiveOpRecompute,
    SelectiveRecompute,
    Training,
)
from clustersim.model.transformer import TransformerModel, all_projections, resize_model
from clustersim.parallel.data_parallel_strategy import (
    DataParallelStrategy,
    with_shard_size,
)
from clustersim.parallel.layer_partition import LayerPartition, PipelineLayoutString
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import DENSE_AXIS_NAMES
from clustersim.parallel.plan import Plan
from clustersim.parallel.token_dispatch import runs_on
from clustersim.program.task import TokenDispatcher
from clustersim.results.explorer_tables import LookupTable, Setting
from clustersim.scenario import Scenario
from clustersim.scenario.changes.layout import named_strategy
from clustersim.scenario.config.lora import LoraConfig
from clustersim.scenario.config.scenario import ScenarioConfig
from clustersim.scenario.validation_rules.consistency import (
    check_heads,
    check_layers,
    check_secondary_shards,
    check_shard_size,
    check_widths,
)
from clustersim.scenario.validation_rules.precision import effective_recipe
from clustersim.schedules.registry import CHUNKED_SCHEDULES, build_schedule
from clustersim.schedules.schedule import Schedule

RECOMPUTE_POLICIES: Final[Mapping[str, Recompute]] = {
    "none": NoRecompute(),
    "selective": SelectiveRecompute(),
    "selective_op": SelectiveOpRecompute(),
    "dots_with_no_batch_dims_saveable": DotsSaveableRecompute(),
    "full": FullRecompute(),
}
EXPLORED_SCHEDULES: Final = ("1f1b", "gpipe", "interleaved", "bfs")
"""Built-in schedules whose order does not depend on durations, and whose backwards are not split."""
EXPLORED_SCHEDULE_TYPES: Final = tuple(type(build_schedule(name)) for name in EXPLORED_SCHEDULES)
OFFERED_VALUES: Final[Mapping[str, tuple[int, ...]]] = {
    "tp": (1, 2, 4, 8, 16, 32, 64),
    "cp": (1, 2, 4, 8, 16),
    "pp": (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64),
    "chunks": (2, 3, 4, 5, 6, 8),
    "microbatch": (1, 2, 4, 8, 16, 32),
    "sequence": tuple(2**power for power in range(8, 18)),
    "batch": tuple(2**power for power in range(15)),
}
"""Values that the page offers in addition to the scenario's."""
MOE_OFFERED_VALUES: Final[Mapping[str, tuple[int, ...]]] = {
    "tp": (1, 2, 4, 8), "ep": (1, 2, 4, 8, 16, 32, 64), "etp": (1, 2, 4, 8),
}  # fmt: skip
"""Those of MoE models, with fewer degrees so that the combinations stay tractable."""
_MODULES_PREFIX: Final = "modules:"
DERIVED_COUNTS: Final = (
    ("dp", ("gpus",), ("tp", "cp", "pp")),
    ("replicas", ("dp", "cp"), ()),
    ("room", ("gpus",), ("tp", "cp")),
    ("microbatches", ("batch",), ("dp", "microbatch")),
    ("stages", ("pp", "chunks"), ()),
)
"""Integers that follow from settings: (name, factors, divisors).

replicas: ranks with the same weights; room: ranks for each shard of a layer.
"""
MOE_DERIVED_COUNTS: Final = (
    ("folded", ("gpus",), ("pp",)),
    ("parts", ("ep", "etp"), ()),
    ("edp", ("folded",), ("parts",)),
    ("sent", ("microbatch", "sequence"), ("cp", "tp")),
)
"""Those of MoE models. folded: ranks of the expert mesh per pipeline rank.

parts: ranks that hold shards of all experts together; edp: ranks that hold the same experts; sent: tokens that a rank
dispatches.
"""
FEATURES: Final = (
    ("one", (), ()),
    ("tokens", ("microbatch", "sequence"), ("cp",)),
    ("scores", ("microbatch", "sequence", "sequence"), ("cp",)),
    ("keys", ("microbatch", "sequence"), ()),
    ("samples", ("microbatch",), ()),
)
"""What columns are proportional to.

A constant, tokens of a rank's microbatch, tokens x keys, all ranks' keys, sequences (of those that are images).
"""
_UNSPLITTABLE_MODEL: Final = resize_model(
    load_preset("llama-tiny"), heads=1, kv_heads=1
)  # which cannot be split by tensor parallelism


_LAYOUT_SETTINGS: Final = (*DENSE_AXIS_NAMES, "ep", "etp", "dispatcher", "split", "zero", "model")
_TRAINING_SETTINGS: Final = ("model", "precision", "zero", "recompute", "microbatch", "sequence", "batch")
"""Settings that a layout (besides its number of stages) and a training run depend on."""


@dataclass(frozen=True)
class ExplorerSpace:
    """A scenario, and the models, recipes and GPU counts that its page offers, the scenario's first.

    precisions: recipes as in files, before adjustment to accelerator and ZeRO stage (`effective_recipe`).
    """

    scenario: Scenario
    models: tuple[TransformerModel, ...]
    precisions: tuple[PrecisionRecipe, ...]
    gpus: tuple[int, ...]

    @cached_property
    def start(self) -> dict[str, Setting]:
        """The scenario's settings, in the order of the page's controls."""
        layout, training = self.scenario.layout.as_configured, self.scenario.training
        experts = {"ep": layout.ep, "etp": layout.effective_etp, "dispatcher": layout.dispatcher.value}
        return {
            "model": 0, "gpus": self.scenario.cluster.gpu_count, "tp": layout.tp, "pp": layout.pp, "cp": layout.cp,
            **(experts if self.is_moe else {}), "zero": layout.data.zero_stage, "recompute": self._start_recompute,
            "microbatch": training.microbatch,
            "sequence": training.sequence, "batch": training.global_batch, "schedule": self._start_schedule.name,
            "chunks": max(2, chunk_count(self._start_schedule)), "precision": 0, "split": layout.sequence_parallel,
        }  # fmt: skip

    @cached_property
    def offered_values(self) -> dict[str, tuple[Setting, ...]]:
        """Offered values of every setting."""
        batches = (self.scenario.training.global_batch * factor for factor in (2, 4))
        other_values = {**(MOE_OFFERED_VALUES if self.is_moe else {}), **self._unvaried_values}
        values_by_key: dict[str, Iterable[Setting]] = {
            **{key: sorted({*values, self.start[key]}) for key, values in {**OFFERED_VALUES, **other_values}.items()},
            "dispatcher": (kind.value for kind in TokenDispatcher if runs_on(kind, self.scenario.cluster.accelerator)),
            "model": range(len(self.models)),
            "precision": range(len(self.precisions)),
            "gpus": self.gpus,
            "zero": range(4),
            "split": (False, True),
            "schedule": EXPLORED_SCHEDULES,
            "recompute": dict.fromkeys(
                (
                    *(name for name, policy in RECOMPUTE_POLICIES.items() if policy != DotsSaveableRecompute()),
                    *self._recompute_modules,
                    *(f"layers:{layers}" for layers in (1, 2, 4)),
                    self._start_recompute,
                )
            ),
            "batch": sorted({*OFFERED_VALUES["batch"], self.scenario.training.global_batch, *batches}),
        }
        return {key: tuple(values_by_key[key]) for key in self.start}

    @property
    def _unvaried_values(self) -> dict[str, tuple[int, ...]]:
        """Values of settings that the scenario's model leaves no choice of."""
        is_split = self.splits_sequences and not self.reads_images
        has_stages = not any(mixer.reads_first_layer for mixer in self.models[0].distinct_mixers)
        unvaried = {} if is_split else {"cp": (1,)}
        unvaried |= {} if has_stages else {"pp": (1,)}
        return unvaried | ({"sequence": ()} if self.reads_images else {})

    @property
    def _start_schedule(self) -> Schedule:
        """The scenario's schedule, or 1F1B where the page does not offer it."""
        configured = self.scenario.schedule
        return configured if is_explored(configured) else build_schedule(EXPLORED_SCHEDULES[0])

    @property
    def _start_recompute(self) -> str:
        configured = self.scenario.training.recompute
        match configured:
            case FullRecompute(int() as layers):
                return f"layers:{layers}"
            case SelectiveRecompute(modules) if configured != SelectiveRecompute():
                return _modules_name(modules)
        return next(name for name, policy in RECOMPUTE_POLICIES.items() if policy == configured)

    @property
    def _recompute_modules(self) -> Iterable[str]:
        """Selective recompute policies that are common for MoE models."""
        if self.is_moe:
            cheap = {
                RecomputeModule.LAYERNORM,
                RecomputeModule.MOE_ACTIVATION,
                *([RecomputeModule.MLA_UP_PROJECTION] if self.models[0].uses_latent_attention else []),
            }
            yield from (
                _modules_name({RecomputeModule.MOE_ACTIVATION}),
                _modules_name(cheap),
                _modules_name({RecomputeModule.MOE}),
            )

    @cached_property
    def selective_policies(self) -> tuple[str, ...]:
        """Names of the selective recompute policies."""
        policies = {str(name): parse_recompute(str(name)) for name in self.offered_values["recompute"]}
        return tuple(name for name, policy in policies.items() if policy.is_selective)

    @property
    def is_moe(self) -> bool:
        """Whether the scenario's model is an MoE model, which is then the only one offered."""
        return bool(self.models[0].distinct_routed_moes)

    @cached_property
    def is_only_model(self) -> bool:
        """Whether the scenario's model is the only one offered, because its layers are not those of the presets."""
        return self.is_moe or has_own_layers(self.models[0])

    @property
    def splits_sequences(self) -> bool:
        """Whether context parallelism is offered: all mixers send keys and values round a ring, which has a column."""
        return all(mixer.context_rule is ContextRule.KV_RING for mixer in self.models[0].distinct_mixers)

    @property
    def reads_images(self) -> bool:
        """Whether the scenario's model reads images, each of which is a sequence of its length."""
        return self.models[0].patches is not None

    @property
    def shares_weights(self) -> bool:
        """Whether layers of the scenario's model share weights with each other."""
        return any(spec.shared is not None for spec in self.models[0].distinct_specs)

    @property
    def layer_kind_count(self) -> int:
        """Maximum number of layer kinds of a model."""
        return max(len(model.distinct_specs) for model in self.models)

    def layer_kind(self, model: int, index: int) -> LayerSpec:
        """A model's layer kind; its first where it has fewer."""
        specs = self.models[model].distinct_specs
        return specs[index] if index < len(specs) else specs[0]

    @cached_property
    def stage_contents(self) -> tuple[LayerStack, ...]:
        """Layer stacks of all possible stages if there are several kinds of layers, else empty."""
        if self.layer_kind_count == 1:
            return ()
        combinations = product(self.feasible_pp_degrees, self.setting_values["chunks"])
        plans = [
            self.plan_with(model=0, pp=pp, chunks=chunks)
            for pp, chunks in combinations
            if self.has_legal_stages(0, pp, chunks)
        ]
        return tuple(dict.fromkeys(stage.stack for plan in plans for stage in plan.stages))

    def has_legal_stages(self, model: int, pp: int, chunks: int) -> bool:
        """Whether a model's layers can be distributed over these stages."""
        return pp in self.feasible_pp_degrees and not [
            *check_layers(self.scenario_with(model=model, pp=pp, chunks=chunks))
        ]

    @cached_property
    def setting_values(self) -> dict[str, tuple[Any, ...]]:
        """All values of settings and of integers that follow from them."""
        values: dict[str, tuple[Any, ...]] = {**self.offered_values, "chunks": (1, *self.offered_values["chunks"])}
        for name, *keys in self.derived_counts:
            numerators, denominators = (
                {prod(combination) for combination in product(*(values[key] for key in names))} for names in keys
            )
            values[name] = tuple(
                sorted(
                    {
                        numerator // denominator
                        for numerator in numerators
                        for denominator in denominators
                        if numerator % denominator == 0
                    }
                )
            )
        if self.is_moe:
            values["replicas"] = tuple(sorted({*values["replicas"], *values["edp"]}))
        return {**values, "pipelined": (False, True), "several": (False, True), "experts_shared": (False, True)}

    @property
    def derived_counts(self) -> tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]:
        """Integers that follow from settings."""
        return (*DERIVED_COUNTS, *MOE_DERIVED_COUNTS) if self.is_moe else DERIVED_COUNTS

    def build_table(self, compute: Callable[..., Any], *keys: str) -> LookupTable:
        """Tabulate a function over every combination of some settings."""
        return LookupTable.tabulate(compute, **{key: self.setting_values[key] for key in keys})

    def data_parallel_flags(self) -> dict[str, LookupTable]:
        """What data parallelism depends on: is there a pipeline, more than one microbatch, are experts replicated?"""
        return {
            "pipelined": self.build_table(lambda pp: pp > 1, "pp"),
            "several": self.build_table(lambda microbatches: microbatches > 1, "microbatches"),
            **({"experts_shared": self.build_table(lambda edp: edp > 1, "edp")} if self.is_moe else {}),
        }

    @cached_property
    def feasible_pp_degrees(self) -> set[int]:
        """Pipeline degrees that divide some offered number of GPUs."""
        return {pp for pp in self.setting_values["pp"] if any(gpus % pp == 0 for gpus in self.gpus)}

    @cached_property
    def legal_tp_degrees(self) -> set[tuple[int, int]]:
        """(model, tp) pairs for which the model's dimensions divide."""
        combinations = product(self.setting_values["model"], self.setting_values["tp"])
        scenarios = {(model, tp): self.scenario_with(model=model, tp=tp) for model, tp in combinations}
        return {key for key, scenario in scenarios.items() if not [*check_heads(scenario), *check_widths(scenario)]}

    def scenario_with(self, **settings: Any) -> Scenario:
        """The scenario with some settings, and the simplest values of the others; it need not be legal."""
        completed = _complete_settings(settings)
        schedule = self.schedule_with(settings)
        layout = self._layout_with(completed, completed["pp"] * chunk_count(schedule))
        gpus = completed.get("gpus", layout.world_size)
        return replace(
            self.scenario,
            model=self._shown_model(completed["model"]),
            layout=layout,
            training=self._training_with(completed),
            cluster=self._cluster_with(gpus),
            schedule=schedule,
            steps=1,
        )

    @cached_by(lambda _self, completed, stages: (*map(completed.get, _LAYOUT_SETTINGS), stages))
    def _layout_with(self, completed: Mapping[str, Any], stages: int) -> Layout:
        return replace(
            self.scenario.layout.as_configured,
            **{axis: completed[axis] for axis in DENSE_AXIS_NAMES},
            ep=completed["ep"],
            etp=completed["etp"],
            dispatcher=TokenDispatcher(completed.get("dispatcher", self.scenario.layout.dispatcher)),
            sequence_parallel=completed["split"],
            data=self.data_parallel_strategy(completed["zero"]),
            layers_per_stage=self._layer_partition(completed["model"], stages),
        )

    @cached_by(lambda _self, completed: tuple(map(completed.get, _TRAINING_SETTINGS)))
    def _training_with(self, completed: Mapping[str, Any]) -> Training:
        return replace(
            self.scenario.training,
            lora=self._adapters(self._shown_model(completed["model"])),
            recipe=self.effective_recipe(completed["precision"], completed["zero"]),
            recompute=parse_recompute(completed["recompute"]),
            microbatch=completed["microbatch"],
            sequence=completed.get("sequence", self.scenario.training.sequence),
            global_batch=completed["batch"],
        )

    @cached_method
    def _cluster_with(self, gpus: int) -> Cluster:
        return replace(self.scenario.cluster, gpu_count=gpus)

    def _shown_model(self, model: int | None) -> TransformerModel:
        return self.models[model or 0] if self.is_only_model or model is not None else _UNSPLITTABLE_MODEL

    def plan_with(self, **settings: Any) -> Plan:
        """The parallel plan of the scenario with some settings.

        If its hybrid shard size does not fit the replicas, weights are sharded over all of them.
        """
        scenario = self.scenario_with(**settings)
        layout = scenario.layout
        if [*check_shard_size(scenario), *check_secondary_shards(scenario)]:
            layout = replace(layout, data=with_shard_size(layout.data, None))
        return Plan(scenario.model, scenario.training, layout, scenario.schedule.placement)

    def schedule_with(self, settings: Mapping[str, Any]) -> Schedule:
        """The schedule of some settings; the number of chunks counts only for chunked schedules."""
        chunks = settings.get("chunks", 1)
        name = settings.get("schedule", "interleaved" if chunks > 1 else "1f1b")
        return build_schedule(name, max(2, chunks)) if name in CHUNKED_SCHEDULES else build_schedule(name)

    def data_parallel_strategy(self, zero_stage: int) -> DataParallelStrategy:
        """The scenario's strategy at its own ZeRO stage, else the default one (as `layout.data=zero2`)."""
        configured = self.scenario.layout.data
        if configured.zero_stage == zero_stage and not configured.is_single_process:
            return configured
        return named_strategy(self.scenario, f"zero{zero_stage}" if zero_stage else "ddp")

    def effective_recipe(self, precision: int, zero: int) -> PrecisionRecipe:
        """The precision recipe as it is run at a ZeRO stage."""
        scenario = self.scenario
        return effective_recipe(
            *(self.precisions[precision], scenario.cluster.accelerator, self.data_parallel_strategy(zero)),
            scenario.framework,
        )

    def first_equivalent_recipes(self, key_of: Callable[[PrecisionRecipe], Hashable]) -> list[int]:
        """For each recipe the index of the first one with the same key."""
        keys = [key_of(recipe) for recipe in self.precisions]
        return [keys.index(key) for key in keys]

    @cached_property
    def _lora_config(self) -> LoraConfig | None:
        return ScenarioConfig.model_validate(self.scenario.to_mapping()).training.lora

    def _adapters(self, model: TransformerModel) -> Lora | None:
        """The scenario's LoRA adapters, on those matrices of the model that its file selects."""
        return None if self._lora_config is None else self._lora_config.lora_settings(all_projections(model))

    def _layer_partition(self, model: int | None, stages: int) -> LayerPartition:
        """The scenario's layer partition if it is for this model and stage count; a rule applies to any."""
        configured = self.scenario.layout.layers_per_stage
        counts = configured.layer_counts if isinstance(configured, PipelineLayoutString) else configured
        if model != 0 or (isinstance(counts, tuple) and len(counts) != stages):
            return None
        return configured


def has_own_layers(model: TransformerModel) -> bool:
    """Whether a model's layers are of several kinds, or have other mixers than attention, or it reads images."""
    return model.has_other_mixers or len(model.distinct_specs) > 1 or model.patches is not None


def is_explored(schedule: Schedule) -> bool:
    """Whether the page can play a schedule: a built-in one of its own, with rounds of as many microbatches as ranks."""
    if not isinstance(schedule, EXPLORED_SCHEDULE_TYPES):
        return False
    chunks = chunk_count(schedule) if schedule.name in CHUNKED_SCHEDULES else None
    return schedule == build_schedule(schedule.name, chunks)


def chunk_count(schedule: Schedule) -> int:
    """Model chunks per pipeline rank, which is the same for any number of ranks."""
    return schedule.placement(1).max_chunks


def _complete_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Default settings, overridden by the given ones and by what follows from given counts."""
    defaults = {"model": None, "tp": 1, "cp": 1, "precision": 0, "zero": 0, "split": False, "recompute": "none"}
    defaults |= {"ep": 1, "etp": None}
    completed = {**defaults, "microbatch": 1, "pp": settings.get("stages", 1), **settings}
    if "room" in completed:
        completed["gpus"] = completed["room"]
    if "folded" in completed:
        completed["dp"] = completed["folded"]
    completed.setdefault("batch", completed.get("microbatches", 1))
    replica = completed["tp"] * completed["cp"] * completed["pp"]
    implied_dp = completed["batch"] // completed.get("microbatches", completed["batch"])
    completed.setdefault("dp", max(1, completed["gpus"] // replica) if "gpus" in completed else implied_dp)
    return completed


def parse_recompute(name: str) -> Recompute:
    """The recompute policy of a name used by the page.

    >>> parse_recompute("layers:2")
    FullRecompute(layers=2)
    """
    if name.startswith(_MODULES_PREFIX):
        return SelectiveRecompute(frozenset(map(RecomputeModule, name.removeprefix(_MODULES_PREFIX).split(","))))
    return RECOMPUTE_POLICIES[name] if name in RECOMPUTE_POLICIES else FullRecompute(int(name.removeprefix("layers:")))


def _modules_name(modules: Collection[RecomputeModule]) -> str:
    """The page's name for selective recomputation of some modules."""
    return _MODULES_PREFIX + ",".join(module.value for module in RecomputeModule if module in modules)
