"""What does `clustersim goodput` do? Simulate a job over the weeks of its run, with failures."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clustersim.cli.limit import report_cut
from clustersim.cli.outputs import Outputs, announce_file, write_json
from clustersim.cli.progress import track_progress
from clustersim.common.processes import usable_cpu_count
from clustersim.scenario import Scenario


@dataclass(frozen=True, slots=True)
class GoodputOptions:
    """Command-line options as typed.

    workers: None for one per usable CPU; resume: a folder; tokens: empty for the scenario file's value.
    """

    tokens: str = ""
    runs: int = 1000
    seed: int = 0
    workers: int | None = None
    resume: str | None = None
    limit: float | None = None


def show_goodput(file: Path, overrides: Sequence[str], options: GoodputOptions, outputs: Outputs) -> bool:
    """Simulate, print and write the result; return whether all runs were simulated."""
    from clustersim.reliability import simulate_goodput

    token_override = [f"economics.tokens={options.tokens}"] if options.tokens else []
    scenario = Scenario.load(file, [*overrides, *token_override])
    outputs.check_writable((file, *scenario.files))
    store = None if options.resume is None else Path(options.resume)
    stage: list[tuple[str, int, int | None]] = [("simulating the step", 0, None)]
    with track_progress("simulating the step") as report_progress:

        def progress(label: str, done: int, total: int) -> None:
            stage[0] = label, done, total or None
            report_progress(*stage[0])

        result = simulate_goodput(
            scenario,
            options.runs,
            options.seed,
            workers=options.workers or usable_cpu_count(),
            store=store,
            progress=progress,
        )
    if not result.complete and options.limit is not None:
        report_cut(options.limit, stage[0])
    if outputs.json is not None:
        write_json(result.to_json(), outputs.json)
    if outputs.html is not None:
        from clustersim.common.files import write_text_atomically
        from clustersim.report.goodput_page import goodput_page

        write_text_atomically(outputs.html, goodput_page(result, file))
    if outputs.table:
        from clustersim.cli.terminal import new_console
        from clustersim.report.terminal.goodput import render_goodput

        new_console().print(render_goodput(result))
        for path in outputs.file_paths.values():
            announce_file(path)
    return result.complete
