"""What is a remedy? A change of the scenario's own settings that may make its step shorter.

It is made by overrides, as on the command line, so that a user can repeat it, and says which losses it addresses.
Each may have alternatives; the first one that is legal and fits in memory counts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from clustersim.common.errors import InputError, problems_of
from clustersim.scenario.changes.scenario_change import (
    Baseline,
    ChangedScenario,
    ChangeSubject,
    ChangeUse,
    InapplicableChangeError,
    ScenarioChange,
)
from clustersim.scenario.changes.step_losses import StepLoss
from clustersim.scenario.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Alternative:
    """One way to make a change. overrides: its settings; detail: what the change's label leaves open, if anything."""

    overrides: tuple[str, ...]
    detail: str = ""


FindAlternatives = Callable[[Baseline], Iterator[Alternative]]
"""Yields alternatives in order of preference; raises InapplicableChangeError with the reason where there is none."""


def remedy(
    name: str,
    label: str,
    subject: ChangeSubject,
    addresses: frozenset[StepLoss],
    find_alternatives: FindAlternatives,
    *,
    is_relevant: Callable[[Scenario], bool] = lambda _: True,
) -> ScenarioChange:
    """A change of settings. Arguments as those of `ScenarioChange`."""
    return ScenarioChange(
        name,
        label,
        subject,
        ChangeUse.REMEDY,
        lambda baseline: _apply_overrides(baseline, find_alternatives),
        requires_fit=True,
        is_relevant=is_relevant,
        addresses=addresses,
    )


def explaining(*remedies: ScenarioChange) -> tuple[ScenarioChange, ...]:
    """The remedies as candidate causes, too: a measured step may be shorter since it ran with them."""
    return tuple(replace(change, uses=change.uses | ChangeUse.SHORTER_STEP) for change in remedies)


def setting(
    name: str,
    label: str,
    subject: ChangeSubject,
    addresses: frozenset[StepLoss],
    overrides: tuple[str, ...],
    can_help: Callable[[Scenario], bool],
) -> ScenarioChange:
    """A change of settings that is always the same. can_help: whether a scenario has what it is about, and not as it.

    Other arguments as those of `ScenarioChange`.
    """
    alternatives = (Alternative(overrides),)
    return remedy(name, label, subject, addresses, lambda _: iter(alternatives), is_relevant=can_help)


def _apply_overrides(baseline: Baseline, find_alternatives: FindAlternatives) -> Iterator[ChangedScenario]:
    """The legal alternatives; raises InapplicableChangeError with the first one's problem where none is legal."""
    scenario, first_problem, has_legal = baseline.scenario, "", False
    for alternative in find_alternatives(baseline):
        try:
            changed = scenario.with_overrides(*alternative.overrides, suggest=False)
        except InputError as error:
            label = f"{scenario.path or scenario.name}: "
            first_problem = first_problem or problems_of(error)[0].removeprefix(label)
        else:
            has_legal = True
            yield ChangedScenario(changed, alternative.detail, alternative.overrides)
    if not has_legal and first_problem:
        raise InapplicableChangeError(first_problem)
