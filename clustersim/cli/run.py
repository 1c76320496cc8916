"""What does `clustersim run` do? Read a scenario, simulate it, write what was asked for, say whether it fits."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clustersim.cli.outputs import Outputs, announce, write_json
from clustersim.cli.progress import waiting_for
from clustersim.scenario import Scenario

if TYPE_CHECKING:
    from clustersim.results.simulation_result import SimulationResult


def run_scenario(file: Path, overrides: Sequence[str], outputs: Outputs) -> bool:
    """Read, simulate and answer; whether the scenario fits in memory."""
    scenario = Scenario.load(file, overrides)
    return answer(scenario, (file, *scenario.files), outputs)


def answer(scenario: Scenario, inputs: Sequence[Path], outputs: Outputs) -> bool:
    """Simulate and answer; whether the scenario fits in memory. inputs: all that it was read from."""
    outputs.require(inputs)
    _require_ranks(scenario, outputs)
    if outputs.table:
        _announce_wait(scenario)
    from clustersim.simulation import simulate

    with waiting_for("simulating"):
        result = simulate(scenario)
        if outputs.json is not None:
            write_json(result.to_json(), outputs.json)
        notes = _write_traces(result, outputs)
        if outputs.html is not None:
            _write_page(result, outputs.html)
    if outputs.table:
        _print(result)
        for option, path in (outputs.files | outputs.traces).items():
            announce(path, notes.get(option, ""))
    return result.fits_in_memory


def _require_ranks(scenario: Scenario, outputs: Outputs) -> None:
    """Refuse ranks that are not there before anyone waits."""
    if outputs.traces:
        from clustersim.report.export.rank_selection import require_ranks

        require_ranks(scenario.layout, outputs.choice.ranks)


def _announce_wait(scenario: Scenario) -> None:
    """Say beforehand what takes long; the answer says it again."""
    from clustersim.scenario.validation_rules.warnings import slow_simulation_warnings

    for warning in slow_simulation_warnings(scenario):
        print(f"warning: {warning}", file=sys.stderr, flush=True)


def _write_traces(result: "SimulationResult", outputs: Outputs) -> dict[str, str]:
    """Write what is written span by span; say by option of how many ranks, if not of all."""
    if not outputs.traces:
        return {}
    from clustersim.report.export.rank_selection import ranks_of

    ranks = ranks_of(result, outputs.choice.ranks)
    return {option: _write_spans(result, option, ranks, outputs) for option in outputs.traces}


def _write_spans(result: "SimulationResult", option: str, ranks: list[int], outputs: Outputs) -> str:
    """Write one kind of trace; the note that says of how many ranks it is."""
    from clustersim.report.export.write_traces import MOST_BYTES, write_kineto_files, write_spans, write_trace

    write = {"--trace": write_trace, "--kineto": write_kineto_files, "--spans": write_spans}[option]
    path = outputs.traces[option]
    if outputs.table:
        _announce_trace(result, path, ranks)
    count = write(result, path, ranks, most=math.inf if outputs.choice.force else MOST_BYTES)
    if outputs.choice.ranks:
        return f" ({count:,} of {result.rank_count:,} ranks)"
    return (
        f" ({count:,} of {result.simulated_rank_count:,} simulated ranks)"
        if count < result.simulated_rank_count
        else ""
    )


def _announce_trace(result: "SimulationResult", path: Path, ranks: list[int]) -> None:
    """Say how much is about to be written, where that takes a while."""
    from clustersim.report.export.write_traces import MANY_SPANS, spans_of

    spans = spans_of(result, ranks)
    if spans >= MANY_SPANS:
        print(f"writing about {spans:,} spans to {path}", file=sys.stderr, flush=True)


def _write_page(result: "SimulationResult", path: str) -> None:
    """Write the page, with changes of the scenario and a published run that are simulated for it."""
    from clustersim.common.files import write_text_atomically
    from clustersim.planning.what_if import what_ifs
    from clustersim.report.run_page import run_page
    from clustersim.validation.nearest_run import nearest_run

    write_text_atomically(path, run_page(result, what_ifs(result), nearest_run(result.scenario)))


def _print(result: "SimulationResult") -> None:
    from rich.console import Console

    from clustersim.report.terminal.run import render_run

    Console().print(render_run(result))
