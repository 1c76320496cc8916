"""What would the step be with one thing changed?

Every case is the scenario with a single change, simulated again; nothing is extrapolated. A case costs about as long as
the scenario itself took, so what would take longer than is set aside for all of them is left out, and says so.

A change of links is compared with the scenario without its measured collectives, if it has any: they were measured on
links as they are, so the changed ones are modelled, and the difference would be that of measurement and model.
"""

import math
from collections.abc import Iterator
from functools import cache
from time import perf_counter
from typing import Final

from clustersim.analysis.what_if import Outcome, WhatIf, WhatIfs
from clustersim.planning.cases import CASES, Case, Untried
from clustersim.result import Result
from clustersim.scenario import Scenario
from clustersim.scenario.changes.links import without_measured_collectives
from clustersim.scenario.checks import problems
from clustersim.scenario.warnings import long_waits
from clustersim.simulation import simulate
from clustersim.units import Seconds, format_seconds

BUDGET: Final[Seconds] = 10.0
_MODELLED: Final = "collectives are modelled before and after, as measured ones hold for the links as they are"


def what_ifs(result: Result, budget: Seconds = BUDGET) -> WhatIfs:
    """Every case, as far as all of them take `budget` seconds of this computer (inf: however long they take)."""
    rate = result.tokens_per_second / result.ranks
    return WhatIfs(result.step_time, rate, result.fits, tuple(_answers(result, budget)))


def _answers(result: Result, budget: Seconds) -> Iterator[WhatIf]:
    """The cases one by one, with an eye on the clock."""
    started = perf_counter()
    scenario = result.scenario
    plain = without_measured_collectives(scenario)

    @cache
    def modelled() -> Result:
        return result if plain is scenario else simulate(plain)

    for case in CASES:
        changed = case.change(scenario)
        left = budget - (perf_counter() - started)
        why = changed.reason if isinstance(changed, Untried) else _obstacle(result, case, changed, left)
        if isinstance(changed, Untried) or why:
            yield WhatIf(case.name, case.words, None, why)
        else:
            base = modelled() if case.modelled else result
            note = "" if base is result else _MODELLED
            yield WhatIf(case.name, case.words, _outcome(base, simulate(changed)), note)


def _obstacle(result: Result, case: Case, changed: Scenario, left: Seconds) -> str:
    """Why a changed scenario is not simulated: it is illegal, or takes longer than there is time; empty if it is."""
    found = problems(changed)
    if found:
        return found[0]
    if math.isinf(left):
        return ""
    slow = [each for each in long_waits(changed) if each not in long_waits(result.scenario)]
    if slow:
        return f"left out, as it takes long: {slow[0]}"
    needed = case.effort * result.wall
    return "" if needed <= left else _too_long(needed, left)


def _too_long(needed: Seconds, left: Seconds) -> str:
    there = f"{format_seconds(left)} is left" if left > 0.0 else "no time is left"
    return f"left out: simulating it takes some {format_seconds(needed)}, and {there} for what-if"


def _outcome(base: Result, changed: Result) -> Outcome:
    """The changed scenario beside the one that it is compared with."""
    before, after = (each.scenario.training for each in (base, changed))
    return Outcome(
        step_time=changed.step_time,
        base=base.step_time,
        tokens=after.global_batch * after.sequence / (before.global_batch * before.sequence),
        tokens_per_s_per_gpu=changed.tokens_per_second / changed.ranks,
        peak_memory=changed.peak_memory,
        fits=changed.fits,
    )
