"""What would make a scenario fit in memory? Changes that lower the peak, ordered by their cost in time.

Each kind of change is a sequence of increasing effect; the first one that is valid and fits is suggested.
Candidates keep the number of GPUs and the batch. Where no single change suffices, those combined with full
recomputation are tried.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError
from clustersim.common.units import Bytes, format_bytes
from clustersim.model.offload import ActivationOffload, Offload, OptimizerOffload
from clustersim.model.recompute_modules import RecomputeModule
from clustersim.model.training import (
    FullRecompute,
    NoRecompute,
    Recompute,
    SelectiveOpRecompute,
    SelectiveRecompute,
    Training,
)
from clustersim.parallel.data_parallel_strategy import STRATEGY_BY_ZERO_STAGE
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan

MAX_SUGGESTIONS = 4
_MOE_MLA_MODULES = frozenset({RecomputeModule.MOE_ACTIVATION, RecomputeModule.MLA_UP_PROJECTION})
_MODULE_SETS = (
    frozenset({RecomputeModule.MOE_ACTIVATION}),
    frozenset({RecomputeModule.LAYERNORM, RecomputeModule.MLA_UP_PROJECTION}),
    frozenset({RecomputeModule.SHARED_EXPERTS, RecomputeModule.MLP}),
    frozenset({RecomputeModule.MOE}),
)
PeakFunction = Callable[[Plan], Bytes]


@dataclass(frozen=True, slots=True)
class PlanChange:
    """A changed plan that may fit, and a label of the change."""

    label: str
    plan: Plan


def oom_suggestions(plan: Plan, capacity: Bytes, peak_of: PeakFunction, *, domain_size: int) -> list[str]:
    """Sentences that name a change and the peak after it.

    peak_of: raises InputError for an invalid plan; domain_size: GPUs of one NVLink domain, the limit of
    proposed tensor parallelism.
    """
    fully_recomputed = _with_training(plan, recompute=FullRecompute())
    single_changes = (
        _recompute_changes(plan),
        _microbatch_change(plan),
        _quantization_change(plan),
        *_parallelism_changes(plan, domain_size),
    )
    paired_changes = (_with_full_recompute(ladder) for ladder in _parallelism_changes(fully_recomputed, domain_size))
    for ladders in (single_changes, paired_changes):
        sentences = (
            sentence for ladder in ladders if (sentence := _first_fitting(ladder, capacity, peak_of)) is not None
        )
        suggestions = list(islice(sentences, MAX_SUGGESTIONS))
        if suggestions:
            return suggestions
    return ["no single change of recomputation, sharding, degrees or offload fits; use more GPUs or a smaller model"]


def _first_fitting(ladder: Iterator[PlanChange], capacity: Bytes, peak_of: PeakFunction) -> str | None:
    """Sentence for the first candidate that is valid and fits."""
    for candidate in ladder:
        try:
            peak = peak_of(candidate.plan)
        except InputError:
            continue
        if peak <= capacity:
            return f"{candidate.label} would fit ({format_bytes(peak)} of {format_bytes(capacity)})"
    return None


def _with_full_recompute(ladder: Iterator[PlanChange]) -> Iterator[PlanChange]:
    return (replace(candidate, label=f"training.recompute=full with {candidate.label}") for candidate in ladder)


def _recompute_changes(plan: Plan) -> Iterator[PlanChange]:
    """Increasing recomputation."""
    current = plan.training.recompute
    layers = max(stage.layer_count for stage in plan.stages)
    recomputed = max(map(plan.recomputed_layer_count, plan.stages))
    if isinstance(current, NoRecompute):
        yield PlanChange("training.recompute=selective", _with_training(plan, recompute=SelectiveRecompute()))
    yield from _module_changes(plan)
    selective = isinstance(current, SelectiveRecompute | SelectiveOpRecompute)
    mode = "training.recompute=full " if selective else ""
    for count in range(recomputed + 1, layers):
        yield PlanChange(
            f"{mode}training.recompute.layers={count}", _with_training(plan, recompute=FullRecompute(count))
        )
    if recomputed < layers:
        yield PlanChange("training.recompute=full", _with_training(plan, recompute=FullRecompute()))


def _module_changes(plan: Plan) -> Iterator[PlanChange]:
    """More recomputed modules of layers with MoE or MLA, in addition to the current ones.

    First what is cheap to recompute, then entire MoE layers, whose tokens are dispatched again.
    """
    present = {
        operator.module
        for layer in plan.layer_by_spec.values()
        for layer_operator in layer.operators
        for operator in layer_operator.memberships
    }
    match plan.training.recompute:
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
            yield PlanChange(
                f"training.recompute.modules=[{names}]", _with_training(plan, recompute=SelectiveRecompute(enlarged))
            )
            current = enlarged


def _microbatch_change(plan: Plan) -> Iterator[PlanChange]:
    """A smaller microbatch."""
    if plan.training.microbatch > 1:
        yield PlanChange("training.microbatch=1", _with_training(plan, microbatch=1))


def _quantization_change(plan: Plan) -> Iterator[PlanChange]:
    """Frozen weights in 4 bits."""
    lora = plan.training.lora
    if lora is not None and lora.base is None:
        training = replace(plan.training, lora=replace(lora, base=DType.NF4))
        yield PlanChange("training.lora.base=nf4", replace(plan, training=training))


def _parallelism_changes(plan: Plan, domain_size: int) -> tuple[Iterator[PlanChange], ...]:
    return (
        _sequence_parallel_change(plan),
        _zero_stage_changes(plan),
        _tensor_parallel_changes(plan, domain_size),
        _pipeline_parallel_changes(plan),
        _offload_changes(plan),
    )


def _sequence_parallel_change(plan: Plan) -> Iterator[PlanChange]:
    """Sequence parallelism of norms and residuals."""
    if plan.layout.tp > 1 and not plan.layout.sequence_parallel:
        yield PlanChange(
            "layout.sequence_parallel=true", _with_layout(plan, replace(plan.layout, sequence_parallel=True))
        )


def _zero_stage_changes(plan: Plan) -> Iterator[PlanChange]:
    """Higher ZeRO stages, as far as frameworks support them: with a pipeline, optimizer states only.

    With a pipeline, ZeRO-2 and FSDP hold gradients and parameters unsharded during the step
    (`parallel.data_parallel_strategy`).
    """
    max_stage = 1 if plan.layout.is_pipelined else 3
    if any(group.dp_size > 1 for group in plan.parameter_groups):
        for stage in range(plan.layout.data.zero_stage + 1, max_stage + 1):
            yield PlanChange(
                f"layout.data=zero{stage}",
                _with_layout(plan, replace(plan.layout, data=STRATEGY_BY_ZERO_STAGE[stage]())),
            )


def _tensor_parallel_changes(plan: Plan, domain_size: int) -> Iterator[PlanChange]:
    """Tensor instead of data parallelism, inside the NVLink domain."""
    layout = plan.layout
    for factor in (2, 4, 8):
        if layout.as_configured.dp % factor == 0 and layout.tp * factor <= domain_size:
            wider = replace(layout, tp=layout.tp * factor, dp=layout.dp // factor)
            yield PlanChange(_degrees_label(wider), _with_layout(plan, wider))


def _pipeline_parallel_changes(plan: Plan) -> Iterator[PlanChange]:
    """Pipeline instead of data parallelism."""
    layout = plan.layout
    even_layers = " layout.layers_per_stage=even" if layout.layers_per_stage else ""
    for factor in (2, 4, 8):
        if layout.as_configured.dp % factor == 0:
            deeper = replace(layout, pp=layout.pp * factor, dp=layout.dp // factor, layers_per_stage=None)
            yield PlanChange(_degrees_label(deeper) + even_layers, _with_layout(plan, deeper))


def _offload_changes(plan: Plan) -> Iterator[PlanChange]:
    """Optimizer or activation offload."""
    offload = plan.training.offload
    if offload.states is None:
        enlarged = replace(offload, states=OptimizerOffload())
        yield PlanChange("training.offload.optimizer=true", _with_training(plan, offload=enlarged))
    if offload.activations is None:
        enlarged = replace(offload, activations=ActivationOffload())
        yield PlanChange("training.offload.activations=all", _with_training(plan, offload=enlarged))


def _degrees_label(layout: Layout) -> str:
    configured = layout.as_configured
    return f"layout.tp={configured.tp} layout.pp={configured.pp} layout.dp={configured.dp}"


def _with_training(plan: Plan, **changes: Recompute | Offload | int) -> Plan:
    training: Training = replace(plan.training, **changes)  # type: ignore[arg-type]
    return replace(plan, training=training)


def _with_layout(plan: Plan, layout: Layout) -> Plan:
    return replace(plan, layout=layout)
