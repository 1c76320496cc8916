"""How is a planned session run? Part after part, each written as soon as it is done.

A part that the device, PyTorch or the scenario does not allow is said, and the others are measured; what leaves the
device unusable ends the session. Whatever ends it, the record has all rows up to then.
"""

import sys
from collections.abc import Sequence
from time import monotonic
from typing import Final

from calibrate.fit.record import fitted
from calibrate.parts.part import Bench
from calibrate.parts.plan import Planned
from clustersim.cost.record import Record
from clustersim.errors import InputError
from clustersim.units import format_seconds

_LOST: Final = ("CUDA error", "HIP error")  # of a device that nothing can be asked of any more


def run(bench: Bench, plan: Sequence[Planned]) -> Record:
    """Measure what is planned, fit the record and write it."""
    try:
        for each in plan:
            if each.seconds:
                _measure(bench, each)
    finally:
        bench.session.save()
    return finish(bench)


def finish(bench: Bench) -> Record:
    """Fit what there is, and write it."""
    return bench.session.finish(bench.device.conditions(), lambda record: fitted(record, bench.accelerator))


def _measure(bench: Bench, planned: Planned) -> None:
    began = monotonic()
    try:
        found = planned.part.measure(bench, planned.seconds)
    except InputError as reason:
        found = f"not measured: {reason}"
    except RuntimeError as error:  # PyTorch's own
        if any(word in str(error) for word in _LOST):
            raise
        found = f"not measured: {next(iter(str(error).splitlines()), type(error).__name__)}"
    bench.session.save()
    bench.device.release()
    _say(f"{planned.part.name}: {found} ({format_seconds(round(monotonic() - began))})")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
