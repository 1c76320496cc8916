"""What is measured on this machine, for how long, and into which record?

    clustersim calibrate --for SCENARIO.yaml -o RECORD.json    a scenario: its ranks' kernels, a layer of its
                                                               model, the host, and steps that check the
                                                               prediction
    clustersim calibrate --grid                                kernels of a general grid (the default)
    clustersim calibrate --grid --formats mxfp8 nvfp4          the part of it in some number formats, and
                                                               casts into them
    clustersim calibrate --presets [MODEL ...]                 layers of models at tp 1, 2, 4, 8, microbatch 1,
                                                               2 and sequences of 2k, 4k, 8k

All on one device: the compute kernels of a rank of any layout can be measured on one. The options may be
combined, and run one after the other into the same record. The plan is printed before it starts.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from calibrate.report.format import summary_lines
from calibrate.torch_requirement import require_torch
from calibrate.typed_command import typed_command
from clustersim.common.dtypes import COMPUTE_DTYPES, DType
from clustersim.common.errors import InputError
from clustersim.common.files import require_writable
from clustersim.common.units import Dimension, Seconds, parse_quantity
from clustersim.cost.calibration_record import CalibrationRecord
from clustersim.hardware.accelerator import load_accelerator
from clustersim.scenario import Scenario

if TYPE_CHECKING:  # these modules need torch
    from calibrate.devices.device import TorchDevice
    from calibrate.stages.stage import CalibrationContext

_DEFAULT_BUDGET: Final = "20min"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `command`."""
    parser.add_argument("--device", choices=("cuda", "cpu"), help="device to measure (default: cuda if available)")
    scenarios = "measure the kernels of these scenarios; layer, host launches and steps: of the first one"
    parser.add_argument(
        "--for", dest="scenarios", metavar="SCENARIO", nargs="+", action="extend", default=[], help=scenarios
    )
    changes = "override a key of the scenarios, e.g. layout.tp=4"
    parser.add_argument("--set", dest="overrides", metavar="KEY=VALUE", action="append", default=[], help=changes)
    parser.add_argument(
        "--grid", action="store_true", help="measure a general grid of kernels (default without --for and --presets)"
    )
    formats = [dtype.value for dtype in COMPUTE_DTYPES]
    some = f"number formats of the grid (default: those of {', '.join(formats)} that the device supports)"
    parser.add_argument("--formats", metavar="FORMAT", nargs="+", choices=formats, default=[], help=some)
    models = "measure layers of preset models at common parallel degrees (default: Llama 3 8B, 70B and 405B)"
    parser.add_argument("--presets", metavar="MODEL", nargs="*", help=models)
    parser.add_argument(
        "--budget", default=_DEFAULT_BUDGET, metavar="TIME", help=f"total measurement time (default: {_DEFAULT_BUDGET})"
    )
    only = "print what would be measured, for how long and into which file, and exit"
    parser.add_argument("--plan-only", "--dry-run", action="store_true", help=only)
    parser.add_argument(
        "--accelerator", metavar="NAME", help="name of the device's packaged accelerator, or an accelerator file"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="RECORD.json",
        help="record to write; an existing one is continued (default: ACCELERATOR.record.json)",
    )


def command(options: argparse.Namespace) -> None:
    """Measure what was requested into a record; raise InputError where that is not possible."""
    require_torch()
    from calibrate.stages.plan import format_plan, plan_session
    from calibrate.stages.run import run_session

    budget = _parse_budget(options.budget)
    context = _build_context(options, budget)
    plan = plan_session(context, budget)
    if options.plan_only:
        print(format_plan(context, plan))
        return
    print(format_plan(context, plan), file=sys.stderr, flush=True)
    context.session.save()
    try:
        record = run_session(context, plan)
    except KeyboardInterrupt:
        _finish_interrupted(context)
        raise
    print(summarize_record(record, context.session.path))


def summarize_record(record: CalibrationRecord, path: Path) -> str:
    """The content of a record, and how to use it, as text."""
    hints = [f"use: clustersim run SCENARIO.yaml --set cost.record={path}", f"see: clustersim calibrate report {path}"]
    return "\n".join([f"{path}: {record.device.name}", *(f"  {line}" for line in summary_lines(record)), *hints])


def _build_context(options: argparse.Namespace, budget: Seconds) -> "CalibrationContext":
    """The measurement context; nothing is measured or written before everything is known to be possible."""
    from calibrate.devices.device import accelerator_name, find_device
    from calibrate.kernels.selection import KernelRequest, requested_kernels
    from calibrate.kernels.session import KernelSession, session_conditions
    from calibrate.kernels.timing import MeasurementMethod
    from calibrate.stages.stage import CalibrationContext

    if options.overrides and not options.scenarios:
        raise InputError("--set changes a scenario; name one with --for")
    if options.formats and not _uses_grid(options):
        raise InputError("--formats are of the grid, a scenario has its own; add --grid")
    scenarios = [Scenario.load(Path(path), options.overrides) for path in options.scenarios]
    device, method = find_device(options.device), MeasurementMethod()
    accelerator = load_accelerator(accelerator_name(device, options.accelerator))
    _warn_other_accelerators(scenarios, accelerator.name, device)
    path = Path(options.output or f"{accelerator.name}.record.json")
    require_writable(path)
    measurement_conditions = session_conditions(device, typed_command(sys.argv), method)
    session = KernelSession(path, device.describe(accelerator.name), measurement_conditions)
    request = KernelRequest(
        scenarios, _requested_presets(options), _uses_grid(options), budget, tuple(map(DType, options.formats))
    )
    kernels = requested_kernels(request, device)
    first_scenario = scenarios[0] if scenarios else None
    return CalibrationContext(device, accelerator, session, method, kernels, _describe_request(options), first_scenario)


def _warn_other_accelerators(scenarios: Sequence[Scenario], measured_accelerator: str, device: "TorchDevice") -> None:
    """Warn about scenarios of other accelerators: their shapes can be measured here, their times cannot."""
    other_accelerators = dict.fromkeys(scenario.cluster.accelerator.name for scenario in scenarios)
    other_accelerators.pop(measured_accelerator, None)
    if other_accelerators:
        print(
            f"warning: --for: the scenario runs on {', '.join(other_accelerators)}, and this is {device.name} "
            f"({measured_accelerator}): the record "
            f"will be of {measured_accelerator}, and answer for {', '.join(other_accelerators)} only if the scenario "
            "says how it scales "
            "(cost.record: {file: ..., scale: ...})",
            file=sys.stderr,
        )


def _finish_interrupted(context: "CalibrationContext") -> None:
    from calibrate.stages.run import finish_session

    finish_session(context)
    path = context.session.path
    print(f"\nstopped: {path} holds what was measured; the same command continues with the rest", file=sys.stderr)


def _parse_budget(text: str) -> Seconds:
    try:
        seconds = parse_quantity(text, Dimension.TIME)
    except InputError as error:
        raise InputError(f"--budget: {error}; for minutes write {_DEFAULT_BUDGET}") from error
    if seconds <= 0.0:
        raise InputError(f"--budget {text} is no time to measure in; write e.g. {_DEFAULT_BUDGET}")
    return seconds


def _describe_request(options: argparse.Namespace) -> str:
    """The request as text."""
    presets = " ".join(_requested_presets(options))
    grid = (
        f"a general grid{' in ' * bool(options.formats)}{' and '.join(options.formats)}" if _uses_grid(options) else ""
    )
    labels = (*options.scenarios, presets and f"layers of {presets}", grid)
    return " and ".join(filter(None, labels))


def _requested_presets(options: argparse.Namespace) -> Sequence[str]:
    from calibrate.kernels.kernel_grid import PRESET_MODELS

    return () if options.presets is None else options.presets or PRESET_MODELS


def _uses_grid(options: argparse.Namespace) -> bool:
    return bool(options.grid or not (options.scenarios or options.presets is not None))
