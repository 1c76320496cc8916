"""Which habits of a framework, each on or off, make a step longer or shorter?

A switch is good where it makes a step shorter. Only what the scenario has is tried: if more was measured than expected,
good switches that are on are put off, and the other way round.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from clustersim.model.overheads import NO_OVERHEADS
from clustersim.model.training import AttentionBackend, FullRecompute, NoRecompute
from clustersim.parallel.data_parallel_strategy import NaiveDataParallel
from clustersim.scenario import Scenario
from clustersim.scenario.validation_rules.consistency import find_problems

Put = Callable[[Scenario, bool], Scenario | None]
"""The scenario with a switch on or off; None where that is not possible or changes nothing."""


@dataclass(frozen=True, slots=True)
class Switch:
    """off, on: what it means that the switch is off or on."""

    name: str
    off: str
    on: str
    put: Put

    def flipped(self, scenario: Scenario, *, longer: bool) -> Scenario | None:
        """The scenario with the switch off (to be longer) or on; None where it is so already or would be illegal."""
        changed = self.put(scenario, not longer)
        return None if changed is None or find_problems(changed) else changed

    def words(self, *, longer: bool) -> str:
        """What would be so."""
        return self.off if longer else self.on


def _data_overlap(scenario: Scenario, on: bool) -> Scenario | None:
    layout = scenario.layout
    strategy = layout.data
    if isinstance(strategy, NaiveDataParallel) or strategy.overlap is on or layout.dp * layout.cp == 1:
        return None
    return replace(scenario, layout=replace(layout, data=replace(strategy, overlap=on)))


def _overlap(field: str, axis: str) -> Put:
    """A flag of the layout that shows where an axis has more than one rank."""

    def put(scenario: Scenario, on: bool) -> Scenario | None:
        layout = scenario.layout
        if getattr(layout, field) is on or getattr(layout, axis) == 1:
            return None
        changed: dict[str, Any] = {field: on}
        return replace(scenario, layout=replace(layout, **changed))

    return put


def _fused(scenario: Scenario, on: bool) -> Scenario | None:
    training = scenario.training
    return None if training.fused is on else replace(scenario, training=replace(training, fused=on))


def _flash(scenario: Scenario, on: bool) -> Scenario | None:
    """Any flash attention may have been none; instead of none it was the fastest."""
    standard = scenario.training.attention is AttentionBackend.STANDARD
    return _attention(scenario, AttentionBackend.FLASH if on else AttentionBackend.STANDARD) if standard is on else None


def _newest_flash(scenario: Scenario, on: bool) -> Scenario | None:
    """The fastest library's, or FlashAttention-2."""
    attention = scenario.training.attention
    if attention not in ((AttentionBackend.FLASH2, AttentionBackend.FLASH1) if on else (AttentionBackend.FLASH,)):
        return None
    return _attention(scenario, AttentionBackend.FLASH if on else AttentionBackend.FLASH2)


def _attention(scenario: Scenario, attention: AttentionBackend) -> Scenario:
    return replace(scenario, training=replace(scenario.training, attention=attention))


def _nothing_recomputed(scenario: Scenario, on: bool) -> Scenario | None:
    """Everything or nothing; what recomputes attention alone may do without, too."""
    training, wanted = scenario.training, NoRecompute() if on else FullRecompute()
    return None if training.recompute == wanted else replace(scenario, training=replace(training, recompute=wanted))


def _overheads(scenario: Scenario, on: bool) -> Scenario | None:
    """Without what its framework does beside the model."""
    training = scenario.training
    return (
        replace(scenario, training=replace(training, overheads=NO_OVERHEADS))
        if on and training.overheads != NO_OVERHEADS
        else None
    )


def _all_equal(scenario: Scenario, on: bool) -> Scenario | None:
    """Without the scenario's own slow GPUs and jitter."""
    disturbances = scenario.degradations
    if not on or not (disturbances.slow_gpus or scenario.jitter):
        return None
    return replace(scenario, degradations=replace(disturbances, slow_gpus=()), jitter=None)


SWITCHES: Final = (
    Switch(
        "data_parallel_overlap",
        "data-parallel communication does not overlap with compute",
        "data-parallel communication overlaps with compute",
        _data_overlap,
    ),
    Switch(
        "tensor_overlap",
        "tensor-parallel communication does not overlap with its matmuls",
        "tensor-parallel communication overlaps with its matmuls",
        _overlap("tensor_overlap", "tp"),
    ),
    Switch(
        "pipeline_overlap",
        "stages wait for their sends",
        "stages compute while they send",
        _overlap("pipeline_overlap", "pp"),
    ),
    Switch(
        "backward_overlap",
        "backward's tensor-parallel communication does not hide behind the weight gradient",
        "backward's tensor-parallel communication hides behind the weight gradient",
        _overlap("backward_overlap", "tp"),
    ),
    Switch(
        "fused_kernels",
        "norms, activations and optimizer are not fused",
        "norms, activations and optimizer are fused",
        _fused,
    ),
    Switch("flash_attention", "attention writes its scores to memory (no flash)", "attention is flash", _flash),
    Switch(
        "newest_flash_attention",
        "attention is FlashAttention-2, not the fastest library's",
        "attention is the fastest library's",
        _newest_flash,
    ),
    Switch("recompute", "all layers are recomputed", "nothing is recomputed", _nothing_recomputed),
    Switch("overheads", "", "nothing is done beside the model (training.overheads)", _overheads),
    Switch("stragglers", "", "no GPU is slow and no kernel varies", _all_equal),
)
