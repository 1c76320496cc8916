"""Changes that lower the peak of memory, those that cost the least time first.

Each change has alternatives of increasing effect, with the overrides that make them. They keep the number of GPUs
and the batch.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from clustersim.common.dtypes import DType
from clustersim.model.offload import ActivationOffload, OptimizerOffload
from clustersim.model.recompute_modules import RecomputeModule
from clustersim.model.training import FullRecompute, NoRecompute, SelectiveRecompute, TiledMlp
from clustersim.parallel.mesh import CONTEXT, PIPELINE, TENSOR, Axis
from clustersim.parallel.plan import Plan
from clustersim.scenario.changes.layout import (
    named_strategy,
    with_cp_factor,
    with_layout,
    with_pp_factor,
    with_tp_factor,
)
from clustersim.scenario.changes.scenario_change import (
    ApplyChange,
    Baseline,
    ChangedScenario,
    ChangeSubject,
    ChangeUse,
    ScenarioChange,
)
from clustersim.scenario.changes.training import with_microbatch_size, with_offload, with_recompute, with_training
from clustersim.scenario.scenario import Scenario
from clustersim.scenario.validation_rules.tiled_mlp import check_tiled_mlp

_MOE_MLA_MODULES: Final = frozenset({RecomputeModule.MOE_ACTIVATION, RecomputeModule.MLA_UP_PROJECTION})
_MODULE_SETS: Final = (
    frozenset({RecomputeModule.MOE_ACTIVATION}),
    frozenset({RecomputeModule.LAYERNORM, RecomputeModule.MLA_UP_PROJECTION}),
    frozenset({RecomputeModule.SHARED_EXPERTS, RecomputeModule.MLP}),
    frozenset({RecomputeModule.MOE}),
)
_FACTORS: Final = (2, 4, 8)
_MIN_TILES: Final = 8  # of a sequence whose MLPs may be worth tiles
_SHARDED_STRATEGIES: Final = ("zero1", "zero2", "fsdp", "zero3")


def _more_recompute(baseline: Baseline) -> Iterator[ChangedScenario]:
    """Increasing recomputation: cores of attention, modules, some layers, all of them."""
    scenario, current = baseline.scenario, baseline.scenario.training.recompute
    plan = _scenario_plan(scenario)
    layers = max(stage.layer_count for stage in plan.stages)
    recomputed = max(map(plan.recomputed_layer_count, plan.stages))
    if current == NoRecompute():
        yield _changed(with_recompute(scenario, SelectiveRecompute()), "training.recompute=selective")
    yield from _more_modules(scenario, plan)
    mode = ("training.recompute=full",) if current.is_selective else ()
    for count in range(recomputed + 1, layers):
        yield _changed(with_recompute(scenario, FullRecompute(count)), *mode, f"training.recompute.layers={count}")
    if recomputed < layers:
        yield _changed(with_recompute(scenario, FullRecompute()), "training.recompute=full")


def _changed(scenario: Scenario, *overrides: str) -> ChangedScenario:
    return ChangedScenario(scenario, overrides=overrides)


def _scenario_plan(scenario: Scenario) -> Plan:
    return Plan(scenario.model, scenario.training, scenario.effective_layout, scenario.schedule.placement)


def _more_modules(scenario: Scenario, plan: Plan) -> Iterator[ChangedScenario]:
    """More recomputed modules of layers with MoE or MLA, in addition to the current ones.

    First what is cheap to recompute, then entire MoE layers, whose tokens are dispatched again.
    """
    present = {
        membership.module
        for layer in plan.layer_by_spec.values()
        for operator in layer.operators
        for membership in operator.memberships
    }
    match scenario.training.recompute:
        case SelectiveRecompute(modules):
            current = modules
        case NoRecompute():
            current = frozenset[RecomputeModule]()
        case _:
            return
    for module_set in _MODULE_SETS if present & _MOE_MLA_MODULES else ():
        enlarged = current | (module_set & present)
        if enlarged != current:
            names = ",".join(module.value for module in RecomputeModule if module in enlarged)
            changed = with_recompute(scenario, SelectiveRecompute(enlarged))
            yield _changed(changed, f"training.recompute.modules=[{names}]")
            current = enlarged


def _smallest_microbatch(baseline: Baseline) -> Iterator[ChangedScenario]:
    if baseline.scenario.training.microbatch > 1:
        yield _changed(with_microbatch_size(baseline.scenario, 1), "training.microbatch=1")


def _tiled_mlps(baseline: Baseline) -> Iterator[ChangedScenario]:
    """Dense MLPs on tiles of long sequences."""
    scenario, tiling = baseline.scenario, TiledMlp()
    tokens = scenario.training.sequence // scenario.layout.cp
    if scenario.training.tiled_mlp is None and tiling.tile_count(tokens, scenario.model.hidden) >= _MIN_TILES:
        changed = with_training(scenario, tiled_mlp=tiling)
        if not [*check_tiled_mlp(changed)]:
            yield _changed(changed, "training.tiled_mlp=true")


def _quantized_weights(baseline: Baseline) -> Iterator[ChangedScenario]:
    """Frozen weights in 4 bits."""
    lora = baseline.scenario.training.lora
    if lora is not None and lora.base is None:
        changed = with_training(baseline.scenario, lora=replace(lora, base=DType.NF4))
        yield _changed(changed, "training.lora.base=nf4")


def _sequence_parallelism(baseline: Baseline) -> Iterator[ChangedScenario]:
    """Sequence parallelism of norms and residuals."""
    layout = baseline.scenario.layout
    if layout.tp > 1 and not layout.sequence_parallel:
        yield _changed(with_layout(baseline.scenario, sequence_parallel=True), "layout.sequence_parallel=true")


def _higher_zero_stages(baseline: Baseline) -> Iterator[ChangedScenario]:
    """Higher ZeRO stages that the framework supports."""
    scenario, layout = baseline.scenario, baseline.scenario.layout
    supported = scenario.framework.supported_layouts.strategies(is_pipelined=layout.is_pipelined)
    if not any(group.dp_size > 1 for group in _scenario_plan(scenario).parameter_groups):
        return
    for name in (name for name in _SHARDED_STRATEGIES if name in supported):
        strategy = named_strategy(scenario, name)
        if strategy.zero_stage > layout.data.zero_stage:
            yield _changed(with_layout(scenario, data=strategy), f"layout.data={name}")


def _more_tensor_parallelism(baseline: Baseline) -> Iterator[ChangedScenario]:
    """Tensor instead of data parallelism, inside the NVLink domain."""
    scenario, layout = baseline.scenario, baseline.scenario.layout
    for factor in _dp_divisors(scenario, TENSOR):
        if layout.tp * factor <= _domain_size(scenario):
            wider = with_tp_factor(scenario, factor)
            yield _changed(wider, *_degree_overrides(wider, TENSOR))


def _dp_divisors(scenario: Scenario, axis: Axis) -> Iterator[int]:
    """Factors by which an axis may grow at the cost of data parallelism, if the framework divides along it."""
    if scenario.supports_axis(axis.name):
        yield from (factor for factor in _FACTORS if scenario.layout.as_configured.dp % factor == 0)


def _domain_size(scenario: Scenario) -> int:
    """GPUs of the first NVLink domain, the limit of proposed tensor parallelism."""
    domains = scenario.cluster.fabric.domain_ids(np.arange(scenario.cluster.gpu_count))
    return int(np.count_nonzero(domains == domains[0]))


def _more_pipeline_parallelism(baseline: Baseline) -> Iterator[ChangedScenario]:
    """Pipeline instead of data parallelism."""
    layout = baseline.scenario.layout
    even_layers = ("layout.layers_per_stage=even",) if layout.layers_per_stage else ()
    for factor in _dp_divisors(baseline.scenario, PIPELINE):
        deeper = with_pp_factor(baseline.scenario, factor)
        yield _changed(deeper, *_degree_overrides(deeper, PIPELINE), *even_layers)


def _more_context_parallelism(baseline: Baseline) -> Iterator[ChangedScenario]:
    """Context instead of data parallelism."""
    for factor in _dp_divisors(baseline.scenario, CONTEXT):
        wider = with_cp_factor(baseline.scenario, factor)
        yield _changed(wider, *_degree_overrides(wider, CONTEXT))


def _degree_overrides(scenario: Scenario, axis: Axis) -> tuple[str, ...]:
    """The degree of an axis, and of the data parallelism that it is at the cost of."""
    configured = scenario.layout.as_configured
    return f"layout.{axis.name}={configured.degrees[axis.name]}", f"layout.dp={configured.dp}"


def _more_offload(baseline: Baseline) -> Iterator[ChangedScenario]:
    """Optimizer or activation offload."""
    scenario, offload = baseline.scenario, baseline.scenario.training.offload
    if offload.states is None:
        changed = with_offload(scenario, replace(offload, states=OptimizerOffload()))
        yield _changed(changed, "training.offload.optimizer=true")
    if offload.activations is None:
        changed = with_offload(scenario, replace(offload, activations=ActivationOffload()))
        yield _changed(changed, "training.offload.activations=all")


def _ladder(name: str, subject: ChangeSubject, apply: ApplyChange) -> ScenarioChange:
    """A change whose overrides say all that there is to say."""
    return ScenarioChange(name, "", subject, ChangeUse.MEMORY, apply, requires_fit=True)


TRAINING_LADDERS: Final = (
    _ladder("more_recompute", ChangeSubject.RECOMPUTE, _more_recompute),
    _ladder("tiled_mlps", ChangeSubject.RECOMPUTE, _tiled_mlps),
    _ladder("smallest_microbatch", ChangeSubject.BATCH, _smallest_microbatch),
    _ladder("quantized_weights", ChangeSubject.PRECISION, _quantized_weights),
)

LAYOUT_LADDERS: Final = (
    _ladder("sequence_parallelism", ChangeSubject.LAYOUT, _sequence_parallelism),
    _ladder("higher_zero_stage", ChangeSubject.LAYOUT, _higher_zero_stages),
    _ladder("more_tensor_parallelism", ChangeSubject.LAYOUT, _more_tensor_parallelism),
    _ladder("more_pipeline_parallelism", ChangeSubject.LAYOUT, _more_pipeline_parallelism),
    _ladder("more_context_parallelism", ChangeSubject.LAYOUT, _more_context_parallelism),
    _ladder("more_offload", ChangeSubject.OFFLOAD, _more_offload),
)
