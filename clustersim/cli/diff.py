"""What does `clustersim diff` do? Simulate two scenarios, print how they differ, and whether B fits in memory.

A result file that `run --json` wrote contains its scenario, which is simulated again: the file has no
timeline, and another version may have computed other times, which is then noted. Measured profiler traces
are compared separately (`diff_profile`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from clustersim.cli.diff_profile import show_profile_difference
from clustersim.cli.outputs import Outputs, announce_file, write_json
from clustersim.cli.progress import show_activity
from clustersim.cli.what_if import simulate_what_ifs, what_ifs_to_json
from clustersim.common.data_files import read_mapping
from clustersim.common.errors import InputError
from clustersim.common.plugins import code_permission
from clustersim.common.units import Seconds, format_step_time
from clustersim.interop.kineto import is_trace_path
from clustersim.scenario import Scenario
from clustersim.scenario.config.scenario import ScenarioConfig

if TYPE_CHECKING:
    from clustersim.report.result_difference import ResultDifference
    from clustersim.results.simulation_result import SimulationResult
    from clustersim.results.what_if import WhatIfReport

STEP_TIME_TOLERANCE: Final = 1e-6  # relative difference between machines
_PATH_HINT: Final = "paths in a result are looked for next to its file and in the working directory"


@dataclass(frozen=True, slots=True)
class ComparisonSide:
    """One of the two compared scenarios.

    file: that it was read from; recorded_step_time: seconds in a result file of the unmodified scenario, else
    None.
    """

    scenario: Scenario
    file: Path
    title: str
    recorded_step_time: Seconds | None = None

    def version_notes(self, name: str, result: "SimulationResult") -> list[str]:
        """A note where the step time in a result file differs from what this version computes; empty otherwise."""
        if (
            self.recorded_step_time is None
            or abs(self.recorded_step_time - result.step_time) <= STEP_TIME_TOLERANCE * result.step_time
        ):
            return []
        relative_change = result.step_time / self.recorded_step_time - 1.0
        return [
            f"{name}: {self.file} recorded a step of {format_step_time(self.recorded_step_time)}; simulated now it "
            "takes "
            f"{format_step_time(result.step_time)} ({relative_change:+.2%}): another version of clustersim, or of "
            "the files that "
            "the scenario names, wrote it"
        ]


def show_difference(first: Path, second: Path | None, overrides: Sequence[str], outputs: Outputs) -> bool:
    """Simulate both sides and print the difference; return whether the second one fits in memory."""
    if is_trace_path(first):
        if second is None:
            raise InputError(f"{first} is a measured trace; name the scenario that predicts it behind it")
        side = load_side(second, overrides)
        return show_profile_difference(first, side.scenario, (side.file, side.title), outputs)
    if second is not None and is_trace_path(second):
        raise InputError(f"{second} is a measured trace; name it first, and the scenario that predicts it behind it")
    if second is None and not overrides:
        raise InputError(
            f"{first} alone differs from nothing; name a second file, or a change such as --set layout.tp=4"
        )
    first_side, second_side = load_side(first), load_side(first if second is None else second, overrides)
    files = [file for side in (first_side, second_side) for file in (side.file, *side.scenario.files)]
    outputs.check_writable(files)
    from clustersim.simulation import simulate

    with show_activity("simulating"):
        results = [simulate(side.scenario) for side in (first_side, second_side)]
        difference = _compare_results(results, (first_side, second_side))
        what_ifs = simulate_what_ifs(results[1], requested=outputs.what_if)
        if outputs.json is not None:
            write_json(difference.to_json() | what_ifs_to_json(what_ifs), outputs.json)
        if outputs.html is not None:
            _write_page(difference, results, what_ifs, outputs.html)
    if outputs.table:
        _print_difference(difference, what_ifs)
        for path in outputs.file_paths.values():
            announce_file(path)
    return results[1].fits_in_memory


def load_side(file: Path, overrides: Sequence[str] = ()) -> ComparisonSide:
    """A scenario, or the scenario in a result file, with overrides applied."""
    mapping = read_mapping(file)
    if "scenario" in mapping:
        return _load_result_file(file, mapping, overrides)
    if file.suffix == ".json" and not mapping.keys() & ScenarioConfig.key_types().keys():
        raise InputError(f"{file}: is neither a scenario nor a result that `clustersim run --json` wrote")
    scenario = Scenario.load(file, overrides)
    return ComparisonSide(scenario, file, _side_title(scenario, file, overrides))


def _load_result_file(file: Path, mapping: Mapping[str, Any], overrides: Sequence[str]) -> ComparisonSide:
    """The scenario in a result file. Its relative paths are resolved against the result file's folder."""
    scenario_mapping, recorded, name = (mapping.get(key) for key in ("scenario", "step_time_s", "name"))
    is_number = isinstance(recorded, (int, float)) and not isinstance(recorded, bool)
    if not (isinstance(scenario_mapping, dict) and is_number and isinstance(name, str)):
        raise InputError(
            f"{file}: has a scenario, but not the name and step_time_s of a result; `clustersim run --json` writes both"
        )
    try:
        with code_permission("no result file may run; name the scenario that it is of"):
            scenario = Scenario.from_mapping(scenario_mapping, overrides, default_name=name, path=file)
    except InputError as error:
        raise InputError(f"{error} ({_PATH_HINT})" if "cannot be read" in str(error) else str(error)) from error
    title = _side_title(scenario, file, overrides)
    recorded_step_time = None if overrides else float(recorded)  # type: ignore[arg-type]
    return ComparisonSide(scenario, file, title, recorded_step_time)


def _side_title(scenario: Scenario, file: Path, overrides: Sequence[str]) -> str:
    """The scenario's name and file, and its overrides."""
    name = str(file) if scenario.name == file.stem else f"{scenario.name} ({file})"
    return f"{name} with {', '.join(overrides)}" if overrides else name


def _compare_results(results: "Sequence[SimulationResult]", names: Sequence[ComparisonSide]) -> "ResultDifference":
    from clustersim.report.result_difference import compare_results

    first, second = results
    notes = [
        note
        for name, side, result in zip("AB", names, results, strict=True)
        for note in side.version_notes(name, result)
    ]
    return compare_results(first, second, (names[0].title, names[1].title), tuple(notes))


def _write_page(
    difference: "ResultDifference",
    results: "Sequence[SimulationResult]",
    what_ifs: "WhatIfReport | None",
    path: str,
) -> None:
    from clustersim.common.files import write_text_atomically
    from clustersim.report.result_difference_page import difference_page

    write_text_atomically(path, difference_page(difference, results, what_ifs))


def _print_difference(difference: "ResultDifference", what_ifs: "WhatIfReport | None") -> None:
    from clustersim.cli.terminal import new_console
    from clustersim.report.terminal.difference import render_difference

    new_console().print(render_difference(difference, what_ifs), crop=False)  # arguments are on one line, to be copied
