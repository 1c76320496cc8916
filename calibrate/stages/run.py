"""How is a planned session run? Stage by stage, each written as soon as it has finished.

A stage that the device, PyTorch or the scenario does not allow is reported, and the others are run; an error
that leaves the device unusable ends the session. However it ends, the record has all samples up to then.
"""

import sys
from collections.abc import Sequence
from time import monotonic

from calibrate.devices.device import DeviceLostError
from calibrate.fit.record_fit import fit_record
from calibrate.kernels.compiler import missing_tool, summary_line
from calibrate.kernels.measure import KernelFailedError
from calibrate.stages.plan import PlannedStage
from calibrate.stages.stage import CalibrationContext
from clustersim.common.errors import InputError
from clustersim.common.units import format_seconds
from clustersim.cost.calibration_record import CalibrationRecord


def run_session(context: CalibrationContext, plan: Sequence[PlannedStage]) -> CalibrationRecord:
    """Run the planned stages, fit the record and write it."""
    try:
        for planned_stage in plan:
            if planned_stage.seconds:
                _run_stage(context, planned_stage)
    finally:
        context.session.save()
    return finish_session(context)


def finish_session(context: CalibrationContext) -> CalibrationRecord:
    """Fit the existing samples, and write the record."""
    return context.session.finish(context.device.conditions(), lambda record: fit_record(record, context.accelerator))


def _run_stage(context: CalibrationContext, planned: PlannedStage) -> None:
    start_time = monotonic()
    try:
        summary = planned.stage.measure(context, planned.seconds)
    except InputError as reason:
        summary = f"not measured: {reason}"
    except KernelFailedError as error:  # of an auxiliary kernel; requested ones are written already
        context.session.add(error.sample)
        raise
    except RuntimeError as error:  # errors of PyTorch
        if not context.device.is_usable_after(error):
            consequence = "the record has what was measured before, and the same command continues with the rest"
            raise DeviceLostError(planned.stage.name, context.device.name, summary_line(error), consequence) from error
        summary = f"not measured: {missing_tool(error) or summary_line(error)}"
    context.session.save()
    context.device.release_memory()
    _print_status(f"{planned.stage.name}: {summary} ({format_seconds(round(monotonic() - start_time))})")


def _print_status(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
