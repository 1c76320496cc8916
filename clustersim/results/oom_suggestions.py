"""What would make a scenario fit in memory? Changes of the catalogue that lower the peak.

They are ordered by their cost in time. Each change has alternatives of increasing effect; the first one that is
valid and fits is suggested. Where no single change suffices, those of the layout and of offload are tried together
with full recomputation.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final

from clustersim.common.errors import InputError
from clustersim.common.units import Bytes, format_bytes
from clustersim.model.training import FullRecompute
from clustersim.scenario import Scenario
from clustersim.scenario.changes.catalogue import changes_for
from clustersim.scenario.changes.scenario_change import Baseline, ChangeSubject, ChangeUse, ScenarioChange
from clustersim.scenario.changes.training import with_recompute

MAX_SUGGESTIONS: Final = 4
_PAIRED_SUBJECTS: Final = (ChangeSubject.LAYOUT, ChangeSubject.OFFLOAD)
PeakFunction = Callable[[Scenario], Bytes]


def oom_suggestions(scenario: Scenario, capacity: Bytes, peak_of: PeakFunction) -> list[str]:
    """Sentences that name a change and the peak after it. peak_of: raises InputError for an invalid scenario."""
    for candidates in (_single_changes(scenario), _changes_with_recompute(scenario)):
        sentences = (_first_fitting(*candidate, capacity, peak_of) for candidate in candidates)
        suggestions = list(islice(filter(None, sentences), MAX_SUGGESTIONS))
        if suggestions:
            return suggestions
    return ["no single change of recomputation, sharding, degrees or offload fits; use more GPUs or a smaller model"]


Candidate = tuple[str, ScenarioChange, Scenario]
"""A change of a scenario; what was changed before, as the start of the sentence."""


def _single_changes(scenario: Scenario) -> Iterator[Candidate]:
    return (("", change, scenario) for change in changes_for(ChangeUse.MEMORY))


def _changes_with_recompute(scenario: Scenario) -> Iterator[Candidate]:
    """Changes that leave recomputation as it is, of the scenario with full recomputation."""
    recomputed = with_recompute(scenario, FullRecompute())
    for change in changes_for(ChangeUse.MEMORY):
        if change.subject in _PAIRED_SUBJECTS:
            yield "training.recompute=full with ", change, recomputed


def _first_fitting(
    prefix: str, change: ScenarioChange, scenario: Scenario, capacity: Bytes, peak_of: PeakFunction
) -> str | None:
    """Sentence for the first alternative that is valid and fits."""
    for alternative in change.apply(Baseline(scenario)):
        try:
            peak = peak_of(alternative.scenario)
        except InputError:
            continue
        if peak <= capacity:
            return f"{prefix}{alternative.detail} would fit ({format_bytes(peak)} of {format_bytes(capacity)})"
    return None
