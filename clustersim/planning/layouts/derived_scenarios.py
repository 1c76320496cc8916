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
from clustersim.planning.layouts.executors import Shared
from clustersim.scenario import Scenario
from clustersim.scenario.loaders import bidirectional_degrees
from clustersim.scenario.resolved import ResolvedScenario
from clustersim.scenario.validation_rules.consistency import find_problems

_POSITIVE: Final = re.compile("[1-9][0-9]{0,8}")
_TRUTH: Final = {"true": True, "false": False}
_NUMBERS: Final = (TP, CP, PP, DP, ETP, MICROBATCH)
_OBJECTS: Final = ("cost", "disturbances", "model", "framework", "reliability")


class Drafts:
    """Setups of a scenario's layouts."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._read: dict[tuple[str, ...], ResolvedScenario] = {}

    def setup(self, overrides: tuple[str, ...]) -> ResolvedScenario:
        """With overrides as `--set` takes them; raise InputError for what is refused, with its first sentence alone."""
        numbers, rest = _parted(overrides)
        if rest not in self._read:
            self._read[rest] = self._shared(_read(self._scenario, overrides))
        setup = _with(self._read[rest], numbers)
        found = find_problems(setup)
        if found:
            raise InputError(found[0])
        return setup

    def _shared(self, setup: ResolvedScenario) -> ResolvedScenario:
        """With the scenario's own objects where they are equal, so that what follows from them is known to be."""
        own = self._scenario
        same = {item: getattr(own, item) for item in _OBJECTS if getattr(own, item) == getattr(setup, item)}
        return replace(setup, **same)


def _read(scenario: Scenario, overrides: tuple[str, ...]) -> ResolvedScenario:
    try:
        return scenario.resolve_unchecked(overrides)
    except InputError as error:
        lines = str(error).splitlines()  # a count and a line for each, or one behind the name of the file
        first = lines[1] if len(lines) > 1 else lines[0].partition(": ")[2]
        raise InputError(first.strip(" -")) from error


@lru_cache(maxsize=4)
def drafts_of(shared: Shared) -> Drafts:
    """Those of a scenario on its way; in each process the same."""
    return Drafts(shared())


def _parted(overrides: tuple[str, ...]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Numbers by their keys, and the other overrides with the names of these keys.

    Nothing is a number where a whole section is written anew, since the order matters then.
    """
    told = [override.partition("=")[::2] for override in overrides]
    if any("." not in key for key, _ in told if key != SCHEDULE):
        return {}, overrides
    numbers: dict[str, Any] = {}
    rest: list[str] = []
    for (key, value), item in zip(told, overrides, strict=True):
        if key in _NUMBERS and _POSITIVE.fullmatch(value):
            numbers[key] = int(value)
        elif key == SEQUENCE_PARALLEL and value in _TRUTH:
            numbers[key] = _TRUTH[value]
        else:
            rest.append(item)
    return numbers, (*rest, *sorted(numbers))


def _with(setup: ResolvedScenario, numbers: dict[str, Any]) -> ResolvedScenario:
    """The setup with other numbers; raise InputError for a pipeline that has no middle to run towards."""
    named = {key.removeprefix("layout."): number for key, number in numbers.items() if key != MICROBATCH}
    if setup.layout.mirrored and {PP, DP} & numbers.keys():
        own = setup.layout.as_configured
        named["pp"], named["dp"] = bidirectional_degrees(named.get("pp", own.pp), named.get("dp", own.dp))
    training = setup.training
    if MICROBATCH in numbers:
        training = replace(training, microbatch=numbers[MICROBATCH])
    return replace(setup, layout=replace(setup.layout, **named), training=training)
