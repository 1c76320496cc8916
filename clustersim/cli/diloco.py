"""What does `clustersim diloco` do? Simulate a round of local training over several sites."""

from collections.abc import Sequence
from pathlib import Path

from clustersim.cli.outputs import Outputs, announce_file, write_json
from clustersim.cli.terminal import new_console
from clustersim.common.errors import InputError
from clustersim.common.units import parse_share
from clustersim.scenario import Scenario


def show_local_training(
    file: Path, overrides: Sequence[str], outputs: Outputs, *, days: float | None = None, utilization: str = ""
) -> bool:
    """Simulate, print and write the result; return whether it fits in memory.

    days: also simulated with failures; utilization: a share that other settings shall reach, too.
    """
    from clustersim.reliability.local_training import simulate_local_training

    target = _parse_utilization(utilization)
    scenario = Scenario.load(file, overrides)
    outputs.check_writable((file, *scenario.files))
    wants_curves = outputs.json is not None or outputs.html is not None
    result = simulate_local_training(scenario, curves=wants_curves, days=days, utilization=target)
    if outputs.json is not None:
        write_json(result.to_json(), outputs.json)
    if outputs.html is not None:
        from clustersim.common.files import write_text_atomically
        from clustersim.report.outer_rounds_page import outer_rounds_page

        write_text_atomically(outputs.html, outer_rounds_page(result, file))
    if outputs.table:
        from clustersim.report.terminal.outer_rounds import render_outer_rounds

        new_console().print(render_outer_rounds(result), soft_wrap=False)
        for path in outputs.file_paths.values():
            announce_file(path)
    return result.fits


def _parse_utilization(text: str) -> float | None:
    """The share that the option states, as 0.95 or 95%; None for the default (empty)."""
    if not text:
        return None
    try:
        share = parse_share(text)
    except ValueError:
        share = 0.0
    if not share:
        raise InputError(f"--utilization {text}: is no share of the time; write such as --utilization 95%")
    return share
