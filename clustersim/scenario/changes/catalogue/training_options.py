"""Changes of the training: batch, recomputation, overheads."""

from collections.abc import Iterator
from typing import Final

from clustersim.model.training import FullRecompute
from clustersim.scenario.changes.scenario_change import (
    Baseline,
    ChangedScenario,
    ChangeSubject,
    ChangeUse,
    InapplicableChangeError,
    ScenarioChange,
    apply_setter,
)
from clustersim.scenario.changes.training import (
    has_overheads,
    with_global_batch_factor,
    with_microbatch_size,
    with_recompute,
    without_overheads,
)


def _half_microbatches(baseline: Baseline) -> Iterator[ChangedScenario]:
    sequences = baseline.scenario.training.microbatch
    if sequences % 2:
        raise InapplicableChangeError(f"a microbatch of {sequences} sequence{'s' * (sequences > 1)} has no half")
    yield ChangedScenario(with_microbatch_size(baseline.scenario, sequences // 2))


def _full_recompute(baseline: Baseline) -> Iterator[ChangedScenario]:
    if baseline.scenario.training.recompute == FullRecompute():
        raise InapplicableChangeError("all layers are recomputed now")
    yield ChangedScenario(with_recompute(baseline.scenario, FullRecompute()))


def _no_overheads(baseline: Baseline) -> Iterator[ChangedScenario]:
    if not has_overheads(baseline.scenario.training):
        raise InapplicableChangeError("there are no overheads outside the model now")
    yield ChangedScenario(without_overheads(baseline.scenario))


BATCH_CHANGES: Final = (
    ScenarioChange(
        "twice_the_microbatches",
        "twice the microbatches (global batch 2x)",
        ChangeSubject.BATCH,
        ChangeUse.WHAT_IF,
        apply_setter(lambda scenario: with_global_batch_factor(scenario, 2)),
        relative_cost=lambda _: 2.0,
    ),
    ScenarioChange(
        "half_the_microbatch",
        "microbatches of half the size",
        ChangeSubject.BATCH,
        ChangeUse.SENSITIVITY,
        _half_microbatches,
    ),
)

RECOMPUTE_CHANGES: Final = (
    ScenarioChange(
        "full_recompute",
        "all layers recomputed",
        ChangeSubject.RECOMPUTE,
        ChangeUse.WHAT_IF,
        _full_recompute,
    ),
)

OVERHEAD_CHANGES: Final = (
    ScenarioChange(
        "no_overheads",
        "no overheads outside the model (training.overheads)",
        ChangeSubject.FRAMEWORK,
        ChangeUse.WHAT_IF,
        _no_overheads,
    ),
)
