"""What would a layout be as a setup? Thousands of layouts of one scenario, of which few are simulated.

To read and check a scenario takes milliseconds. Layouts that differ in numbers only are made from the first of them,
which is read: degrees, the microbatch, and what goes with them. What comes out is the same as if each were read.
"""

import re
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

from clustersim.common.errors import InputError
from clustersim.planning.layouts.config_keys import CP, DP, ETP, MICROBATCH, PP, SCHEDULE, SEQUENCE_PARALLEL, TP
from clustersim.planning.layouts.executors import PackedScenario
from clustersim.scenario import Scenario
from clustersim.scenario.loaders import bidirectional_degrees
from clustersim.scenario.resolved import ResolvedScenario
from clustersim.scenario.validation_rules.consistency import find_problems

_POSITIVE_INTEGER: Final = re.compile("[1-9][0-9]{0,8}")
_BOOLEANS: Final = {"true": True, "false": False}
_INTEGER_KEYS: Final = (TP, CP, PP, DP, ETP, MICROBATCH)
_SHARED_FIELDS: Final = ("cost", "disturbances", "model", "framework", "reliability")


class DerivedScenarios:
    """Setups of a scenario's layouts."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._resolved_cache: dict[tuple[str, ...], ResolvedScenario] = {}

    def resolve(self, overrides: tuple[str, ...]) -> ResolvedScenario:
        """With overrides as `--set` takes them; raise InputError for what is refused, with its first sentence alone."""
        numbers, other_overrides = _split_overrides(overrides)
        if other_overrides not in self._resolved_cache:
            self._resolved_cache[other_overrides] = self._with_shared_objects(_resolve(self._scenario, overrides))
        resolved = _with_numbers(self._resolved_cache[other_overrides], numbers)
        violations = find_problems(resolved)
        if violations:
            raise InputError(violations[0])
        return resolved

    def _with_shared_objects(self, resolved: ResolvedScenario) -> ResolvedScenario:
        """With the scenario's own objects where they are equal, so that what follows from them is known to be."""
        scenario = self._scenario
        shared = {
            name: getattr(scenario, name)
            for name in _SHARED_FIELDS
            if getattr(scenario, name) == getattr(resolved, name)
        }
        return replace(resolved, **shared)


def _resolve(scenario: Scenario, overrides: tuple[str, ...]) -> ResolvedScenario:
    try:
        return scenario.resolve_unchecked(overrides)
    except InputError as error:
        lines = str(error).splitlines()  # a count and a line for each, or one behind the name of the file
        message = lines[1] if len(lines) > 1 else lines[0].partition(": ")[2]
        raise InputError(message.strip(" -")) from error


@lru_cache(maxsize=4)
def derived_scenarios(packed: PackedScenario) -> DerivedScenarios:
    """Those of a scenario on its way; in each process the same."""
    return DerivedScenarios(packed())


def _split_overrides(overrides: tuple[str, ...]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Numbers by their keys, and the other overrides with the names of these keys.

    Nothing is a number where a whole section is written anew, since the order matters then.
    """
    items = [override.partition("=")[::2] for override in overrides]
    if any("." not in key for key, _ in items if key != SCHEDULE):
        return {}, overrides
    numbers: dict[str, Any] = {}
    other_overrides: list[str] = []
    for (key, value), override in zip(items, overrides, strict=True):
        if key in _INTEGER_KEYS and _POSITIVE_INTEGER.fullmatch(value):
            numbers[key] = int(value)
        elif key == SEQUENCE_PARALLEL and value in _BOOLEANS:
            numbers[key] = _BOOLEANS[value]
        else:
            other_overrides.append(override)
    return numbers, (*other_overrides, *sorted(numbers))


def _with_numbers(resolved: ResolvedScenario, numbers: dict[str, Any]) -> ResolvedScenario:
    """The setup with other numbers; raise InputError for a pipeline that has no middle to run towards."""
    degrees = {key.removeprefix("layout."): value for key, value in numbers.items() if key != MICROBATCH}
    if resolved.layout.mirrored and {PP, DP} & numbers.keys():
        configured = resolved.layout.as_configured
        degrees["pp"], degrees["dp"] = bidirectional_degrees(
            degrees.get("pp", configured.pp), degrees.get("dp", configured.dp)
        )
    training = resolved.training
    if MICROBATCH in numbers:
        training = replace(training, microbatch=numbers[MICROBATCH])
    return replace(resolved, layout=replace(resolved.layout, **degrees), training=training)
