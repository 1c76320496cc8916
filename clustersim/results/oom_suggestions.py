"""What would make a scenario fit in memory? Changes of the catalogue that lower the peak.

They are ordered by their cost in time. Each change has alternatives of increasing effect; the first one that is
valid and fits is suggested. Where no single change suffices, those of the layout and of offload are tried together
with full recomputation.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final

from clustersim.common.errors import InputError
from clustersim.common.units import Bytes, format_bytes, format_probability
from clustersim.model.training import FullRecompute
from clustersim.scenario import Scenario
from clustersim.scenario.changes.catalogue import changes_for
from clustersim.scenario.changes.scenario_change import Baseline, ChangedScenario, ChangeSubject, ChangeUse
from clustersim.scenario.changes.training import with_recompute
from clustersim.uncertainty.memory_error import fit_probability

MAX_SUGGESTIONS: Final = 4
_PAIRED_SUBJECTS: Final = (ChangeSubject.LAYOUT, ChangeSubject.OFFLOAD)
_WITH_RECOMPUTE: Final = "training.recompute=full with "
_NOTHING_FITS: Final = (
    "no single change of recomputation, sharding, degrees or offload fits; use more GPUs or a smaller model"
)
PeakFunction = Callable[[Scenario], Bytes]


def oom_suggestions(scenario: Scenario, capacity: Bytes, safe_capacity: Bytes, peak_of: PeakFunction) -> list[str]:
    """Sentences that name a change and the peak after it.

    safe_capacity: what is left of the capacity with the headroom that errors of predicted memory ask for: changes
    that leave it are suggested, others only where none does; peak_of: raises InputError for an invalid scenario.
    """
    safe = _suggestions(scenario, capacity, safe_capacity, peak_of)
    return safe or _suggestions(scenario, capacity, capacity, peak_of) or [_NOTHING_FITS]


def _suggestions(scenario: Scenario, capacity: Bytes, limit: Bytes, peak_of: PeakFunction) -> list[str]:
    """Changes after which the peak is within a limit."""
    changes = changes_for(ChangeUse.MEMORY)
    paired_changes = tuple(change for change in changes if change.subject in _PAIRED_SUBJECTS)
    recomputed = with_recompute(scenario, FullRecompute())
    for prefix, start, candidates in (("", scenario, changes), (_WITH_RECOMPUTE, recomputed, paired_changes)):
        sentences = (_first_fitting(change.apply(Baseline(start)), capacity, limit, peak_of) for change in candidates)
        suggestions = [prefix + sentence for sentence in islice(filter(None, sentences), MAX_SUGGESTIONS)]
        if suggestions:
            return suggestions
    return []


def _first_fitting(
    alternatives: Iterator[ChangedScenario], capacity: Bytes, limit: Bytes, peak_of: PeakFunction
) -> str | None:
    """Sentence for the first alternative that is valid and has its peak within a limit."""
    for alternative in alternatives:
        try:
            peak = peak_of(alternative.scenario)
        except InputError:
            continue
        if peak <= limit:
            probability = format_probability(fit_probability(alternative.scenario.framework.name, peak, capacity))
            sizes = f"{format_bytes(peak)} of {format_bytes(capacity)}"
            return f"{alternative.detail} would fit ({sizes}, probability {probability})"
    return None
