"""Changes of options of the framework, each on or off, that make a step longer or shorter.

On is the state that makes a step shorter. Each option is two changes of one name, of which a scenario allows at
most one: to the state that it is not in.
"""

from collections.abc import Callable, Iterator
from typing import Final

from clustersim.model.training import AttentionBackend, FullRecompute, NoRecompute
from clustersim.parallel.data_parallel_strategy import with_overlap
from clustersim.scenario.changes.health import without_stragglers
from clustersim.scenario.changes.layout import with_layout
from clustersim.scenario.changes.scenario_change import (
    ApplyChange,
    Baseline,
    ChangedScenario,
    ChangeSubject,
    ChangeUse,
    InapplicableChangeError,
    ScenarioChange,
)
from clustersim.scenario.changes.training import with_recompute, with_training, without_overheads
from clustersim.scenario.scenario import Scenario

SetState = Callable[[Scenario, bool], Scenario | None]
"""Returns the scenario with an option on or off; None if that is not possible or changes nothing."""


def _set_data_parallel_overlap(scenario: Scenario, on: bool) -> Scenario | None:
    layout = scenario.layout
    strategy = with_overlap(layout.data, overlap=on)
    has_no_effect = strategy == layout.data or layout.dp * layout.cp == 1
    return None if has_no_effect else with_layout(scenario, data=strategy)


def _layout_flag_setter(field: str, axis: str) -> SetState:
    """Setter of a layout flag that has an effect where an axis has more than one rank."""

    def set_flag(scenario: Scenario, on: bool) -> Scenario | None:
        has_no_effect = getattr(scenario.layout, field) is on or getattr(scenario.layout, axis) == 1
        return None if has_no_effect else with_layout(scenario, **{field: on})

    return set_flag


def _set_fused_kernels(scenario: Scenario, on: bool) -> Scenario | None:
    return None if scenario.training.fused is on else with_training(scenario, fused=on)


def _set_flash_attention(scenario: Scenario, on: bool) -> Scenario | None:
    """Off: standard attention; on, for scenarios with standard attention: the fastest flash attention."""
    if (scenario.training.attention is AttentionBackend.STANDARD) is not on:
        return None
    return with_training(scenario, attention=AttentionBackend.FLASH if on else AttentionBackend.STANDARD)


def _set_newest_flash(scenario: Scenario, on: bool) -> Scenario | None:
    """On: the fastest library's flash attention; off: FlashAttention-2."""
    replaced = (AttentionBackend.FLASH2, AttentionBackend.FLASH1) if on else (AttentionBackend.FLASH,)
    if scenario.training.attention not in replaced:
        return None
    return with_training(scenario, attention=AttentionBackend.FLASH if on else AttentionBackend.FLASH2)


def _set_no_recompute(scenario: Scenario, on: bool) -> Scenario | None:
    """On: no recomputation; off: full recomputation."""
    policy = NoRecompute() if on else FullRecompute()
    return None if scenario.training.recompute == policy else with_recompute(scenario, policy)


def _remove_overheads(scenario: Scenario, on: bool) -> Scenario | None:  # noqa: ARG001 - it is never off
    """Without the framework's overheads outside the model."""
    overheads = scenario.training.overheads
    return None if overheads == overheads.layer_implementation else without_overheads(scenario)


def _remove_stragglers(scenario: Scenario, on: bool) -> Scenario | None:  # noqa: ARG001 - it is never off
    """Without the scenario's slow GPUs and jitter."""
    return without_stragglers(scenario) if scenario.degradations.slow_gpus or scenario.jitter else None


def _apply_state(set_state: SetState, *, on: bool) -> ApplyChange:
    def apply(baseline: Baseline) -> Iterator[ChangedScenario]:
        changed = set_state(baseline.scenario, on)
        if changed is None:
            raise InapplicableChangeError("it is in this state, or has no effect")
        yield ChangedScenario(changed)

    return apply


def _switched_on(name: str, label: str, subject: ChangeSubject, set_state: SetState) -> ScenarioChange:
    return ScenarioChange(name, label, subject, ChangeUse.SHORTER_STEP, _apply_state(set_state, on=True))


def _switch(
    name: str, labels: tuple[str, str], subject: ChangeSubject, set_state: SetState
) -> tuple[ScenarioChange, ScenarioChange]:
    """The option off, and on. labels: of the two states."""
    off_label, on_label = labels
    off = ScenarioChange(name, off_label, subject, ChangeUse.LONGER_STEP, _apply_state(set_state, on=False))
    return off, _switched_on(name, on_label, subject, set_state)


OVERLAP_SWITCHES: Final = (
    *_switch(
        "data_parallel_overlap",
        (
            "data-parallel communication does not overlap with compute",
            "data-parallel communication overlaps with compute",
        ),
        ChangeSubject.LAYOUT,
        _set_data_parallel_overlap,
    ),
    *_switch(
        "tp_comm_overlap",
        (
            "tensor-parallel communication does not overlap with its matmuls",
            "tensor-parallel communication overlaps with its matmuls",
        ),
        ChangeSubject.LAYOUT,
        _layout_flag_setter("tp_comm_overlap", "tp"),
    ),
    *_switch(
        "overlap_p2p_comm",
        ("stages wait for their sends", "stages compute while they send"),
        ChangeSubject.LAYOUT,
        _layout_flag_setter("overlap_p2p_comm", "pp"),
    ),
    *_switch(
        "async_tensor_model_parallel_allreduce",
        (
            "backward's tensor-parallel communication does not hide behind the weight gradient",
            "backward's tensor-parallel communication hides behind the weight gradient",
        ),
        ChangeSubject.LAYOUT,
        _layout_flag_setter("async_tensor_model_parallel_allreduce", "tp"),
    ),
)

KERNEL_SWITCHES: Final = (
    *_switch(
        "fused_kernels",
        ("norms, activations and optimizer are not fused", "norms, activations and optimizer are fused"),
        ChangeSubject.FRAMEWORK,
        _set_fused_kernels,
    ),
    *_switch(
        "flash_attention",
        ("attention writes its scores to memory (no flash)", "attention is flash"),
        ChangeSubject.FRAMEWORK,
        _set_flash_attention,
    ),
    *_switch(
        "newest_flash_attention",
        ("attention is FlashAttention-2, not the fastest library's", "attention is the fastest library's"),
        ChangeSubject.FRAMEWORK,
        _set_newest_flash,
    ),
    *_switch(
        "recompute",
        ("all layers are recomputed", "nothing is recomputed"),
        ChangeSubject.RECOMPUTE,
        _set_no_recompute,
    ),
)

REMOVALS: Final = (
    _switched_on(
        "overheads",
        "no overheads outside the model (training.overheads)",
        ChangeSubject.FRAMEWORK,
        _remove_overheads,
    ),
    _switched_on("stragglers", "no GPU is slow and no kernel varies", ChangeSubject.GPUS, _remove_stragglers),
)
