"""Which calibration is run? The command line of `clustersim calibrate`, and of `python -m calibrate`.

Without a subcommand this machine is measured (`--for`, `--grid`, `--presets`) or predictions are checked
(`--check`). Modules that need torch are imported by the command that needs them.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Final, NamedTuple

from clustersim.common.data_files import is_path
from clustersim.common.errors import ClusterSimError, InputError, suggest_nearest
from clustersim.common.plugins import code_permission
from clustersim.common.signals import raise_interrupt_on_sigterm

EXIT_BAD_INPUT: Final = 2
EXIT_INTERRUPTED: Final = 130


class CalibrateCommand(NamedTuple):
    """A subcommand.

    module: has `add_arguments(parser)` and `command(options)`, and imports torch only inside them.
    """

    module: str
    description: str


MEASURE: Final = CalibrateCommand(
    "calibrate.stages.command",
    "Measure this machine's kernels, copies, launches and training steps into a calibration record.",
)
CHECK: Final = CalibrateCommand(
    "calibrate.check_command", "Run real training steps and compare them with their prediction."
)
COMMANDS: Final = {
    "collectives": CalibrateCommand("calibrate.collectives.command", "measure collectives; launch with torchrun"),
    "import-nccl-tests": CalibrateCommand(
        "calibrate.nccl_tests.command", "import collectives from the output of nccl-tests (text or JSON)"
    ),
    "import-kineto": CalibrateCommand(
        "calibrate.import_kineto", "import collectives from traces of PyTorch's profiler"
    ),
    "from-profile": CalibrateCommand(
        "calibrate.profile.command", "make a record of a step under PyTorch's profiler, of one rank or several"
    ),
    "report": CalibrateCommand(
        "calibrate.report.command", "report a record's measurements and fits, compared with the packaged constants"
    ),
    "derive": CalibrateCommand("calibrate.derive", "derive a record for another accelerator with the same compute die"),
    "fit-published": CalibrateCommand(
        "calibrate.fit.published_fit",
        "fit the kernel constants of the packaged accelerators to published kernel measurements",
    ),
    "fit-collectives": CalibrateCommand(
        "calibrate.fit.collective_quality",
        "compare predicted collectives with published ones, and fit their constants",
    ),
    "fit-dispatchers": CalibrateCommand(
        "calibrate.fit.dispatcher_constants",
        "compare predicted token dispatches with published ones, and fit their constants",
    ),
    "fit-steps": CalibrateCommand(
        "calibrate.fit.step_constants", "fit the constants of training steps to published step times"
    ),
    "reference-runs": CalibrateCommand(
        "calibrate.fit.reference_runs", "write the table of published runs by job, with the error of each prediction"
    ),
    "fit-prediction-interval": CalibrateCommand(
        "calibrate.fit.prediction_interval",
        "fit prediction intervals to out-of-sample errors",
    ),
    "fit-memory-error": CalibrateCommand(
        "calibrate.fit.memory_error",
        "collect the errors of predicted peak memory, and the headroom that they ask for",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one calibration command; return the exit status (2 for bad input)."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    raise_interrupt_on_sigterm()
    try:
        command, options = parse_command(argv)
        with code_permission("" if options.allow_code else "runs only where --allow-code is typed"):
            return command(options) or 0
    except ClusterSimError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def parse_command(argv: Sequence[str]) -> tuple[Callable[[argparse.Namespace], int | None], argparse.Namespace]:
    """The selected command's function and its parsed options; exits the process on wrong options, as argparse does."""
    selected, command_argv, epilog = _select_command(argv)
    module = import_module(selected.module)
    parser = argparse.ArgumentParser(
        prog=f"clustersim calibrate {argv[0]}" if command_argv is not argv else "clustersim calibrate",
        description=selected.description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    parser.add_argument("--allow-code", action="store_true", help="run the Python code that a scenario names")
    return module.command, parser.parse_args(command_argv)


def _select_command(argv: Sequence[str]) -> tuple[CalibrateCommand, Sequence[str], str | None]:
    if argv and argv[0] in COMMANDS:
        return COMMANDS[argv[0]], argv[1:], None
    if argv and not argv[0].startswith("-"):
        raise InputError(_unknown_command_message(argv[0]))
    if any(argument.split("=")[0] == "--check" for argument in argv):
        return CHECK, argv, None
    return MEASURE, argv, _other_commands_text()


def _unknown_command_message(argument: str) -> str:
    if not is_path(argument):
        return f"there is no calibration {argument!r}; {suggest_nearest(argument, COMMANDS)}"
    return (
        f"what of {argument}? measure a scenario with --for {argument}, check one with --check {argument}, or "
        "report a record"
    )


def _other_commands_text() -> str:
    lines = [f"  {name:<23} {command.description}" for name, command in COMMANDS.items()]
    check = f"  {'--check SCENARIO':<23} run real training steps and compare them with their prediction"
    return "\n".join(["other commands:", check, *lines])
