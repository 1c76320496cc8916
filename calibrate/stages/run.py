"""How is a planned session run? Part after part, each written as soon as it is done.

A part that the device, PyTorch or the scenario does not allow is said, and the others are measured; what leaves the
device unusable ends the session. Whatever ends it, the record has all rows up to then.
"""

import sys
from collections.abc import Sequence
from time import monotonic

from calibrate.devices.device import DeviceLostError
from calibrate.fit.record_fit import fitted
from calibrate.kernels.compiler import lacks, sentence
from calibrate.kernels.measure import KernelFailedError
from calibrate.stages.plan import Planned
from calibrate.stages.stage import Bench
from clustersim.common.errors import InputError
from clustersim.common.units import format_seconds
from clustersim.cost.calibration_record import CalibrationRecord


def run(bench: Bench, plan: Sequence[Planned]) -> CalibrationRecord:
    """Measure what is planned, fit the record and write it."""
    try:
        for planned in plan:
            if planned.seconds:
                _measure(bench, planned)
    finally:
        bench.session.save()
    return finish(bench)


def finish(bench: Bench) -> CalibrationRecord:
    """Fit what there is, and write it."""
    return bench.session.finish(bench.device.conditions(), lambda record: fitted(record, bench.accelerator))


def _measure(bench: Bench, planned: Planned) -> None:
    began = monotonic()
    try:
        found = planned.part.measure(bench, planned.seconds)
    except InputError as reason:
        found = f"not measured: {reason}"
    except KernelFailedError as error:  # of a kernel that is looked at on the way; those asked for are written already
        bench.session.add(error.row)
        raise
    except RuntimeError as error:  # PyTorch's own
        if not bench.device.survives(error):
            then = "the record has what was measured before, and the same command goes on with the rest"
            raise DeviceLostError(planned.part.name, bench.device.name, sentence(error), then) from error
        found = f"not measured: {lacks(error) or sentence(error)}"
    bench.session.save()
    bench.device.release()
    _say(f"{planned.part.name}: {found} ({format_seconds(round(monotonic() - began))})")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
