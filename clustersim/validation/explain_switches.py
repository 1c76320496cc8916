"""Which framework options, each on or off, make a step longer or shorter?

On is the state that makes a step shorter. Only changes of the scenario's state are tried: if the measured
step is longer than expected, switches that are on are turned off, and the reverse.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from clustersim.model.overheads import NO_OVERHEADS
from clustersim.model.training import AttentionBackend, FullRecompute, NoRecompute
from clustersim.parallel.data_parallel_strategy import NaiveDataParallel
from clustersim.scenario import Scenario
from clustersim.scenario.validation_rules.consistency import find_problems

SwitchSetter = Callable[[Scenario, bool], Scenario | None]
"""Returns the scenario with a switch on or off; None if that is not possible or changes nothing."""


@dataclass(frozen=True, slots=True)
class FrameworkSwitch:
    """A framework option. off_label, on_label: descriptions of the two states; set_state: sets it."""

    name: str
    off_label: str
    on_label: str
    set_state: SwitchSetter

    def flip_towards(self, scenario: Scenario, *, slower: bool) -> Scenario | None:
        """The scenario with the switch off (slower) or on; None if it already is, or if that would be invalid."""
        changed = self.set_state(scenario, not slower)
        return None if changed is None or find_problems(changed) else changed

    def description(self, *, slower: bool) -> str:
        """Description of the flipped state."""
        return self.off_label if slower else self.on_label


def _set_data_parallel_overlap(scenario: Scenario, on: bool) -> Scenario | None:
    layout = scenario.layout
    strategy = layout.data
    if isinstance(strategy, NaiveDataParallel) or strategy.overlap is on or layout.dp * layout.cp == 1:
        return None
    return replace(scenario, layout=replace(layout, data=replace(strategy, overlap=on)))


def _layout_flag_setter(field: str, axis: str) -> SwitchSetter:
    """Setter of a layout flag that has an effect where an axis has more than one rank."""

    def set_flag(scenario: Scenario, on: bool) -> Scenario | None:
        layout = scenario.layout
        if getattr(layout, field) is on or getattr(layout, axis) == 1:
            return None
        changes: dict[str, Any] = {field: on}
        return replace(scenario, layout=replace(layout, **changes))

    return set_flag


def _set_fused_kernels(scenario: Scenario, on: bool) -> Scenario | None:
    training = scenario.training
    return None if training.fused is on else replace(scenario, training=replace(training, fused=on))


def _set_flash_attention(scenario: Scenario, on: bool) -> Scenario | None:
    """Off: standard attention; on, for scenarios with standard attention: the fastest flash attention."""
    standard = scenario.training.attention is AttentionBackend.STANDARD
    return (
        _with_attention(scenario, AttentionBackend.FLASH if on else AttentionBackend.STANDARD)
        if standard is on
        else None
    )


def _set_newest_flash(scenario: Scenario, on: bool) -> Scenario | None:
    """On: the fastest library's flash attention; off: FlashAttention-2."""
    attention = scenario.training.attention
    if attention not in ((AttentionBackend.FLASH2, AttentionBackend.FLASH1) if on else (AttentionBackend.FLASH,)):
        return None
    return _with_attention(scenario, AttentionBackend.FLASH if on else AttentionBackend.FLASH2)


def _with_attention(scenario: Scenario, backend: AttentionBackend) -> Scenario:
    return replace(scenario, training=replace(scenario.training, attention=backend))


def _set_no_recompute(scenario: Scenario, on: bool) -> Scenario | None:
    """On: no recomputation; off: full recomputation."""
    training, recompute = scenario.training, NoRecompute() if on else FullRecompute()
    return (
        None if training.recompute == recompute else replace(scenario, training=replace(training, recompute=recompute))
    )


def _remove_overheads(scenario: Scenario, on: bool) -> Scenario | None:
    """Without the framework's overheads outside the model."""
    training = scenario.training
    return (
        replace(scenario, training=replace(training, overheads=NO_OVERHEADS))
        if on and training.overheads != NO_OVERHEADS
        else None
    )


def _remove_stragglers(scenario: Scenario, on: bool) -> Scenario | None:
    """Without the scenario's slow GPUs and jitter."""
    degradations = scenario.degradations
    if not on or not (degradations.slow_gpus or scenario.jitter):
        return None
    return replace(scenario, degradations=replace(degradations, slow_gpus=()), jitter=None)


SWITCHES: Final = (
    FrameworkSwitch(
        "data_parallel_overlap",
        "data-parallel communication does not overlap with compute",
        "data-parallel communication overlaps with compute",
        _set_data_parallel_overlap,
    ),
    FrameworkSwitch(
        "tp_comm_overlap",
        "tensor-parallel communication does not overlap with its matmuls",
        "tensor-parallel communication overlaps with its matmuls",
        _layout_flag_setter("tp_comm_overlap", "tp"),
    ),
    FrameworkSwitch(
        "overlap_p2p_comm",
        "stages wait for their sends",
        "stages compute while they send",
        _layout_flag_setter("overlap_p2p_comm", "pp"),
    ),
    FrameworkSwitch(
        "async_tensor_model_parallel_allreduce",
        "backward's tensor-parallel communication does not hide behind the weight gradient",
        "backward's tensor-parallel communication hides behind the weight gradient",
        _layout_flag_setter("async_tensor_model_parallel_allreduce", "tp"),
    ),
    FrameworkSwitch(
        "fused_kernels",
        "norms, activations and optimizer are not fused",
        "norms, activations and optimizer are fused",
        _set_fused_kernels,
    ),
    FrameworkSwitch(
        "flash_attention",
        "attention writes its scores to memory (no flash)",
        "attention is flash",
        _set_flash_attention,
    ),
    FrameworkSwitch(
        "newest_flash_attention",
        "attention is FlashAttention-2, not the fastest library's",
        "attention is the fastest library's",
        _set_newest_flash,
    ),
    FrameworkSwitch("recompute", "all layers are recomputed", "nothing is recomputed", _set_no_recompute),
    FrameworkSwitch("overheads", "", "no overheads outside the model (training.overheads)", _remove_overheads),
    FrameworkSwitch("stragglers", "", "no GPU is slow and no kernel varies", _remove_stragglers),
)
