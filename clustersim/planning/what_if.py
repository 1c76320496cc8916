"""What would the step be with one thing changed?

Every case is the scenario with a single change, simulated again; nothing is extrapolated. A case costs about as long as
the scenario itself took, so what would take longer than is set aside for all of them is left out, and says so.

A change of links is compared with the scenario without its measured collectives, if it has any: they were measured on
links as they are, so the changed ones are modelled, and the difference would be that of measurement and model.
"""

import math
from collections.abc import Iterator
from time import perf_counter
from typing import Final

from clustersim.common.units import Seconds, format_seconds
from clustersim.planning.what_if_cases import CASES, Untried
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.what_if import Outcome, WhatIf, WhatIfs
from clustersim.scenario import Scenario
from clustersim.scenario.changes.links import without_measured_collectives
from clustersim.scenario.validation_rules.consistency import find_problems
from clustersim.scenario.validation_rules.warnings import slow_simulation_warnings
from clustersim.simulation import simulate

BUDGET: Final[Seconds] = 10.0
_MODELLED: Final = "collectives are modelled before and after, as measured ones hold for the links as they are"


def what_ifs(result: SimulationResult, budget: Seconds = BUDGET) -> WhatIfs:
    """Every case, as far as all of them take `budget` seconds of this computer (inf: however long they take)."""
    rate = result.tokens_per_second / result.rank_count
    return WhatIfs(result.step_time, rate, result.fits_in_memory, tuple(_answers(result, budget)))


def _answers(result: SimulationResult, budget: Seconds) -> Iterator[WhatIf]:
    """The cases one by one, with an eye on the clock."""
    started = perf_counter()
    modelled = _Modelled(result)
    for case in (item for item in CASES if item.concerns(result.scenario)):
        changed = case.change(result)
        if isinstance(changed, Untried):
            yield WhatIf(case.name, case.words, None, changed.reason)
            continue
        words = case.words + changed.more
        left = budget - (perf_counter() - started)
        needed = case.effort * result.wall_seconds + (modelled.needed if case.modelled else 0.0)
        if why := _obstacle(result.scenario, changed.scenario, needed, left):
            yield WhatIf(case.name, words, None, why)
            continue
        base = modelled() if case.modelled else result
        note = "" if base is result else _MODELLED
        yield WhatIf(case.name, words, _outcome(base, simulate(changed.scenario)), note)


class _Modelled:
    """The result without measured collectives, simulated when it is asked for; needed: seconds that this takes now."""

    def __init__(self, result: SimulationResult) -> None:
        self._scenario = without_measured_collectives(result.scenario)
        self._result = result if self._scenario is result.scenario else None
        self.needed: Seconds = 0.0 if self._result else result.wall_seconds

    def __call__(self) -> SimulationResult:
        if self._result is None:
            self._result, self.needed = simulate(self._scenario), 0.0
        return self._result


def _obstacle(scenario: Scenario, changed: Scenario, needed: Seconds, left: Seconds) -> str:
    """Why a changed scenario is not simulated: it is illegal, or takes longer than there is time; empty if it is."""
    found = find_problems(changed)
    if found:
        return found[0]
    if math.isinf(left):
        return ""
    slow = [
        warning for warning in slow_simulation_warnings(changed) if warning not in slow_simulation_warnings(scenario)
    ]
    if slow:
        return f"left out, as it takes long: {slow[0]}"
    return "" if needed <= left else _too_long(needed, left)


def _too_long(needed: Seconds, left: Seconds) -> str:
    there = f"{format_seconds(left)} is left" if left > 0.0 else "no time is left"
    return f"left out: simulating it takes some {format_seconds(needed)}, and {there} for what-if"


def _outcome(base: SimulationResult, changed: SimulationResult) -> Outcome:
    """The changed scenario beside the one that it is compared with."""
    before, after = (simulation_result.scenario.training for simulation_result in (base, changed))
    tokens = after.global_batch * after.sequence / (before.global_batch * before.sequence)
    parts, longer = base.breakdown.mean(), changed.breakdown.mean()
    return Outcome(
        step_time=changed.step_time,
        base=base.step_time,
        tokens=tokens,
        tokens_per_s_per_gpu=changed.tokens_per_second / changed.rank_count,
        peak_memory=changed.peak_memory,
        fits=changed.fits_in_memory,
        changes={part: seconds / tokens - parts[part] for part, seconds in longer.items()},
    )
