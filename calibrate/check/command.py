"""Command line of the check of a prediction against real training steps.

    python -m calibrate --check SCENARIO
    torchrun --nproc-per-node 2 -m calibrate --check SCENARIO --set layout.tp=2

The scenario's model is built in PyTorch and trained for some steps, alternating with measuring the kernels
(and collectives) that the scenario's ranks run; the prediction uses these measurements, or a record
(`--record`).
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from clustersim.common.errors import InputError
from clustersim.common.files import write_text_atomically
from clustersim.scenario import Scenario

if TYPE_CHECKING:
    from calibrate.check.measurement import HostMeasurement

DEFAULT_ROUNDS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run_check`."""
    parser.add_argument("--check", metavar="SCENARIO", required=True, help="scenario whose model is trained")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], dest="changes", help="override a key of the scenario"
    )
    parser.add_argument("--record", metavar="FILE", help="predict from this record instead of measuring kernels")
    parser.add_argument(
        "--steps",
        type=int,
        default=3 * DEFAULT_ROUNDS,
        metavar="N",
        help=f"number of steps to run (default: {3 * DEFAULT_ROUNDS})",
    )
    parser.add_argument(
        "--layers", type=int, metavar="N", help="layers of the model (default: as many as fit in memory)"
    )
    parser.add_argument("--device", metavar="DEVICE", help="cuda or cpu (default: cuda if available)")
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON; - is stdout")


def run_check(options: argparse.Namespace, host: "HostMeasurement") -> None:
    """Check one scenario, with as many processes as its layout has ranks; the first one writes and reports errors.

    host: measures the host.
    """
    from calibrate.check.check_session import CheckRequest, check_scenario
    from calibrate.check.context import exit_immediately, join_processes, resolve_world

    if options.steps < 1:
        raise InputError(f"--steps: {options.steps} is too few; 1 is the fewest")
    scenario = Scenario.load(options.check, options.changes)
    world = resolve_world(scenario)
    rounds = min(DEFAULT_ROUNDS, options.steps)
    record = None if options.record is None else Path(options.record)
    request = CheckRequest(host, rounds, -(-options.steps // rounds), options.layers, record)
    try:
        with join_processes(world, options.device) as context:
            comparison = check_scenario(scenario, context, request)
            if context.is_first_rank:
                _write_result(comparison.to_text(), comparison.to_json(), options.json)
    except InputError:
        if world.rank:
            raise SystemExit(2) from None
        raise
    if world.world_size > 1:
        exit_immediately()


def _write_result(text: str, content: str, target: str | None) -> None:
    if target == "-":
        print(content)
        return
    print(text)
    if target is not None:
        write_text_atomically(target, content + "\n")
