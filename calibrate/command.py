"""Which calibration is run? The command line of `clustersim calibrate`, and of `python -m calibrate`.

Without a subcommand this machine is measured (`--for`, `--grid`, `--presets`) or predictions are checked (`--check`).
What needs torch is imported by the command that needs it.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Final, NamedTuple

from clustersim.common.data_files import is_path
from clustersim.common.errors import ClusterSimError, InputError, suggest_nearest

BAD_INPUT: Final = 2
INTERRUPTED: Final = 130


class Command(NamedTuple):
    """module: has `add_arguments(parser)` and `command(options)`, and imports torch only inside them."""

    module: str
    answers: str


MEASURE: Final = Command("calibrate.stages.command", "How fast is this machine?")
CHECK: Final = Command("calibrate.check_command", "Does a real training step take what is predicted?")
COMMANDS: Final = {
    "collectives": Command("calibrate.collectives.command", "measure collectives; start it with torchrun"),
    "import-nccl-tests": Command("calibrate.nccl_tests.command", "take over what nccl-tests printed, as text or JSON"),
    "import-kineto": Command(
        "calibrate.import_kineto", "take over collectives of steps that PyTorch's profiler measured"
    ),
    "report": Command("calibrate.report.command", "say (and draw) what a record holds, beside what is shipped"),
    "derive": Command("calibrate.derive", "carry a record over to an accelerator with the same compute die"),
    "fit-published": Command(
        "calibrate.fit.published_fit",
        "fit every shipped accelerator's kernel constants to the shipped table of published kernels",
    ),
    "fit-collectives": Command(
        "calibrate.fit.collective_quality",
        "compare predicted collectives with the published ones, and fit their constants",
    ),
    "fit-dispatchers": Command(
        "calibrate.fit.dispatcher_constants",
        "compare predicted dispatches of tokens with published ones; fit their constants",
    ),
    "fit-steps": Command(
        "calibrate.fit.step_constants", "fit the constants of training steps to the shipped table of published steps"
    ),
    "fit-band": Command(
        "calibrate.fit.prediction_interval", "fit how far unseen steps are from predictions, by regime"
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one calibration command; return the exit status (2 for bad input)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        command, options = parsed(given)
        return command(options) or 0
    except ClusterSimError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED


def parsed(given: Sequence[str]) -> tuple[Callable[[argparse.Namespace], int | None], argparse.Namespace]:
    """The command that is meant, and its options; ends the program on wrong ones, as argparse does."""
    named, rest, epilog = _chosen(given)
    module = import_module(named.module)
    parser = argparse.ArgumentParser(
        prog=f"clustersim calibrate {given[0]}" if rest is not given else "clustersim calibrate",
        description=named.answers,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    return module.command, parser.parse_args(rest)


def _chosen(given: Sequence[str]) -> tuple[Command, Sequence[str], str | None]:
    if given and given[0] in COMMANDS:
        return COMMANDS[given[0]], given[1:], None
    if given and not given[0].startswith("-"):
        raise InputError(_unknown(given[0]))
    if any(argument.split("=")[0] == "--check" for argument in given):
        return CHECK, given, None
    return MEASURE, given, _others()


def _unknown(word: str) -> str:
    if not is_path(word):
        return f"there is no calibration {word!r}; {suggest_nearest(word, COMMANDS)}"
    return f"what of {word}? measure a scenario with --for {word}, check one with --check {word}, or report a record"


def _others() -> str:
    lines = [f"  {name:<18} {command.answers}" for name, command in COMMANDS.items()]
    check = f"  {'--check SCENARIO':<18} run real training steps beside the prediction"
    return "\n".join(["other commands:", check, *lines])
