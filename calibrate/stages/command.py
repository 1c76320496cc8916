"""What is measured on this machine, for how long, and into which record?

    clustersim calibrate --for SCENARIO.yaml -o RECORD.json    a scenario: its ranks' kernels, a layer of its model, the
                                                               host, and steps that check the prediction
    clustersim calibrate --grid                                kernels of a general grid (also if nothing is asked for)
    clustersim calibrate --grid --formats mxfp8 nvfp4          of it what is in some number formats, and casts into them
    clustersim calibrate --presets [MODEL ...]                 layers of models at tp 1, 2, 4, 8, microbatch 1, 2 and
                                                               sequences of 2k, 4k, 8k

All on one device: what a rank of any layout computes can be measured on one. They may be asked for together, and one
after the other into the same record. What will be done, and for how long, is said before it begins.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from calibrate.report.format import summary_lines
from calibrate.torch_requirement import require_torch
from clustersim.common.dtypes import COMPUTE_DTYPES, DType
from clustersim.common.errors import InputError
from clustersim.common.files import require_writable
from clustersim.common.units import Dimension, Seconds, parse_quantity
from clustersim.cost.calibration_record import CalibrationRecord
from clustersim.hardware.accelerator import load_accelerator
from clustersim.scenario import Scenario

if TYPE_CHECKING:  # these need torch
    from calibrate.devices.device import TorchDevice
    from calibrate.stages.stage import Bench

_BUDGET: Final = "20min"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `command`."""
    parser.add_argument("--device", choices=("cuda", "cpu"), help="what is measured (default: the best there is)")
    scenarios = "measure what these scenarios' ranks run; layer, host and steps are the first one's"
    parser.add_argument(
        "--for", dest="scenarios", metavar="SCENARIO", nargs="+", action="extend", default=[], help=scenarios
    )
    changes = "change a value of the scenarios, such as layout.tp=4"
    parser.add_argument("--set", dest="overrides", metavar="KEY=VALUE", action="append", default=[], help=changes)
    parser.add_argument("--grid", action="store_true", help="measure a general grid (also if nothing is asked for)")
    formats = [item.value for item in COMPUTE_DTYPES]
    some = f"of the grid these number formats (default: what the device has of {', '.join(formats)})"
    parser.add_argument("--formats", metavar="FORMAT", nargs="+", choices=formats, default=[], help=some)
    models = "measure layers of models at usual degrees (default: Llama 3 8B, 70B and 405B)"
    parser.add_argument("--presets", metavar="MODEL", nargs="*", help=models)
    parser.add_argument("--budget", default=_BUDGET, metavar="TIME", help=f"time for all parts (default: {_BUDGET})")
    only = "say what would be measured, for how long and into which file, and end"
    parser.add_argument("--plan-only", "--dry-run", action="store_true", help=only)
    parser.add_argument("--accelerator", metavar="NAME", help="what clustersim calls the device, or a file of your own")
    parser.add_argument(
        "-o",
        "--output",
        metavar="RECORD.json",
        help="the record; gone on with, if it is there (default: ACCELERATOR.record.json)",
    )


def command(options: argparse.Namespace) -> None:
    """Measure what was asked for into a record; raise InputError where it cannot be."""
    require_torch()
    from calibrate.stages.plan import plan_text, planned
    from calibrate.stages.run import run

    budget = _budget(options.budget)
    bench = _bench(options, budget)
    plan = planned(bench, budget)
    if options.plan_only:
        print(plan_text(bench, plan))
        return
    print(plan_text(bench, plan), file=sys.stderr, flush=True)
    bench.session.save()
    try:
        record = run(bench, plan)
    except KeyboardInterrupt:
        _stopped(bench)
        raise
    print(summary(record, bench.session.path))


def summary(record: CalibrationRecord, path: Path) -> str:
    """What a record holds now, and how it is used, for people."""
    use = [f"use: clustersim run SCENARIO.yaml --set cost.record={path}", f"see: clustersim calibrate report {path}"]
    return "\n".join([f"{path}: {record.device.name}", *(f"  {line}" for line in summary_lines(record)), *use])


def _bench(options: argparse.Namespace, budget: Seconds) -> "Bench":
    """What is measured on what; nothing is, or written, before that is known to be possible."""
    from calibrate.devices.device import accelerator_of, find
    from calibrate.kernels.selection import Wishes, kernels_for
    from calibrate.kernels.session import Session, conditions
    from calibrate.kernels.timing import Method
    from calibrate.stages.stage import Bench

    if options.overrides and not options.scenarios:
        raise InputError("--set changes a scenario; name one with --for")
    if options.formats and not _grid(options):
        raise InputError("--formats are of the grid, a scenario has its own; add --grid")
    scenarios = [Scenario.load(Path(path), options.overrides) for path in options.scenarios]
    device, method = find(options.device), Method()
    accelerator = load_accelerator(accelerator_of(device, options.accelerator))
    _warn_of_others(scenarios, accelerator.name, device)
    path = Path(options.output or f"{accelerator.name}.record.json")
    require_writable(path)
    now = conditions(device, _typed(sys.argv), method)
    session = Session(path, device.describe(accelerator.name), now)
    wishes = Wishes(scenarios, _presets(options), _grid(options), budget, tuple(map(DType, options.formats)))
    asked = kernels_for(wishes, device)
    first = scenarios[0] if scenarios else None
    return Bench(device, accelerator, session, method, asked, _wished(options), first)


def _warn_of_others(scenarios: Sequence[Scenario], here: str, device: "TorchDevice") -> None:
    """A scenario of another accelerator: its shapes can be measured here, its times cannot."""
    others = dict.fromkeys(scenario.cluster.accelerator.name for scenario in scenarios)
    others.pop(here, None)
    if others:
        print(
            f"warning: --for: the scenario runs on {', '.join(others)}, and this is {device.name} ({here}): the record "
            f"will be of {here}, and answer for {', '.join(others)} only if the scenario says how it scales "
            "(cost.record: {file: ..., scale: ...})",
            file=sys.stderr,
        )


def _stopped(bench: "Bench") -> None:
    from calibrate.stages.run import finish

    finish(bench)
    path = bench.session.path
    print(f"\nstopped: {path} holds what was measured; the same command goes on with the rest", file=sys.stderr)


def _budget(text: str) -> Seconds:
    try:
        seconds = parse_quantity(text, Dimension.TIME)
    except InputError as error:
        raise InputError(f"--budget: {error}; for minutes write {_BUDGET}") from error
    if seconds <= 0.0:
        raise InputError(f"--budget {text} is no time to measure in; write e.g. {_BUDGET}")
    return seconds


def _wished(options: argparse.Namespace) -> str:
    """What was asked for, in words."""
    presets = " ".join(_presets(options))
    grid = f"a general grid{' in ' * bool(options.formats)}{' and '.join(options.formats)}" if _grid(options) else ""
    words = (*options.scenarios, presets and f"layers of {presets}", grid)
    return " and ".join(filter(None, words))


def _presets(options: argparse.Namespace) -> Sequence[str]:
    from calibrate.kernels.kernel_grid import MODELS

    return () if options.presets is None else options.presets or MODELS


def _grid(options: argparse.Namespace) -> bool:
    return bool(options.grid or not (options.scenarios or options.presets is not None))


def _typed(words: Sequence[str]) -> str:
    """The command as a user types it, started either way."""
    return shlex.join(["clustersim", "calibrate", *words[1 + (words[1:2] == ["calibrate"]) :]])
