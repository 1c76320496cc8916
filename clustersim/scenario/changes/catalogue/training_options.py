"""Changes of the training: batch, sharding, recomputation, number formats, offload, overheads, CUDA graphs."""

from collections.abc import Callable, Iterator
from typing import Final

from clustersim.common.dtypes import DType
from clustersim.model.offload import NO_OFFLOAD
from clustersim.model.training import FullRecompute, NoRecompute, Recompute
from clustersim.scenario.changes.host import with_cuda_graphs
from clustersim.scenario.changes.layout import with_dp_shard_size
from clustersim.scenario.changes.precision import default_recipe_name, supports_matmuls, with_recipe
from clustersim.scenario.changes.scenario_change import (
    ApplyChange,
    Baseline,
    ChangedScenario,
    ChangeSubject,
    ChangeUse,
    InapplicableChangeError,
    ScenarioChange,
    apply_setter,
)
from clustersim.scenario.changes.training import (
    with_global_batch_factor,
    with_microbatch_size,
    with_recompute,
    without_offload,
    without_overheads,
)
from clustersim.scenario.nearest_values import divisors
from clustersim.scenario.scenario import Scenario


def _half_microbatches(baseline: Baseline) -> Iterator[ChangedScenario]:
    sequences = baseline.scenario.training.microbatch
    if sequences % 2:
        raise InapplicableChangeError(f"a microbatch of {sequences} sequence{'s' * (sequences > 1)} has no half")
    yield ChangedScenario(with_microbatch_size(baseline.scenario, sequences // 2))


def _hybrid_sharding(baseline: Baseline) -> Iterator[ChangedScenario]:
    """Shard over few ranks, then more: all-gathers and reduce-scatters span the fewest where the first one fits."""
    scenario, layout = baseline.scenario, baseline.scenario.layout
    ranks = layout.cp * layout.dp
    if not layout.data.shards_parameters or ranks == 1:
        raise InapplicableChangeError("weights are not fully sharded")
    if layout.is_hybrid_sharded:
        raise InapplicableChangeError(f"weights are cut over {layout.data.shard_size:,} of {ranks:,} ranks now")
    for shards in (layout.cp * divisor for divisor in divisors(layout.dp)[:-1]):
        if shards > 1:
            yield ChangedScenario(with_dp_shard_size(scenario, shards), f": over {shards:,} of {ranks:,}")
    raise InapplicableChangeError(f"weights that are cut over fewer than all {ranks:,} ranks do not fit")


def _recompute_policy(policy: Recompute, skip_reason: str) -> ApplyChange:
    def apply(baseline: Baseline) -> Iterator[ChangedScenario]:
        if baseline.scenario.training.recompute == policy:
            raise InapplicableChangeError(skip_reason)
        yield ChangedScenario(with_recompute(baseline.scenario, policy))

    return apply


def _matmuls_in(dtype: DType) -> ApplyChange:
    """Matmuls in a format, by its default recipe."""

    def apply(baseline: Baseline) -> Iterator[ChangedScenario]:
        scenario, recipe = baseline.scenario, baseline.scenario.training.recipe
        name = default_recipe_name(scenario, dtype)
        if recipe.matmul_formats.forward is dtype or recipe.name == name:
            raise InapplicableChangeError(f"they are in {recipe.name} now")
        yield ChangedScenario(with_recipe(scenario, name), f" ({name})")

    return apply


def _precision_change(dtype: DType, is_relevant: Callable[[Scenario], bool]) -> ScenarioChange:
    return ScenarioChange(
        f"products_{dtype.value}",
        f"matmuls in {dtype.value.upper()}",
        ChangeSubject.PRECISION,
        ChangeUse.WHAT_IF,
        _matmuls_in(dtype),
        is_relevant=is_relevant,
    )


def _cuda_graphs(baseline: Baseline) -> Iterator[ChangedScenario]:
    framework = baseline.scenario.framework
    if framework.uses_cuda_graphs:
        raise InapplicableChangeError("passes are captured now")
    if framework.graph_launch_seconds is None:
        raise InapplicableChangeError(f"{framework.name} captures none")
    if baseline.launch_seconds == 0.0:
        raise InapplicableChangeError("no GPU waits for its host")
    yield ChangedScenario(with_cuda_graphs(baseline.scenario))


def _no_offload(baseline: Baseline) -> Iterator[ChangedScenario]:
    if baseline.scenario.training.offload == NO_OFFLOAD:
        raise InapplicableChangeError("nothing is on the host now")
    yield ChangedScenario(without_offload(baseline.scenario))


def _no_overheads(baseline: Baseline) -> Iterator[ChangedScenario]:
    overheads = baseline.scenario.training.overheads
    if overheads == overheads.layer_implementation:
        raise InapplicableChangeError("there are no overheads outside the model now")
    yield ChangedScenario(without_overheads(baseline.scenario))


BATCH_CHANGES: Final = (
    ScenarioChange(
        "twice_the_microbatches",
        "twice the microbatches (global batch 2x)",
        ChangeSubject.BATCH,
        ChangeUse.WHAT_IF,
        apply_setter(lambda scenario: with_global_batch_factor(scenario, 2)),
        relative_cost=2.0,
    ),
    ScenarioChange(
        "half_the_microbatch",
        "microbatches of half the size",
        ChangeSubject.BATCH,
        ChangeUse.WHAT_IF | ChangeUse.SENSITIVITY,
        _half_microbatches,
        qualifier=" (same batch)",
        relative_cost=2.0,
    ),
)

SHARDING_CHANGES: Final = (
    ScenarioChange(
        "hybrid_sharding",
        "weights cut over as few ranks as fit, equal on the rest",
        ChangeSubject.LAYOUT,
        ChangeUse.WHAT_IF,
        _hybrid_sharding,
        requires_fit=True,
    ),
)

RECOMPUTE_CHANGES: Final = (
    ScenarioChange(
        "no_recompute",
        "nothing recomputed",
        ChangeSubject.RECOMPUTE,
        ChangeUse.WHAT_IF,
        _recompute_policy(NoRecompute(), "nothing is recomputed now"),
    ),
    ScenarioChange(
        "full_recompute",
        "all layers recomputed",
        ChangeSubject.RECOMPUTE,
        ChangeUse.WHAT_IF,
        _recompute_policy(FullRecompute(), "all layers are recomputed now"),
    ),
)

PRECISION_CHANGES: Final = (
    _precision_change(DType.BF16, lambda scenario: scenario.training.recipe.casts is not None),
    *(_precision_change(dtype, supports_matmuls(dtype)) for dtype in (DType.FP8, DType.MXFP8, DType.NVFP4)),
)

HOST_CHANGES: Final = (
    ScenarioChange(
        "cuda_graphs", "passes captured in CUDA graphs", ChangeSubject.HOST, ChangeUse.WHAT_IF, _cuda_graphs
    ),
    ScenarioChange("no_offload", "nothing on the host", ChangeSubject.OFFLOAD, ChangeUse.WHAT_IF, _no_offload),
    ScenarioChange(
        "no_overheads",
        "no overheads outside the model (training.overheads: none)",
        ChangeSubject.FRAMEWORK,
        ChangeUse.WHAT_IF,
        _no_overheads,
    ),
)
