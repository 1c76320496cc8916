"""Which calibration is run? The command line of `clustersim calibrate`, and of `python -m calibrate`.

Without a subcommand kernels are measured (`--for`, `--grid`, `--presets`) or predictions checked (`--check`). What
needs torch is imported by the command that needs it.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Final, NamedTuple

from clustersim.errors import ClusterSimError

BAD_INPUT: Final = 2
INTERRUPTED: Final = 130


class Command(NamedTuple):
    """module: has `add_arguments(parser)` and `command(options)`, and imports torch only inside them."""

    module: str
    answers: str


MEASURE: Final = "calibrate.kernels"
CHECK: Final = "calibrate.check.command"
COMMANDS: Final = {
    "collectives": Command("calibrate.collectives", "measure collectives; start it with torchrun"),
    "import-nccl-tests": Command("calibrate.nccl_tests", "take over what nccl-tests printed, as text or JSON"),
    "derive": Command("calibrate.derive", "carry a record over to an accelerator with the same compute die"),
    "fit-published": Command(
        "calibrate.fit_published",
        "fit every shipped accelerator's kernel constants to the published measurements in calibrate/published",
    ),
    "fit-collectives": Command(
        "calibrate.fit_collectives", "compare predicted collectives with the published ones, and fit their constants"
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one calibration command; return the exit status (2 for bad input)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(given)
    except ClusterSimError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(given: list[str]) -> int:
    if given and given[0] in COMMANDS:
        chosen = COMMANDS[given[0]]
        return _command(chosen.module, f"clustersim calibrate {given[0]}", chosen.answers, given[1:])
    if any(argument == "--check" or argument.startswith("--check=") for argument in given):
        return _command(CHECK, "clustersim calibrate", "Does a real training step take what is predicted?", given)
    return _command(MEASURE, "clustersim calibrate", "How fast is this machine?", given, epilog=_others())


def _command(module: str, program: str, answers: str, given: list[str], epilog: str | None = None) -> int:
    loaded = import_module(module)
    add_arguments: Callable[[argparse.ArgumentParser], None] = loaded.add_arguments
    command: Callable[[argparse.Namespace], int | None] = loaded.command
    parser = argparse.ArgumentParser(
        prog=program, description=answers, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    return command(parser.parse_args(given)) or 0


def _others() -> str:
    lines = [f"  {name:<18} {command.answers}" for name, command in COMMANDS.items()]
    check = f"  {'--check SCENARIO':<18} run real training steps beside the prediction"
    return "\n".join(["other commands:", check, *lines])
