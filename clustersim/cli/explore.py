"""What does `clustersim explore` do? Simulate a few dozen variants of a scenario and write a page to play with."""

from collections.abc import Sequence
from pathlib import Path

from clustersim.cli.outputs import Outputs, announce
from clustersim.cli.progress import counting
from clustersim.scenario import Scenario


def explore_scenario(file: Path, overrides: Sequence[str], html: str) -> None:
    """Write the explorer page of a scenario."""
    scenario = Scenario.load(file, overrides)
    Outputs(html=html).require((file, *scenario.files))
    from clustersim.common.files import write_text_atomically
    from clustersim.planning.explorer.explorer_data import explore
    from clustersim.planning.explorer.scaling_studies import count
    from clustersim.report.explorer_page import explorer_page

    with counting("simulating variants", count(scenario)) as done:
        exploration = explore(scenario, done)
    write_text_atomically(html, explorer_page(exploration))
    announce(html)
