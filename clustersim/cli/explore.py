"""What does `clustersim explore` do? Simulate a few dozen variants of a scenario and write an interactive page."""

from collections.abc import Sequence
from pathlib import Path

from clustersim.cli.outputs import Outputs, announce_file
from clustersim.cli.progress import count_progress
from clustersim.common.processes import usable_cpu_count
from clustersim.scenario import Scenario


def explore_scenario(file: Path, overrides: Sequence[str], html: str, workers: int | None) -> None:
    """Write the explorer page of a scenario. workers: None for one per usable CPU."""
    scenario = Scenario.load(file, overrides)
    Outputs(html=html).check_writable((file, *scenario.files))
    from clustersim.common.files import write_text_atomically
    from clustersim.planning.explorer.explorer_data import build_exploration
    from clustersim.planning.explorer.scaling_studies import step_tasks
    from clustersim.report.explorer_page import explorer_page

    with count_progress("simulating variants", len(step_tasks(scenario))) as report_done:
        exploration = build_exploration(scenario, report_done, workers=workers or usable_cpu_count())
    write_text_atomically(html, explorer_page(exploration))
    announce_file(html)
