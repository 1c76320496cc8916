"""What will a session of measuring do, and how long will it take?

Each part has its share of the budget, as its minutes of twenty say. What cannot be measured here, or is there already,
is said, and its time goes to the kernels, where there are any to measure. A part that has found what it looks for ends
before its time; what it builds or compiles comes on top.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from calibrate.stages.burn_in_stage import Soak
from calibrate.stages.holdout_stage import Residual
from calibrate.stages.host_stage import Host
from calibrate.stages.in_situ_stage import Chain
from calibrate.stages.kernel_stage import Kernels
from calibrate.stages.stage import Bench, Part
from clustersim.common.errors import InputError
from clustersim.common.units import Seconds, format_seconds

_MEASURED: Final[tuple[Part, ...]] = (Kernels(), Chain(), Host(), Residual())
PARTS: Final[tuple[Part, ...]] = (Soak(before=_MEASURED), *_MEASURED)
"""In their order: each rests on those before it."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A part with its time and what it will do; seconds: 0 where it is not measured, and words say why."""

    part: Part
    seconds: Seconds
    words: str


def planned(bench: Bench, budget: Seconds, parts: Sequence[Part] = PARTS) -> list[Planned]:
    """What a session will do; raise InputError where the budget is too small for a part."""
    why = {part.name: part.obstacle(bench) or "there already" * (not part.due(bench)) for part in parts}
    whole = sum(part.minutes for part in parts)
    shares = {part.name: 0.0 if why[part.name] else part.minutes / whole for part in parts}
    if shares[Kernels.name]:
        shares[Kernels.name] += 1.0 - sum(shares.values())
    _require_enough(budget, parts, shares)
    return [Planned(part, budget * shares[part.name], why[part.name] or part.words(bench)) for part in parts]


def _require_enough(budget: Seconds, parts: Sequence[Part], shares: dict[str, float]) -> None:
    for part in parts:
        share = shares[part.name]
        if share and budget * share < part.least:
            least = -(-part.least // share)
            raise InputError(
                f"--budget: {format_seconds(budget)} is too little: {part.name} takes {share:.0%} of it, and at least "
                f"{format_seconds(part.least)}; give {least:.0f}s or more"
            )


def plan_text(bench: Bench, plan: Sequence[Planned]) -> str:
    """The plan, for people."""
    return "\n".join(_lines(bench, plan))


def _lines(bench: Bench, plan: Sequence[Planned]) -> Iterator[str]:
    whole, device, path = sum(item.seconds for item in plan), bench.record.device, bench.session.path
    if not whole:
        yield f"{path} has all that was asked for of {device.name} ({device.accelerator})"
        return
    there = "goes on with" if path.exists() else "writes"
    yield f"measures {device.name} ({device.accelerator}) for about {format_seconds(whole)}, and {there} {path}:"
    for element in plan:
        time = format_seconds(round(element.seconds)) if element.seconds else "-"
        yield f"  {element.part.name:<9} {time:>12}  {element.words}"
    yield "  what is done is kept: interrupted (Ctrl-C), the same command goes on with the rest"
