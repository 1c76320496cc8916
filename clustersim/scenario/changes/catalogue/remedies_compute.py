"""Remedies of compute: launches, kernels, formats, recomputation, microbatches, the host."""

from collections.abc import Callable, Iterator
from typing import Final

from clustersim.common.dtypes import DType
from clustersim.cost.record_kinds import LaunchMode
from clustersim.model.framework import GraphCapture, MeasuredHostUse
from clustersim.model.offload import NO_OFFLOAD
from clustersim.model.training import AttentionBackend, NoRecompute
from clustersim.parallel.layer_partition import partition_layers
from clustersim.parallel.mesh import EXPERT, HOST_AXIS
from clustersim.program.task import TokenDispatcher
from clustersim.scenario.changes.catalogue.remedy import Alternative, explaining, remedy, setting
from clustersim.scenario.changes.expert_parallel import fused_dispatcher
from clustersim.scenario.changes.precision import default_recipe_name, supports_matmuls
from clustersim.scenario.changes.scenario_change import (
    Baseline,
    ChangeSubject,
    ScenarioChange,
)
from clustersim.scenario.changes.step_losses import EXPOSED_LOSSES, StepLoss
from clustersim.scenario.scenario import Scenario

_GRAPHS: Final = "framework.cuda_graphs"
_GRAPH_FRAMEWORK: Final = "megatron"
"""A framework that captures CUDA graphs, proposed where the scenario's own captures none."""
_KERNEL_LOSSES: Final = frozenset({StepLoss.MATMULS, StepLoss.MEMORY_BOUND, StepLoss.RECOMPUTE})
_MAX_RECOMPUTE_ALTERNATIVES: Final = 8


def _has_dropless_experts(scenario: Scenario) -> bool:
    """Whether the number of tokens of an expert is not known before they are routed."""
    return any(moe.capacity_factor is None for moe in scenario.model.distinct_routed_moes)


def _can_capture_all(scenario: Scenario) -> bool:
    """Whether passes could be captured with their experts: with sizes that are known, as Hybrid-EP's buffers have.

    Recipes of Megatron Bridge capture whole iterations with it (topologies/model_recipes/megatron-bridge.yaml).
    """
    has_static_sizes = scenario.layout.dispatcher is TokenDispatcher.HYBRIDEP or not _has_dropless_experts(scenario)
    return scenario.framework.graph_capture is not GraphCapture.ALL and has_static_sizes


def _could_capture_all(scenario: Scenario) -> bool:
    """Whether Hybrid-EP in place of another dispatcher would allow it."""
    captures_all = scenario.framework.graph_capture is GraphCapture.ALL or _can_capture_all(scenario)
    has_hybridep = scenario.layout.ep > 1 and fused_dispatcher(scenario) is TokenDispatcher.HYBRIDEP
    return has_hybridep and not captures_all


def _cuda_graphs(scope: GraphCapture, *overrides: str) -> Callable[[Baseline], Iterator[Alternative]]:
    """Passes in CUDA graphs. overrides: what they need besides."""

    def find_alternatives(baseline: Baseline) -> Iterator[Alternative]:
        framework = baseline.scenario.framework
        capture = f"{_GRAPHS}={'true' if scope is GraphCapture.ALL else scope.value}"
        if framework.graph_launch_seconds is not None:
            yield Alternative((*overrides, capture))
        else:
            other = (f"framework.name={_GRAPH_FRAMEWORK}", *overrides, capture)
            yield Alternative(other, f": with {_GRAPH_FRAMEWORK}, as {framework.name} captures none here")

    return find_alternatives


def _numa_binding(baseline: Baseline) -> Iterator[Alternative]:
    least, most = baseline.scenario.cluster.accelerator.unbound_launch_ratios
    yield Alternative(
        ("framework.numa_binding=true",), f": launches take {most:g} times as long without ({least:g} at least)"
    )


def _launches_unbound(scenario: Scenario) -> bool:
    """Whether launches are counted as those of ranks that run on any core."""
    return bool(scenario.model.distinct_routed_moes) and not scenario.framework.numa_bound


def _can_compile(scenario: Scenario) -> bool:
    """Whether layers could be compiled, and something would change: their kernels, or launches that were measured."""
    framework, record, fused = scenario.framework, scenario.cost.record, scenario.training.fused
    if framework.compiled or framework.measured_host_use is not MeasuredHostUse.TORCH:
        return False
    is_measured = record is not None and any(sample.mode is LaunchMode.COMPILED for sample in record.host_launches)
    is_unfused = fused == framework.kernels.fused and framework.kernels.compiled().fused > fused
    return is_measured or is_unfused


def _recomputes(scenario: Scenario) -> bool:
    return scenario.training.recompute != NoRecompute()


def _less_recompute(baseline: Baseline) -> Iterator[Alternative]:
    """Recompute nothing, only attention's core, or fewer layers: as little as fits."""
    recompute = baseline.scenario.training.recompute
    yield Alternative(("training.recompute=none",), ": nothing")
    if recompute.is_selective:
        return
    yield Alternative(("training.recompute=selective",), ": attention only")
    most = recompute.layers or _max_layers_per_stage(baseline.scenario)
    for layers in _some_counts(1, most):
        yield Alternative((f"training.recompute.layers={layers}",), f": {_format_layers(layers)}, not {most}")


def _max_layers_per_stage(scenario: Scenario) -> int:
    partition, layers = scenario.layout.layers_per_stage, scenario.model.layer_count
    return max(partition_layers(partition, layers, scenario.placement))


def _half_microbatch(baseline: Baseline) -> Iterator[Alternative]:
    half = baseline.scenario.training.microbatch // 2
    yield Alternative((f"training.microbatch={half}",), f": {_format_sequences(half)}")


def _twice_microbatch(baseline: Baseline) -> Iterator[Alternative]:
    """Twice the sequences, with as little additional recomputation as makes them fit."""
    scenario, recompute = baseline.scenario, baseline.scenario.training.recompute
    twice = 2 * scenario.training.microbatch
    microbatch, detail = f"training.microbatch={twice}", f": {_format_sequences(twice)}"
    yield Alternative((microbatch,), detail)
    if not _recomputes(scenario):
        yield Alternative((microbatch, "training.recompute=selective"), f"{detail}, attention recomputed")
    if not recompute.is_selective:
        fewest, most = 1 + (recompute.layers or 0), _max_layers_per_stage(scenario)
        for layers in _some_counts(fewest, most):
            recomputed = f"{detail}, {_format_layers(layers)} recomputed"
            yield Alternative((microbatch, f"training.recompute.layers={layers}"), recomputed)
    yield Alternative((microbatch, "training.recompute=full"), f"{detail}, all layers recomputed")


def _some_counts(fewest: int, end: int) -> range:
    """At most `_MAX_RECOMPUTE_ALTERNATIVES` numbers of layers, evenly spaced, from the fewest to below the end."""
    return range(fewest, end, max(1, -(-(end - fewest) // _MAX_RECOMPUTE_ALTERNATIVES)))


def _format_sequences(count: int) -> str:
    return f"{count} sequence{'s' * (count > 1)} (same batch)"


def _format_layers(count: int) -> str:
    return f"{count} layer{'s' * (count > 1)} of each stage"


def _matmuls_in(dtype: DType) -> Callable[[Baseline], Iterator[Alternative]]:
    """Matmuls in a format, by its default recipe."""

    def find_alternatives(baseline: Baseline) -> Iterator[Alternative]:
        name = default_recipe_name(baseline.scenario, dtype)
        yield Alternative((f"training.precision.compute={name}",), f" ({name})")

    return find_alternatives


def _precision(dtype: DType) -> ScenarioChange:
    def is_relevant(scenario: Scenario) -> bool:
        recipe = scenario.training.recipe
        is_in_use = recipe.matmul_formats.forward is dtype or recipe.name == default_recipe_name(scenario, dtype)
        return supports_matmuls(dtype)(scenario) and not is_in_use

    return remedy(
        f"products_{dtype.value}",
        f"matmuls in {dtype.value.upper()}",
        ChangeSubject.PRECISION,
        _KERNEL_LOSSES | EXPOSED_LOSSES,
        _matmuls_in(dtype),
        is_relevant=is_relevant,
    )


_LAUNCH: Final = frozenset({StepLoss.LAUNCH})

HOST_REMEDIES: Final = (
    *explaining(
        remedy(
            "cuda_graphs",
            "passes captured in CUDA graphs (their own memory is not counted)",
            ChangeSubject.HOST,
            _LAUNCH,
            _cuda_graphs(GraphCapture.ALL),
            is_relevant=_can_capture_all,
        ),
        remedy(
            "cuda_graphs_outside_experts",
            "passes captured in CUDA graphs, except for experts (their own memory is not counted)",
            ChangeSubject.HOST,
            _LAUNCH,
            _cuda_graphs(GraphCapture.OUTSIDE_EXPERTS),
            is_relevant=lambda scenario: not scenario.framework.uses_cuda_graphs and _has_dropless_experts(scenario),
        ),
        remedy(
            "cuda_graphs_hybridep",
            "passes captured in CUDA graphs, tokens sent by hybridep (the graphs' own memory is not counted)",
            ChangeSubject.HOST,
            _LAUNCH | StepLoss.exposed(EXPERT) | {StepLoss.WAIT, StepLoss.SLOWED},
            _cuda_graphs(GraphCapture.ALL, f"layout.dispatcher={TokenDispatcher.HYBRIDEP.value}"),
            is_relevant=_could_capture_all,
        ),
        remedy(
            "numa_binding",
            "ranks bound to the cores next to their GPU (numactl, bindpcie, torchrun --numa-binding)",
            ChangeSubject.HOST,
            _LAUNCH,
            _numa_binding,
            is_relevant=_launches_unbound,
        ),
        setting(
            "torch_compile",
            "layers compiled (torch.compile)",
            ChangeSubject.FRAMEWORK,
            _LAUNCH | {StepLoss.MEMORY_BOUND},
            ("framework.torch_compile=true",),
            _can_compile,
        ),
    ),
    setting(
        "no_offload",
        "nothing offloaded to the host",
        ChangeSubject.OFFLOAD,
        StepLoss.exposed(HOST_AXIS) | {StepLoss.WAIT, StepLoss.SLOWED},
        ("training.offload=none",),
        lambda scenario: scenario.training.offload != NO_OFFLOAD,
    ),
)

KERNEL_REMEDIES: Final = explaining(
    setting(
        "fused_kernels",
        "norms, activations and optimizer fused",
        ChangeSubject.FRAMEWORK,
        frozenset({StepLoss.MEMORY_BOUND, StepLoss.OPTIMIZER, StepLoss.LAUNCH, StepLoss.RECOMPUTE}),
        ("training.fused=true",),
        lambda scenario: not scenario.training.is_fully_fused,
    ),
    setting(
        "flash_attention",
        "attention by the fastest library (flash)",
        ChangeSubject.FRAMEWORK,
        _KERNEL_LOSSES,
        ("training.attention=flash",),
        lambda scenario: scenario.training.attention is not AttentionBackend.FLASH,
    ),
)

PRECISION_REMEDIES: Final = tuple(map(_precision, (DType.BF16, DType.FP8, DType.MXFP8, DType.NVFP4)))

MEMORY_REMEDIES: Final = (
    *explaining(
        remedy(
            "less_recompute",
            "less recomputed, as memory is left",
            ChangeSubject.RECOMPUTE,
            frozenset({StepLoss.RECOMPUTE, StepLoss.IMBALANCE}),
            _less_recompute,
            is_relevant=_recomputes,
        )
    ),
    remedy(
        "twice_the_microbatch",
        "microbatches of twice the size",
        ChangeSubject.BATCH,
        _KERNEL_LOSSES | EXPOSED_LOSSES | _LAUNCH,
        _twice_microbatch,
    ),
    remedy(
        "half_the_microbatch",
        "microbatches of half the size",
        ChangeSubject.BATCH,
        frozenset({StepLoss.BUBBLE}),
        _half_microbatch,
        is_relevant=lambda scenario: scenario.training.microbatch % 2 == 0,
    ),
)
