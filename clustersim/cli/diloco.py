"""What does `clustersim diloco` do? Simulate a round of local training over several sites."""

from collections.abc import Sequence
from pathlib import Path

from clustersim.cli.outputs import Outputs, announce_file, write_json
from clustersim.scenario import Scenario


def show_local_training(file: Path, overrides: Sequence[str], outputs: Outputs, days: float | None = None) -> bool:
    """Simulate, print and write the result; return whether it fits in memory.

    days: also simulated with failures.
    """
    from clustersim.reliability.local_training import simulate_local_training

    scenario = Scenario.load(file, overrides)
    outputs.check_writable((file, *scenario.files))
    wants_curves = outputs.json is not None or outputs.html is not None
    result = simulate_local_training(scenario, curves=wants_curves, days=days)
    if outputs.json is not None:
        write_json(result.to_json(), outputs.json)
    if outputs.html is not None:
        from clustersim.common.files import write_text_atomically
        from clustersim.report.outer_rounds_page import outer_rounds_page

        write_text_atomically(outputs.html, outer_rounds_page(result, file))
    if outputs.table:
        from clustersim.cli.terminal import new_console
        from clustersim.report.terminal.outer_rounds import render_outer_rounds

        new_console().print(render_outer_rounds(result))
        for path in outputs.file_paths.values():
            announce_file(path)
    return result.fits
