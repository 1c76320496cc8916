"""What would make a scenario fit in memory, or fit surely? Changes of the catalogue that lower the peak.

They are ordered by their cost in time. Each change has alternatives of increasing effect; the first one that is
valid and fits is suggested. Where no single change suffices, those of formats, of the layout and of offload are tried
together with full recomputation.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from clustersim.common.errors import InputError
from clustersim.common.units import Bytes, format_bytes, format_probability
from clustersim.model.training import FullRecompute
from clustersim.scenario import Scenario
from clustersim.scenario.changes.catalogue import changes_for
from clustersim.scenario.changes.scenario_change import Baseline, ChangedScenario, ChangeSubject, ChangeUse
from clustersim.scenario.changes.training import with_recompute
from clustersim.scenario.overrides import command_arguments
from clustersim.uncertainty.memory_error import fit_probability

MAX_SUGGESTIONS: Final = 4
_PAIRED_SUBJECTS: Final = (ChangeSubject.PRECISION, ChangeSubject.LAYOUT, ChangeSubject.OFFLOAD)
_FULL_RECOMPUTE: Final = ("training.recompute=full",)
_NOTHING: Final = "no single change of recomputation, sharding, degrees or offload {}; use more GPUs or a smaller model"
PeakFunction = Callable[[Scenario], Bytes]


@dataclass(frozen=True, slots=True)
class MemorySuggestion:
    """What makes a scenario fit.

    overrides: settings, as for `--set`; empty: no change does, and `reason` says what is left to do; peak: bytes on the
    most loaded GPU with them; fit_probability: that they fit, by published errors of predicted memory.
    """

    overrides: tuple[str, ...]
    reason: str
    peak: Bytes | None = None
    fit_probability: float | None = None

    @property
    def description(self) -> str:
        """The suggestion as a sentence, with its settings as arguments of the command line, to be copied."""
        return f"{command_arguments(self.overrides)} {self.reason}" if self.overrides else self.reason

    def to_json(self) -> dict[str, Any]:
        """The suggestion as plain data."""
        return {
            "set": list(self.overrides),
            "reason": self.reason,
            "peak_memory_bytes": self.peak,
            "fit_probability": self.fit_probability,
        }


NOTHING_FITS: Final = MemorySuggestion((), _NOTHING.format("fits"))
NOTHING_IS_SAFE: Final = MemorySuggestion((), _NOTHING.format("leaves the memory that its prediction may err by"))


def oom_suggestions(
    scenario: Scenario, capacity: Bytes, safe_capacity: Bytes, peak_of: PeakFunction, *, fits: bool
) -> list[MemorySuggestion]:
    """Changes, each with the peak after it.

    safe_capacity: what is left of the capacity with the headroom that errors of predicted memory ask for: changes
    that leave it are suggested, others only where none does and the scenario as it is does not fit (fits); peak_of:
    raises InputError for an invalid scenario.
    """
    safe = _suggestions(scenario, capacity, safe_capacity, peak_of)
    if safe or fits:
        return safe or [NOTHING_IS_SAFE]
    return _suggestions(scenario, capacity, capacity, peak_of) or [NOTHING_FITS]


def _suggestions(scenario: Scenario, capacity: Bytes, limit: Bytes, peak_of: PeakFunction) -> list[MemorySuggestion]:
    """Changes after which the peak is within a limit."""
    changes = changes_for(ChangeUse.MEMORY)
    paired_changes = tuple(change for change in changes if change.subject in _PAIRED_SUBJECTS)
    recomputed = with_recompute(scenario, FullRecompute())
    for prefix, start, candidates in (((), scenario, changes), (_FULL_RECOMPUTE, recomputed, paired_changes)):
        fitting = (_first_fitting(change.apply(Baseline(start)), limit, peak_of) for change in candidates)
        suggestions = [
            _suggestion((*prefix, *alternative.overrides), alternative.scenario, peak, capacity)
            for alternative, peak in islice(filter(None, fitting), MAX_SUGGESTIONS)
        ]
        if suggestions:
            return suggestions
    return []


def _first_fitting(
    alternatives: Iterator[ChangedScenario], limit: Bytes, peak_of: PeakFunction
) -> tuple[ChangedScenario, Bytes] | None:
    """The first alternative that is valid and has its peak within a limit, with that peak."""
    for alternative in alternatives:
        try:
            peak = peak_of(alternative.scenario)
        except InputError:
            continue
        if peak <= limit:
            return alternative, peak
    return None


def _suggestion(overrides: tuple[str, ...], changed: Scenario, peak: Bytes, capacity: Bytes) -> MemorySuggestion:
    probability = fit_probability(changed.framework.name, peak, capacity)
    sizes = f"{format_bytes(peak)} of {format_bytes(capacity)}"
    reason = f"would fit ({sizes}, probability {format_probability(probability)})"
    return MemorySuggestion(overrides, reason, peak, probability)
