"""Which kernels are measured on this machine, and into which record?

    clustersim calibrate --for SCENARIO.yaml -o RECORD.json    kernels of a scenario's ranks, as they are sharded
    clustersim calibrate --grid                                a general grid (also if nothing is asked for)
    clustersim calibrate --presets [MODEL ...]                 layers of models at tp 1, 2, 4, 8, microbatch 1, 2 and
                                                               sequences of 2k, 4k, 8k

All on one device: what a rank of any layout computes can be measured on one. They may be asked for together, and one
after the other into the same record. Besides kernels: copies, the launch interval, a matmul beside a copy.
"""

import argparse
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

from calibrate.torch_door import require_torch
from clustersim.cost.record import KernelRow, Record, signature
from clustersim.errors import InputError
from clustersim.hardware.accelerator import load_accelerator
from clustersim.units import Dimension, Seconds, parse_quantity
from clustersim.workload.kernels import Kernel

if TYPE_CHECKING:  # these need torch
    from calibrate.devices.device import TorchDevice
    from calibrate.kernels.progress import Advance
    from calibrate.kernels.timing import Method

_BUDGET: Final = "5min"
_APART: Final = 0.1  # half of what lies between p5 and p95, as a part of the median
_REASONS: Final = 5  # why kernels are missing, that are printed


def measure(
    kernels: Sequence[Kernel],
    device: "TorchDevice",
    *,
    method: "Method | None" = None,
    budget: Seconds | None = None,
    advance: "Advance | None" = None,
) -> list[KernelRow]:
    """Measure kernels, each signature once; rows in the order of the kernels.

    method: `timing.Method()` if none is given, `timing.QUICK` for a comparison within one run; budget: seconds for all
    of them (none: as long as the method takes); advance: is called after each with the name of the kernel.
    """
    from calibrate.kernels.session import Parts, measured
    from calibrate.kernels.shapes import ROUGHLY
    from calibrate.kernels.timing import Method

    rows = {}
    for row in measured(kernels, device, Parts(budget, ROUGHLY.seconds), method or Method()):
        rows[row.signature] = row
        if advance is not None:
            advance(row.name)
    return [rows[known] for known in dict.fromkeys(map(signature, kernels)) if known in rows]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `command`."""
    parser.add_argument("--device", choices=("cuda", "cpu"), help="what is measured (default: the best there is)")
    scenarios = "measure the kernels that these scenarios' ranks run"
    parser.add_argument(
        "--for", dest="scenarios", metavar="SCENARIO", nargs="+", action="extend", default=[], help=scenarios
    )
    changes = "change a value of the scenarios, such as layout.tp=4"
    parser.add_argument("--set", dest="overrides", metavar="KEY=VALUE", action="append", default=[], help=changes)
    parser.add_argument("--grid", action="store_true", help="measure a general grid (also if nothing is asked for)")
    models = "measure layers of models at usual degrees (default: Llama 3 8B, 70B and 405B)"
    parser.add_argument("--presets", metavar="MODEL", nargs="*", help=models)
    parser.add_argument("--budget", default=_BUDGET, metavar="TIME", help=f"time for all kernels (default: {_BUDGET})")
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
    from calibrate.devices.device import accelerator_of, find
    from calibrate.fit.record import fitted
    from calibrate.kernels.run import Wishes, run
    from calibrate.kernels.session import Session, conditions
    from calibrate.kernels.timing import Method

    if options.overrides and not options.scenarios:
        raise InputError("--set changes a scenario; name one with --for")
    budget = _budget(options.budget)
    device, method = find(options.device), Method()
    wishes = Wishes(options.scenarios, options.overrides, _presets(options), _grid(options), budget)
    accelerator = load_accelerator(accelerator_of(device, options.accelerator))
    described = device.describe(accelerator.name)
    path = Path(options.output or f"{accelerator.name}.record.json")
    session = Session(path, described, conditions(device, _typed(sys.argv), method))
    try:
        record = run(session, device, wishes, method, accelerator)
    except KeyboardInterrupt:
        session.finish(device.conditions(), lambda record: fitted(record, accelerator))
        print(f"\nstopped: {path} holds what was measured; the same command goes on with the rest", file=sys.stderr)
        raise
    print(summary(record, path))


def _budget(text: str) -> Seconds:
    try:
        seconds = parse_quantity(text, Dimension.TIME)
    except InputError as error:
        raise InputError(f"--budget: {error}; for minutes write 5min") from error
    if seconds <= 0.0:
        raise InputError(f"--budget {text} is no time to measure in; write e.g. {_BUDGET}")
    return seconds


def _presets(options: argparse.Namespace) -> Sequence[str]:
    from calibrate.kernels.shapes import MODELS

    return () if options.presets is None else options.presets or MODELS


def _grid(options: argparse.Namespace) -> bool:
    return bool(options.grid or not (options.scenarios or options.presets is not None))


def _typed(words: Sequence[str]) -> str:
    """The command as a user types it, started either way."""
    return shlex.join(["clustersim", "calibrate", *words[1 + (words[1:2] == ["calibrate"]) :]])


def summary(record: Record, path: Path) -> str:
    """What a record holds, and why kernels are missing from it, for people."""
    outcomes = Counter(row.outcome for row in record.kernels)
    counted = ", ".join(f"{many} {outcome.value.replace('_', ' ')}" for outcome, many in outcomes.items())
    reasons = Counter(row.source for row in record.kernels if row.time is None)
    lines = [f"  {many} x {reason}" for reason, many in reasons.most_common(_REASONS)]
    fit = record.kernel_fit
    errors = {} if fit is None else fit.residuals
    if errors:
        rows = sum(each.rows for each in errors.values())
        mean = sum(each.rows * each.error for each in errors.values()) / rows
        lines.append(
            f"  kernels that were not measured: a model fitted to {rows} of these, which it meets within {mean:.0%}"
        )
    lines += _doubts(record)
    return "\n".join([f"{path}: kernels of {record.device.name}: {counted}", *lines, f"use: cost: {{record: {path}}}"])


def _doubts(record: Record) -> list[str]:
    """What a user should know who trusts the record."""
    times = [row.time.dispersion for row in record.kernels if row.time is not None]
    apart = [each for each in times if each is not None]
    middle = median(apart) if apart else 0.0
    if middle < _APART:
        return []
    return [
        f"warning: half of the kernels differ by {middle:.0%} or more from run to run: this machine does other work, "
        "or its clock changes; delete the record and measure again when it is quiet"
    ]
