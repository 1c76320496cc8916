"""What is a layout as a resolved scenario? Thousands of layouts of one scenario, of which few are simulated.

Reading and checking a scenario takes milliseconds. Layouts that differ in numbers only (degrees, microbatch
and what follows from them) are derived from the first of them, which is read. The result equals that of
reading each.
"""

import re
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

from clustersim.common.cached_method import cached_by
from clustersim.common.errors import InputError
from clustersim.planning.layouts.config_keys import (
    CP,
    DP,
    ENCODER_DEGREES,
    ETP,
    MICROBATCH,
    PP,
    SCHEDULE,
    SEQUENCE_PARALLEL,
    TP,
)
from clustersim.planning.layouts.executors import PackedScenario
from clustersim.scenario import Scenario
from clustersim.scenario.file_cache import ReadCache
from clustersim.scenario.loaders import bidirectional_degrees
from clustersim.scenario.resolved import ResolvedScenario
from clustersim.scenario.validation_rules.consistency import find_problems

_POSITIVE_INTEGER: Final = re.compile("[1-9][0-9]{0,8}")
_BOOLEANS: Final = {"true": True, "false": False}
_INTEGER_KEYS: Final = (TP, CP, PP, DP, ETP, *ENCODER_DEGREES, MICROBATCH)
_SHARED_FIELDS: Final = ("cost", "degradations", "model", "framework", "reliability")


class DerivedScenarios:
    """Resolved scenarios of a scenario's layouts."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario, self._read_cache = scenario, ReadCache(scenario.cached_reads)

    def resolve(self, overrides: tuple[str, ...]) -> ResolvedScenario:
        """Resolve with overrides as in `--set`; raise InputError with the first message if the layout is illegal."""
        integer_overrides, _ = _split_overrides(overrides)
        resolved = _with_numbers(self._resolved(overrides), integer_overrides)
        violations = find_problems(resolved)
        if violations:
            raise InputError(violations[0])
        return resolved

    @cached_by(lambda _, overrides: _split_overrides(overrides)[1])
    def _resolved(self, overrides: tuple[str, ...]) -> ResolvedScenario:
        """One scenario of all overrides that differ in integers, which the caller replaces."""
        return self._with_shared_objects(_resolve(self._scenario, overrides, self._read_cache))

    def _with_shared_objects(self, resolved: ResolvedScenario) -> ResolvedScenario:
        """Replace equal objects by the scenario's own, so that caches keyed by identity hit."""
        scenario = self._scenario
        shared = {
            name: getattr(scenario, name)
            for name in _SHARED_FIELDS
            if getattr(scenario, name) == getattr(resolved, name)
        }
        return replace(resolved, **shared)


def _resolve(scenario: Scenario, overrides: tuple[str, ...], read_cache: ReadCache) -> ResolvedScenario:
    try:
        return scenario.resolve_unchecked(overrides, read_cache)
    except InputError as error:
        lines = str(error).splitlines()  # a count and a line for each, or one after the file name
        message = lines[1] if len(lines) > 1 else lines[0].partition(": ")[2]
        raise InputError(message.strip(" -")) from error


@lru_cache(maxsize=4)
def derived_scenarios(packed: PackedScenario) -> DerivedScenarios:
    """The derived scenarios of a packed scenario, cached per process."""
    return DerivedScenarios(packed())


def _split_overrides(overrides: tuple[str, ...]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Integer overrides by key, and the other overrides plus the names of these keys.

    If a whole section is overridden nothing is split off, since the order matters then.
    """
    key_values = [override.partition("=")[::2] for override in overrides]
    if any("." not in key for key, _ in key_values if key != SCHEDULE):
        return {}, overrides
    integer_overrides: dict[str, Any] = {}
    other_overrides: list[str] = []
    for (key, value), override in zip(key_values, overrides, strict=True):
        if key in _INTEGER_KEYS and _POSITIVE_INTEGER.fullmatch(value):
            integer_overrides[key] = int(value)
        elif key == SEQUENCE_PARALLEL and value in _BOOLEANS:
            integer_overrides[key] = _BOOLEANS[value]
        else:
            other_overrides.append(override)
    return integer_overrides, (*other_overrides, *sorted(integer_overrides))


def _with_numbers(resolved: ResolvedScenario, integer_overrides: dict[str, Any]) -> ResolvedScenario:
    """The resolved scenario with other numbers; raise InputError for a bidirectional pipeline with odd degrees."""
    degrees = {key.removeprefix("layout."): value for key, value in integer_overrides.items() if key != MICROBATCH}
    if resolved.layout.mirrored and {PP, DP} & integer_overrides.keys():
        configured = resolved.layout.as_configured
        degrees["pp"], degrees["dp"] = bidirectional_degrees(
            degrees.get("pp", configured.pp), degrees.get("dp", configured.dp)
        )
    training = resolved.training
    if MICROBATCH in integer_overrides:
        training = replace(training, microbatch=integer_overrides[MICROBATCH])
    return replace(resolved, layout=replace(resolved.layout, **degrees), training=training)
