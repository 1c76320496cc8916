"""What does `clustersim diloco` do? Simulate a round of local training over several sites."""

from collections.abc import Sequence
from pathlib import Path

from clustersim.cli.outputs import Outputs, announce_file, write_json
from clustersim.scenario import Scenario


def show_local_training(file: Path, overrides: Sequence[str], outputs: Outputs) -> None:
    """Simulate, print and write the result."""
    from clustersim.reliability.local_training import simulate_local_training

    scenario = Scenario.load(file, overrides)
    outputs.check_writable((file, *scenario.files))
    result = simulate_local_training(scenario)
    if outputs.json is not None:
        write_json(result.to_json(), outputs.json)
    if outputs.table:
        from rich.console import Console

        from clustersim.report.terminal.outer_rounds import render_outer_rounds

        Console().print(render_outer_rounds(result), soft_wrap=False)
        for path in outputs.file_paths.values():
            announce_file(path)
