"""What does `clustersim search` do? Search for the best layouts of a scenario's job, and explain the ranking."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Final

from clustersim.cli.limit import report_cut
from clustersim.cli.outputs import Outputs, announce_file, write_json
from clustersim.cli.progress import track_progress
from clustersim.cli.what_if import simulate_what_ifs, what_ifs_to_json
from clustersim.common.data_files import parse_yaml
from clustersim.common.errors import InputError
from clustersim.common.processes import usable_cpu_count
from clustersim.common.units import parse_share
from clustersim.scenario import Scenario

if TYPE_CHECKING:
    from clustersim.planning.layouts import SearchSpace
    from clustersim.results.search_result import LayoutResult, SearchResult
    from clustersim.results.what_if import WhatIfReport

_Stage = tuple[str, int, int | None]
"""A stage of a search: its label, items done and their number."""

_WHAT_IF_LABEL: Final = "simulating what helps"
_MAX_SERIAL_LAYOUTS: Final = 64  # layouts up to which starting worker processes does not pay off


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Command-line options as typed. workers: None for one per usable CPU; resume: a folder."""

    fix: tuple[str, ...] = ()
    vary: tuple[str, ...] = ()
    gpus: str = ""
    clusters: str = ""
    batch_per_gpu: bool = False
    objective: str = "step-time"
    top: int = 10
    workers: int | None = None
    resume: str | None = None
    executor: str = "local"
    headroom: str = ""
    quiet: bool = False
    limit: float | None = None


def search_layouts(file: Path, overrides: Sequence[str], options: SearchOptions, outputs: Outputs) -> bool:
    """Search, print and write the result; return whether the whole space was searched, and all that was asked for."""
    scenario = Scenario.load(file, overrides)
    outputs.check_writable((file, *scenario.files))
    if outputs.what_if and scenario.diloco is not None:
        raise InputError(f"--what-if: changes a step, and {file} has local training (diloco), which has none in common")
    stage: list[_Stage] = [("bounding step times", 0, None)]
    result = replace(_search(scenario, options, stage), base_overrides=tuple(overrides))
    what_ifs, complete = None, result.complete
    if outputs.what_if and complete:
        stage[0] = _WHAT_IF_LABEL, 0, None
        what_ifs = _simulate_what_ifs(scenario, result, shown=not options.quiet)
        complete = what_ifs is not None
    if not complete and options.limit is not None:
        report_cut(options.limit, stage[0])
    if outputs.json is not None:
        write_json(result.to_json() | what_ifs_to_json(what_ifs), outputs.json)
    if outputs.html is not None:
        _write_page(result, what_ifs, file, outputs.html)
    if outputs.table:
        _print_result(result, what_ifs, file, options)
        for path in () if options.quiet else outputs.file_paths.values():
            announce_file(path)
    return complete


def _search(scenario: Scenario, options: SearchOptions, stage: list[_Stage]) -> "SearchResult":
    """Search with progress. stage: its item is kept up to date."""
    from clustersim.planning.layouts import LayoutSearch
    from clustersim.planning.layouts.executors import open_executor
    from clustersim.planning.layouts.objective import parse_objective

    objective, headroom = parse_objective(options.objective), parse_headroom(options.headroom)
    space = search_space(scenario, options)
    store = None if options.resume is None else Path(options.resume)
    workers = options.workers or (1 if space.combination_count < _MAX_SERIAL_LAYOUTS else usable_cpu_count())
    with (
        open_executor(options.executor, workers) as (executor, worker_count),
        track_progress("bounding step times", shown=not options.quiet) as report_progress,
    ):

        def progress(stage_label: str, done: int, total: int, best: "LayoutResult | None") -> None:
            from clustersim.common.units import format_step_time

            best_text = "" if best is None else f" (best so far {format_step_time(best.step_time)})"
            stage[0] = stage_label, done, total
            report_progress(f"{stage_label}{best_text}", done, total)

        search = LayoutSearch(space, options.top, objective, worker_count, store, executor, headroom=headroom)
        return search.run(progress)


def _simulate_what_ifs(scenario: Scenario, result: "SearchResult", *, shown: bool) -> "WhatIfReport | None":
    """What helps the recommended layout; None where Ctrl-C or the limit ends it: the layouts are reported without."""
    from clustersim.simulation import simulate

    try:
        with track_progress(_WHAT_IF_LABEL, shown=shown):
            recommended = simulate(scenario.with_overrides(*result.recommended.overrides))
            return simulate_what_ifs(recommended, requested=True)
    except KeyboardInterrupt:
        return None


def search_space(scenario: Scenario, options: SearchOptions) -> "SearchSpace":
    """The search space that the options describe."""
    from clustersim.planning.layouts import SearchSpace

    fixed = _parse_key_values("--fix", options.fix)
    varied = {key: _parse_values(key, text) for key, text in _parse_key_values("--vary", options.vary).items()}
    clusters = [name for name in options.clusters.split(",") if name]
    return SearchSpace.from_scenario(
        scenario,
        fixed,
        varied,
        gpus=_parse_gpu_counts(options.gpus),
        clusters=clusters,
        batch_per_gpu=options.batch_per_gpu,
    )


def parse_headroom(text: str) -> float | None:
    """The share of a device that an option states, as 0.1 or 10%; None for the default (empty)."""
    if not text:
        return None
    try:
        return parse_share(text)
    except ValueError:
        message = f"--headroom {text}: is no share of a device; write such as --headroom 10%, or 0 for none"
        raise InputError(message) from None


def _parse_key_values(option: str, texts: Sequence[str]) -> dict[str, str]:
    """Values by key, as typed in repeated options."""
    values_by_key: dict[str, str] = {}
    for key, value in (_parse_key_value(option, text) for text in texts):
        if key in values_by_key:
            raise InputError(
                f"{option} {key}: is given twice; all values go into one: --vary {key}={values_by_key[key]},{value}"
            )
        values_by_key[key] = value
    return values_by_key


def _parse_key_value(option: str, text: str) -> tuple[str, str]:
    key, sign, value = text.partition("=")
    if not sign or not key.strip() or not value.strip():
        example = "layout.tp=8" if option == "--fix" else "layout.tp=1,2,4"
        raise InputError(f"{option} {text}: write a dotted key and a value, such as {option} {example}")
    return key.strip(), value.strip()


def _parse_values(key: str, text: str) -> list[str]:
    """The values of a comma-separated list; YAML mappings count as one value each."""
    try:
        values = parse_yaml(f"[{text}]")
    except InputError as error:
        raise InputError(f"--vary {key}={text}: {error}") from error
    value_list = values if isinstance(values, list) else [values]
    return [value if isinstance(value, str) else dumps(value) for value in value_list]


def _parse_gpu_counts(text: str) -> list[int]:
    gpu_counts = []
    for word in (word.strip().replace("_", "") for word in text.split(",") if text):
        if not word.isdecimal() or int(word) < 1:
            raise InputError(f"--gpus {text}: {word!r} is not a number of GPUs; write such as --gpus 4096,8192")
        gpu_counts.append(int(word))
    return gpu_counts


def _write_page(result: "SearchResult", what_ifs: "WhatIfReport | None", file: Path, path: str) -> None:
    from clustersim.common.files import write_text_atomically
    from clustersim.report.search_page import search_page

    write_text_atomically(path, search_page(result, file, what_ifs))


def _print_result(result: "SearchResult", what_ifs: "WhatIfReport | None", file: Path, options: SearchOptions) -> None:
    from rich.console import Group
    from rich.text import Text

    from clustersim.cli.terminal import new_console
    from clustersim.report.terminal.search import render_choice, render_search, run_command
    from clustersim.report.terminal.what_helps import what_helps_lines

    console, resumable = new_console(), options.resume is not None
    render = render_choice if options.quiet else render_search
    console.print(render(result, resumable=resumable))
    if result.simulated:
        console.print(Text(f"to run it: {run_command(result, result.recommended, file)}", style="cyan"), soft_wrap=True)
        if not options.quiet and not result.variant_count:
            console.print(Group(*what_helps_lines(what_ifs, "the best layout")), crop=False)
