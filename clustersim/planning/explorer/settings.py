"""Which settings does the explorer page offer, and what is the scenario with some of them?

Tables are made of scenarios in which a few settings are changed; whatever a table does not name is as plain as can be
(one rank, one sequence, nothing recomputed), or as in the scenario (attention, loss, optimizer, framework, cluster).
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, Final

from clustersim.model.layer_stack import LatentAttention, LayerSpec, LayerStack
from clustersim.model.lora import Lora
from clustersim.model.precision_recipe import PrecisionRecipe
from clustersim.model.presets import load_preset
from clustersim.model.recompute_modules import RecomputeModule
from clustersim.model.training import FullRecompute, NoRecompute, Recompute, SelectiveOpRecompute, SelectiveRecompute
from clustersim.model.transformer import TransformerModel, all_projections, resize_model
from clustersim.parallel.data_parallel_strategy import (
    STRATEGY_BY_ZERO_STAGE,
    DataParallelStrategy,
    NaiveDataParallel,
    with_shard_size,
)
from clustersim.parallel.layer_partition import LayerPartition, PipelineLayoutString
from clustersim.parallel.mesh import DENSE_AXIS_NAMES
from clustersim.parallel.plan import Plan
from clustersim.program.task import TokenDispatcher
from clustersim.results.explorer_tables import Setting, Table
from clustersim.scenario import Scenario
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

RECOMPUTES: Final[Mapping[str, Recompute]] = {
    "none": NoRecompute(),
    "selective": SelectiveRecompute(),
    "selective_op": SelectiveOpRecompute(),
    "full": FullRecompute(),
}
SCHEDULES: Final = ("1f1b", "gpipe", "interleaved", "bfs")
"""Those of the shelf whose order does not depend on durations, and whose backwards are whole."""
PLAYED: Final = tuple(type(build_schedule(name)) for name in SCHEDULES)
OFFERED: Final[Mapping[str, tuple[int, ...]]] = {
    "tp": (1, 2, 4, 8, 16, 32, 64),
    "cp": (1, 2, 4, 8, 16),
    "pp": (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64),
    "chunks": (2, 3, 4, 5, 6, 8),
    "microbatch": (1, 2, 4, 8, 16, 32),
    "sequence": tuple(2**power for power in range(8, 18)),
    "batch": tuple(2**power for power in range(15)),
}
"""Values that the page offers beside the scenario's."""
OF_EXPERTS: Final[Mapping[str, tuple[int, ...]]] = {
    "tp": (1, 2, 4, 8), "ep": (1, 2, 4, 8, 16, 32, 64), "etp": (1, 2, 4, 8),
}  # fmt: skip
"""Those of mixtures of experts, whose layers are cut less, so that there are not too many ways."""
_MODULES: Final = "modules:"
COUNTS: Final = (
    ("dp", ("gpus",), ("tp", "cp", "pp")),
    ("replicas", ("dp", "cp"), ()),
    ("room", ("gpus",), ("tp", "cp")),
    ("microbatches", ("batch",), ("dp", "microbatch")),
    ("stages", ("pp", "chunks"), ()),
)
"""Whole numbers that follow from settings: (name, factors, divisors).

replicas: ranks with the same weights; room: ranks for each slice of a layer.
"""
COUNTS_OF_EXPERTS: Final = (
    ("folded", ("gpus",), ("pp",)),
    ("parts", ("ep", "etp"), ()),
    ("edp", ("folded",), ("parts",)),
    ("sent", ("microbatch", "sequence"), ("cp", "tp")),
)
"""Those of mixtures. folded: ranks that experts are folded onto; parts: that have parts of all experts together;
edp: that have the same; sent: tokens that a rank sends to experts.
"""
FEATURES: Final = (
    ("one", (), ()),
    ("tokens", ("microbatch", "sequence"), ("cp",)),
    ("scores", ("microbatch", "sequence", "sequence"), ("cp",)),
    ("keys", ("microbatch", "sequence"), ()),
)
"""To what parts are proportional: nothing, tokens of a microbatch on a rank, these by keys, all ranks' keys."""
_PLAIN: Final = resize_model(load_preset("llama-tiny"), heads=1, kv_heads=1)  # which tensor parallelism cannot cut


@dataclass(frozen=True)
class Space:
    """A scenario, and the models, number formats and numbers of GPUs that its page offers, the scenario's first.

    precisions: as files name them, whatever the job's accelerators and ZeRO's stage make of them (`recipe`).
    """

    scenario: Scenario
    models: tuple[TransformerModel, ...]
    precisions: tuple[PrecisionRecipe, ...]
    gpus: tuple[int, ...]

    @cached_property
    def start(self) -> dict[str, Setting]:
        """The scenario's settings, in the order in which the page has its controls."""
        layout, training = self.scenario.layout.as_configured, self.scenario.training
        experts = {"ep": layout.ep, "etp": layout.effective_etp, "dispatcher": layout.dispatcher.value}
        return {
            "model": 0, "gpus": self.scenario.cluster.gpu_count, "tp": layout.tp, "pp": layout.pp, "cp": layout.cp,
            **(experts if self.mixture else {}), "zero": layout.data.zero_stage, "recompute": self._recompute,
            "microbatch": training.microbatch,
            "sequence": training.sequence, "batch": training.global_batch, "schedule": self._schedule.name,
            "chunks": max(2, chunks_of(self._schedule)), "precision": 0, "split": layout.sequence_parallel,
        }  # fmt: skip

    @cached_property
    def choices(self) -> dict[str, tuple[Setting, ...]]:
        """Values of every setting."""
        batches = (self.scenario.training.global_batch * factor for factor in (2, 4))
        of_experts = OF_EXPERTS if self.mixture else {}
        offered: dict[str, Iterable[Setting]] = {
            **{key: sorted({*values, self.start[key]}) for key, values in {**OFFERED, **of_experts}.items()},
            "dispatcher": (token_dispatcher.value for token_dispatcher in TokenDispatcher),
            "model": range(len(self.models)), "precision": range(len(self.precisions)), "gpus": self.gpus,
            "zero": range(4), "split": (False, True), "schedule": SCHEDULES,
            "recompute": dict.fromkeys(
                (*RECOMPUTES, *self._modules, *(f"layers:{layers}" for layers in (1, 2, 4)), self._recompute)
            ),
            "batch": sorted({*OFFERED["batch"], self.scenario.training.global_batch, *batches}),
        }  # fmt: skip
        return {key: tuple(offered[key]) for key in self.start}

    @property
    def _schedule(self) -> Schedule:
        """The scenario's schedule, or the plain one where it is not offered."""
        own = self.scenario.schedule
        return own if isinstance(own, PLAYED) else build_schedule(SCHEDULES[0])

    @property
    def _recompute(self) -> str:
        own = self.scenario.training.recompute
        match own:
            case FullRecompute(int() as layers):
                return f"layers:{layers}"
            case SelectiveRecompute(modules) if own != SelectiveRecompute():
                return _named(modules)
        return next(name for name, way in RECOMPUTES.items() if way == own)

    @property
    def _modules(self) -> Iterable[str]:
        """Recomputation by modules that mixtures are often trained with."""
        if self.mixture:
            latent = any(
                isinstance(distinct_attention, LatentAttention)
                for distinct_attention in self.models[0].distinct_attentions
            )
            cheap = {
                RecomputeModule.LAYERNORM,
                RecomputeModule.MOE_ACTIVATION,
                *([RecomputeModule.MLA_UP_PROJECTION] if latent else []),
            }
            yield from (_named({RecomputeModule.MOE_ACTIVATION}), _named(cheap), _named({RecomputeModule.MOE}))

    @cached_property
    def selective(self) -> tuple[str, ...]:
        """Names of the ways to recompute parts of layers."""
        ways = {str(name): recompute(str(name)) for name in self.choices["recompute"]}
        return tuple(name for name, way in ways.items() if isinstance(way, SelectiveRecompute | SelectiveOpRecompute))

    @property
    def mixture(self) -> bool:
        """Whether the page is of a mixture of experts, which it offers alone."""
        return any(distinct_moe.single_dense_mlp is None for distinct_moe in self.models[0].distinct_moes)

    @property
    def kinds(self) -> int:
        """Kinds of layers that models have at most."""
        return max(len(model.distinct_specs) for model in self.models)

    def kind(self, model: int, place: int) -> LayerSpec:
        """A model's kind of layer; its first where it has fewer."""
        specs = self.models[model].distinct_specs
        return specs[place] if place < len(specs) else specs[0]

    @cached_property
    def contents(self) -> tuple[LayerStack, ...]:
        """Layers of all stages that can be, where they are of several kinds; else none: their number tells them."""
        if self.kinds == 1:
            return ()
        every = product(self.pipelines, self.values["chunks"])
        plans = [self.plan(model=0, pp=pp, chunks=chunks) for pp, chunks in every if self.lays(0, pp, chunks)]
        return tuple(dict.fromkeys(stage.stack for plan in plans for stage in plan.stages))

    def lays(self, model: int, pp: int, chunks: int) -> bool:
        """Whether a model's layers can lie on so many stages."""
        return pp in self.pipelines and not [*check_layers(self.at(model=model, pp=pp, chunks=chunks))]

    @cached_property
    def values(self) -> dict[str, tuple[Any, ...]]:
        """All values of settings, and of numbers that follow from them."""
        found: dict[str, tuple[Any, ...]] = {**self.choices, "chunks": (1, *self.choices["chunks"])}
        for name, *keys in self.counts:
            over, under = ({prod(item) for item in product(*(found[key] for key in side))} for side in keys)
            found[name] = tuple(sorted({one // other for one in over for other in under if one % other == 0}))
        if self.mixture:
            found["replicas"] = tuple(sorted({*found["replicas"], *found["edp"]}))
        return {**found, "pipelined": (False, True), "several": (False, True), "experts_shared": (False, True)}

    @property
    def counts(self) -> tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]:
        """Whole numbers that follow from settings."""
        return (*COUNTS, *COUNTS_OF_EXPERTS) if self.mixture else COUNTS

    def table(self, ask: Callable[..., Any], *keys: str) -> Table:
        """Ask for every combination of some settings."""
        return Table.of(ask, **{key: self.values[key] for key in keys})

    def flags(self) -> dict[str, Table]:
        """What data parallelism asks of the pipeline: whether there is one, and more than one microbatch."""
        return {
            "pipelined": self.table(lambda pp: pp > 1, "pp"),
            "several": self.table(lambda microbatches: microbatches > 1, "microbatches"),
            **({"experts_shared": self.table(lambda edp: edp > 1, "edp")} if self.mixture else {}),
        }

    @cached_property
    def pipelines(self) -> set[int]:
        """Pipeline ranks that divide some number of GPUs."""
        return {pp for pp in self.values["pp"] if any(gpus % pp == 0 for gpus in self.gpus)}

    @cached_property
    def cuts(self) -> set[tuple[int, int]]:
        """Models, and the tensor-parallel degrees that can cut them."""
        every = product(self.values["model"], self.values["tp"])
        there = {(model, tp): self.at(model=model, tp=tp) for model, tp in every}
        return {key for key, scenario in there.items() if not [*check_heads(scenario), *check_widths(scenario)]}

    def at(self, **settings: Any) -> Scenario:
        """The scenario with some settings, and the plainest of the others; it need not be legal."""
        known = _followed(settings)
        model, order = known["model"], self.schedule(settings)
        layout = replace(
            self.scenario.layout.as_configured,
            **{axis: known[axis] for axis in DENSE_AXIS_NAMES},
            ep=known["ep"],
            etp=known["etp"],
            dispatcher=TokenDispatcher(known.get("dispatcher", self.scenario.layout.dispatcher)),
            sequence_parallel=known["split"],
            data=self.strategy(known["zero"]),
            layers_per_stage=self._layers_per_stage(model, known["pp"] * chunks_of(order)),
        )
        kind = self.models[model or 0] if self.mixture or model is not None else _PLAIN
        training = replace(
            self.scenario.training,
            lora=self._adapters(kind),
            recipe=self.recipe(known["precision"], known["zero"]),
            recompute=recompute(known["recompute"]),
            microbatch=known["microbatch"],
            sequence=known.get("sequence", self.scenario.training.sequence),
            global_batch=known["batch"],
        )
        return replace(
            self.scenario, model=kind, layout=layout, training=training,
            cluster=replace(self.scenario.cluster, gpu_count=known.get("gpus", layout.world_size)), schedule=order, steps=1,
        )  # fmt: skip

    def plan(self, **settings: Any) -> Plan:
        """Who does which part in the scenario with some settings.

        Where its hybrid sharding does not fit the replicas, weights are cut over all of them.
        """
        there = self.at(**settings)
        layout = there.layout
        if [*check_shard_size(there), *check_secondary_shards(there)]:
            layout = replace(layout, data=with_shard_size(layout.data, None))
        return Plan(there.model, there.training, layout, there.schedule.placement)

    def schedule(self, settings: Mapping[str, Any]) -> Schedule:
        """The schedule of some settings; chunks count where it has any choice of them."""
        chunks = settings.get("chunks", 1)
        name = settings.get("schedule", "interleaved" if chunks > 1 else "1f1b")
        return build_schedule(name, max(2, chunks)) if name in CHUNKED_SCHEDULES else build_schedule(name)

    def strategy(self, stage: int) -> DataParallelStrategy:
        """The scenario's strategy at its own ZeRO stage, the usual one at others (as `layout.data=zero2` means it)."""
        own = self.scenario.layout.data
        if own.zero_stage == stage and not isinstance(own, NaiveDataParallel):
            return own
        return STRATEGY_BY_ZERO_STAGE[stage]()

    def recipe(self, precision: int, zero: int) -> PrecisionRecipe:
        """Number formats as they are run at a ZeRO stage."""
        return effective_recipe(self.precisions[precision], self.scenario.cluster.accelerator, self.strategy(zero))

    def alike(self, of: Callable[[PrecisionRecipe], Hashable]) -> list[int]:
        """For each recipe the first one of which the same holds."""
        found = [of(recipe) for recipe in self.precisions]
        return [found.index(item) for item in found]

    @cached_property
    def _asked(self) -> LoraConfig | None:
        return ScenarioConfig.model_validate(self.scenario.to_mapping()).training.lora

    def _adapters(self, model: TransformerModel) -> Lora | None:
        """The scenario's adapters, beside those matrices of a model that its file means."""
        return None if self._asked is None else self._asked.lora_settings(all_projections(model))

    def _layers_per_stage(self, model: int | None, stages: int) -> LayerPartition:
        """The scenario's own, where they are those of so many stages of its model; a rule holds for any."""
        own = self.scenario.layout.layers_per_stage
        counts = own.layer_counts if isinstance(own, PipelineLayoutString) else own
        if model != 0 or (isinstance(counts, tuple) and len(counts) != stages):
            return None
        return own


def chunks_of(order: Schedule) -> int:
    """Model chunks per pipeline rank, of a schedule that has as many on any number of ranks."""
    return order.placement(1).max_chunks


def _followed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Plain settings with some that are given, or that follow from numbers that are."""
    plain = {"model": None, "tp": 1, "cp": 1, "precision": 0, "zero": 0, "split": False, "recompute": "none"}
    plain |= {"ep": 1, "etp": None}
    known = {**plain, "microbatch": 1, "pp": settings.get("stages", 1), **settings}
    if "room" in known:
        known["gpus"] = known["room"]
    if "folded" in known:
        known["dp"] = known["folded"]
    known.setdefault("batch", known.get("microbatches", 1))
    replica = known["tp"] * known["cp"] * known["pp"]
    least = known["batch"] // known.get("microbatches", known["batch"])
    known.setdefault("dp", max(1, known["gpus"] // replica) if "gpus" in known else least)
    return known


def recompute(name: str) -> Recompute:
    """What is recomputed, by a name of the page's.

    >>> recompute("layers:2")
    FullRecompute(layers=2)
    """
    if name.startswith(_MODULES):
        return SelectiveRecompute(frozenset(map(RecomputeModule, name.removeprefix(_MODULES).split(","))))
    return RECOMPUTES[name] if name in RECOMPUTES else FullRecompute(int(name.removeprefix("layers:")))


def _named(modules: Collection[RecomputeModule]) -> str:
    """The page's name of some modules that are recomputed."""
    return _MODULES + ",".join(module.value for module in RecomputeModule if module in modules)
