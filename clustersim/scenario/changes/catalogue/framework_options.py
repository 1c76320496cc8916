"""Options of the framework turned off, and what lengthens a step removed: causes of a gap to a measured step.

What turns an option on is a remedy (`remedies_compute`, `remedies_communication`).
"""

from collections.abc import Callable, Iterator
from typing import Final

from clustersim.common.errors import InputError
from clustersim.model.training import NONE_FUSED, AttentionBackend, FullRecompute
from clustersim.parallel.data_parallel_strategy import with_overlap
from clustersim.scenario.changes.health import without_stragglers
from clustersim.scenario.changes.layout import with_layout
from clustersim.scenario.changes.scenario_change import (
    Baseline,
    ChangedScenario,
    ChangeSubject,
    ChangeUse,
    InapplicableChangeError,
    ScenarioChange,
)
from clustersim.scenario.changes.training import has_overheads, with_recompute, with_training, without_overheads
from clustersim.scenario.scenario import Scenario

ChangeOption = Callable[[Scenario], Scenario | None]
"""Returns the changed scenario; None if that is not possible or changes nothing."""


def _without_data_parallel_overlap(scenario: Scenario) -> Scenario | None:
    layout = scenario.layout
    strategy = with_overlap(layout.data, overlap=False)
    has_no_effect = strategy == layout.data or layout.dp * layout.cp == 1
    return None if has_no_effect else with_layout(scenario, data=strategy)


def _without_layout_flag(field: str, axis: str) -> ChangeOption:
    """Without a layout flag that has an effect where an axis has more than one rank."""

    def unset_flag(scenario: Scenario) -> Scenario | None:
        has_no_effect = not getattr(scenario.layout, field) or getattr(scenario.layout, axis) == 1
        return None if has_no_effect else with_layout(scenario, **{field: False})

    return unset_flag


def _without_fused_kernels(scenario: Scenario) -> Scenario | None:
    return with_training(scenario, fused=NONE_FUSED) if scenario.training.fused else None


def _without_flash_attention(scenario: Scenario) -> Scenario | None:
    is_flash = scenario.training.attention is not AttentionBackend.STANDARD
    return with_training(scenario, attention=AttentionBackend.STANDARD) if is_flash else None


def _without_newest_flash(scenario: Scenario) -> Scenario | None:
    """FlashAttention-2 in place of the fastest library's."""
    is_newest = scenario.training.attention in (AttentionBackend.FLASH, AttentionBackend.SDPA)
    return with_training(scenario, attention=AttentionBackend.FLASH2) if is_newest else None


def _without_compiler(scenario: Scenario) -> Scenario | None:
    """Layers that torch.compile leaves as they are: it is off, or falls back."""
    if not scenario.framework.compiled:
        return None
    try:
        return scenario.with_overrides("framework.torch_compile=false", suggest=False)
    except InputError:
        return None


def _with_full_recompute(scenario: Scenario) -> Scenario | None:
    is_full = scenario.training.recompute == FullRecompute()
    return None if is_full else with_recompute(scenario, FullRecompute())


def _without_overheads(scenario: Scenario) -> Scenario | None:
    """Without the framework's overheads outside the model."""
    return without_overheads(scenario) if has_overheads(scenario.training) else None


def _without_stragglers(scenario: Scenario) -> Scenario | None:
    """Without the scenario's slow GPUs and jitter."""
    return without_stragglers(scenario) if scenario.degradations.slow_gpus or scenario.jitter else None


def _change(name: str, label: str, subject: ChangeSubject, use: ChangeUse, option: ChangeOption) -> ScenarioChange:
    def apply(baseline: Baseline) -> Iterator[ChangedScenario]:
        changed = option(baseline.scenario)
        if changed is None:
            raise InapplicableChangeError("it is in this state, or has no effect")
        yield ChangedScenario(changed)

    return ScenarioChange(name, label, subject, use, apply)


def _switched_off(name: str, label: str, subject: ChangeSubject, option: ChangeOption) -> ScenarioChange:
    return _change(name, label, subject, ChangeUse.LONGER_STEP, option)


def _removed(name: str, label: str, subject: ChangeSubject, option: ChangeOption) -> ScenarioChange:
    return _change(name, label, subject, ChangeUse.SHORTER_STEP, option)


OVERLAP_SWITCHES: Final = (
    _switched_off(
        "data_parallel_overlap",
        "data-parallel communication does not overlap with compute",
        ChangeSubject.LAYOUT,
        _without_data_parallel_overlap,
    ),
    _switched_off(
        "tp_comm_overlap",
        "tensor-parallel communication does not overlap with its matmuls",
        ChangeSubject.LAYOUT,
        _without_layout_flag("tp_comm_overlap", "tp"),
    ),
    _switched_off(
        "overlap_p2p_comm",
        "stages wait for their sends",
        ChangeSubject.LAYOUT,
        _without_layout_flag("overlap_p2p_comm", "pp"),
    ),
    _switched_off(
        "async_tensor_model_parallel_allreduce",
        "backward's tensor-parallel communication does not hide behind the weight gradient",
        ChangeSubject.LAYOUT,
        _without_layout_flag("async_tensor_model_parallel_allreduce", "tp"),
    ),
)

KERNEL_SWITCHES: Final = (
    _switched_off(
        "fused_kernels",
        "norms, activations and optimizer are not fused",
        ChangeSubject.FRAMEWORK,
        _without_fused_kernels,
    ),
    _switched_off(
        "flash_attention",
        "attention writes its scores to memory (no flash)",
        ChangeSubject.FRAMEWORK,
        _without_flash_attention,
    ),
    _switched_off(
        "newest_flash_attention",
        "attention is FlashAttention-2, not the fastest library's",
        ChangeSubject.FRAMEWORK,
        _without_newest_flash,
    ),
    _switched_off(
        "not_compiled",
        "layers are not compiled (torch.compile is off, or falls back to eager)",
        ChangeSubject.FRAMEWORK,
        _without_compiler,
    ),
    _switched_off("recompute", "all layers are recomputed", ChangeSubject.RECOMPUTE, _with_full_recompute),
)

REMOVALS: Final = (
    _removed(
        "overheads",
        "no overheads outside the model (training.overheads)",
        ChangeSubject.FRAMEWORK,
        _without_overheads,
    ),
    _removed("stragglers", "no GPU is slow and no kernel varies", ChangeSubject.GPUS, _without_stragglers),
)
