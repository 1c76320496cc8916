"""Which calibration is run? `python -m calibrate fit-published` for kernels, `fit-collectives` for collectives."""

import argparse
import sys

from calibrate.fit_collectives import add_arguments, print_errors
from calibrate.fit_published import command
from clustersim.errors import ClusterSimError


def main(arguments: list[str] | None = None) -> int:
    """Run one calibration command; return the exit status (2 for bad input)."""
    parser = argparse.ArgumentParser(prog="python -m calibrate", description="How fast is the real machine?")
    commands = parser.add_subparsers(metavar="COMMAND")
    fit = commands.add_parser(
        "fit-published",
        help="fit every shipped accelerator's kernel constants to the published measurements in calibrate/published",
    )
    fit.add_argument("--json", metavar="FILE", help="write the fits as JSON to FILE, or to standard output for -")
    fit.set_defaults(run=lambda options: command(options.json))
    collectives = commands.add_parser(
        "fit-collectives", help="compare predicted collectives with the published ones, and fit their constants"
    )
    add_arguments(collectives)
    collectives.set_defaults(run=print_errors)
    options = parser.parse_args(arguments)
    if "run" not in options:
        parser.print_help()
        return 0
    try:
        options.run(options)
    except ClusterSimError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
