"""What does `clustersim run` do? Read a scenario, simulate it, write the requested outputs, return whether it fits."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clustersim.cli.outputs import Outputs, announce_file, write_json
from clustersim.cli.progress import show_activity, simulation_progress
from clustersim.cli.what_if import simulate_what_ifs, what_ifs_to_json
from clustersim.scenario import Scenario

if TYPE_CHECKING:
    from clustersim.results.simulation_result import SimulationResult
    from clustersim.results.what_if import WhatIfReport


def run_scenario(file: Path, overrides: Sequence[str], outputs: Outputs) -> bool:
    """Read the scenario, simulate and report; return whether it fits in memory."""
    scenario = Scenario.load(file, overrides)
    return simulate_and_report(scenario, (file, *scenario.files), outputs)


def simulate_and_report(scenario: Scenario, inputs: Sequence[Path], outputs: Outputs) -> bool:
    """Simulate, write and print the result; return whether the scenario fits in memory. inputs: all files read."""
    outputs.check_writable(inputs)
    _check_trace_ranks(scenario, outputs)
    if outputs.table:
        _warn_long_simulation(scenario)
    from clustersim.simulation import simulate_with_spread

    steps = "a step" if scenario.steps == 1 else f"{scenario.steps:,} steps"
    with simulation_progress(f"simulating {steps} of {scenario.cluster.gpu_count:,} GPUs") as watch:
        result = simulate_with_spread(scenario, watch)
    with show_activity("writing traces"):
        notes = _write_traces(result, outputs)
    with show_activity("simulating what-if changes"):
        what_ifs = simulate_what_ifs(result, requested=outputs.what_if or outputs.html is not None)
    with show_activity("writing results"):
        if outputs.json is not None:
            write_json(result.to_json() | what_ifs_to_json(what_ifs), outputs.json)
        if outputs.html is not None:
            _write_page(result, what_ifs, outputs.html)
    if outputs.table:
        _print_result(result, what_ifs)
        for option, path in (outputs.file_paths | outputs.trace_paths).items():
            announce_file(path, notes.get(option, ""))
    return result.fits_in_memory


def _check_trace_ranks(scenario: Scenario, outputs: Outputs) -> None:
    """Raise InputError for ranks that do not exist, before anything is simulated."""
    if outputs.trace_paths:
        from clustersim.report.export.rank_selection import validate_rank_selection

        validate_rank_selection(scenario.layout, outputs.trace_options.ranks)


def _warn_long_simulation(scenario: Scenario) -> None:
    """Warn in advance about a long simulation; the result repeats the warning."""
    from clustersim.scenario.validation_rules.warnings import slow_simulation_warnings

    for warning in slow_simulation_warnings(scenario):
        print(f"warning: {warning}", file=sys.stderr, flush=True)


def _write_traces(result: "SimulationResult", outputs: Outputs) -> dict[str, str]:
    """Write the traces; by option, the note on how many ranks they contain, if not all."""
    if not outputs.trace_paths:
        return {}
    from clustersim.report.export.rank_selection import select_ranks_by_terms

    ranks = select_ranks_by_terms(result, outputs.trace_options.ranks)
    return {option: _write_trace_format(result, option, ranks, outputs) for option in outputs.trace_paths}


def _write_trace_format(result: "SimulationResult", option: str, ranks: list[int], outputs: Outputs) -> str:
    """Write one trace format; return the note on how many ranks it contains."""
    from clustersim.report.export.write_traces import (
        MAX_FILE_BYTES,
        write_kineto_files,
        write_perfetto_file,
        write_table_file,
    )

    write = {"--trace": write_perfetto_file, "--kineto": write_kineto_files, "--spans": write_table_file}[option]
    path = outputs.trace_paths[option]
    if outputs.table:
        _announce_large_trace(result, path, ranks)
    count = write(result, path, ranks, max_bytes=math.inf if outputs.trace_options.force else MAX_FILE_BYTES)
    if outputs.trace_options.ranks:
        return f" ({count:,} of {result.rank_count:,} ranks)"
    return (
        f" ({count:,} of {result.simulated_rank_count:,} simulated ranks)"
        if count < result.simulated_rank_count
        else ""
    )


def _announce_large_trace(result: "SimulationResult", path: Path, ranks: list[int]) -> None:
    """Print the number of spans that are about to be written, where that takes a while."""
    from clustersim.report.export.rank_selection import count_spans
    from clustersim.report.export.write_traces import LARGE_SPAN_COUNT

    span_count = count_spans(result, ranks)
    if span_count >= LARGE_SPAN_COUNT:
        print(f"writing about {span_count:,} spans to {path}", file=sys.stderr, flush=True)


def _write_page(result: "SimulationResult", what_ifs: "WhatIfReport | None", path: str) -> None:
    """Write the HTML page, with the nearest published run, which is simulated for it."""
    from clustersim.common.files import write_text_atomically
    from clustersim.report.run_page import run_page
    from clustersim.validation.nearest_run import nearest_run

    write_text_atomically(path, run_page(result, what_ifs, nearest_run(result.scenario)))


def _print_result(result: "SimulationResult", what_ifs: "WhatIfReport | None") -> None:
    from clustersim.cli.terminal import new_console
    from clustersim.report.terminal.run import render_run

    new_console().print(render_run(result, what_ifs), crop=False)  # arguments are on one line, to be copied
