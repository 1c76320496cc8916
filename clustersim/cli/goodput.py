"""What does `clustersim goodput` do? Simulate a job over the weeks of its run, with what breaks."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clustersim.cli.outputs import Outputs, announce, write_json
from clustersim.cli.progress import following
from clustersim.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Choice:
    """Options as they were typed. workers: None for one per core; resume: a folder; tokens: empty for the file's."""

    tokens: str = ""
    runs: int = 1000
    seed: int = 0
    workers: int | None = None
    resume: str | None = None


def show_goodput(file: Path, overrides: Sequence[str], choice: Choice, outputs: Outputs) -> bool:
    """Simulate, print and write what was found; whether all runs were made."""
    from clustersim.reliability import goodput

    asked = [f"economics.tokens={choice.tokens}"] if choice.tokens else []
    scenario = Scenario.load(file, [*overrides, *asked])
    outputs.require((file, *scenario.files))
    store = None if choice.resume is None else Path(choice.resume)
    with following("simulating the step") as tell:
        found = goodput(
            scenario,
            choice.runs,
            choice.seed,
            workers=choice.workers or os.cpu_count() or 1,
            store=store,
            progress=lambda what, done, of: tell(what, done, of or None),
        )
    if outputs.json is not None:
        write_json(found.to_json(), outputs.json)
    if outputs.html is not None:
        from clustersim.common.files import write_text_atomically
        from clustersim.report.goodput_page import goodput_page

        write_text_atomically(outputs.html, goodput_page(found, file))
    if outputs.table:
        from rich.console import Console

        from clustersim.report.terminal.goodput import render_goodput

        Console().print(render_goodput(found), soft_wrap=False)
        for path in outputs.files.values():
            announce(path)
    return found.complete
