"""What does `clustersim diff` do? Simulate two scenarios, say what is different between them, say whether B fits.

A result that `run --json` wrote holds its scenario, which is simulated again: it holds no timeline, and another version
may answer otherwise, which is then said. What a profiler measured is compared otherwise (`diff_profile`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from clustersim.cli.diff_profile import show_profile_difference
from clustersim.cli.outputs import Outputs, announce, write_json
from clustersim.cli.progress import waiting_for
from clustersim.common.data_files import read_mapping
from clustersim.common.errors import InputError
from clustersim.common.units import Seconds, format_step_time
from clustersim.interop.kineto import is_traces
from clustersim.scenario import Scenario
from clustersim.scenario.config.scenario import ScenarioConfig

if TYPE_CHECKING:
    from clustersim.report.result_difference import Difference
    from clustersim.results.simulation_result import SimulationResult

ROUNDING: Final = 1e-6  # part of a step time by which machines differ
_PLACES: Final = "paths in a result are looked for beside its file and in the working directory"


@dataclass(frozen=True, slots=True)
class Side:
    """One of both. file: it was read from; recorded: the step time that a result has, for the scenario as it is."""

    scenario: Scenario
    file: Path
    title: str
    recorded: Seconds | None = None

    def note(self, name: str, result: "SimulationResult") -> list[str]:
        """What must be said where a result answered otherwise than this version."""
        if self.recorded is None or abs(self.recorded - result.step_time) <= ROUNDING * result.step_time:
            return []
        part = result.step_time / self.recorded - 1.0
        return [
            f"{name}: {self.file} recorded a step of {format_step_time(self.recorded)}; simulated now it takes "
            f"{format_step_time(result.step_time)} ({part:+.2%}): another version of clustersim, or of the files that "
            "the scenario names, wrote it"
        ]


def show_difference(first: Path, second: Path | None, overrides: Sequence[str], outputs: Outputs) -> bool:
    """Simulate both and say what differs; whether the second fits in memory."""
    if is_traces(first):
        if second is None:
            raise InputError(f"{first} is a measured trace; name the scenario that predicts it behind it")
        side = read_side(second, overrides)
        return show_profile_difference(first, side.scenario, (side.file, side.title), outputs)
    if second is not None and is_traces(second):
        raise InputError(f"{second} is a measured trace; name it first, and the scenario that predicts it behind it")
    if second is None and not overrides:
        raise InputError(
            f"{first} alone differs from nothing; name a second file, or a change such as --set layout.tp=4"
        )
    before, after = read_side(first), read_side(first if second is None else second, overrides)
    files = [file for side in (before, after) for file in (side.file, *side.scenario.files)]
    outputs.require(files)
    from clustersim.simulation import simulate

    with waiting_for("simulating"):
        results = [simulate(side.scenario) for side in (before, after)]
        difference = _compared(results, (before, after))
        if outputs.json is not None:
            write_json(difference.to_json(), outputs.json)
        if outputs.html is not None:
            _write_page(difference, results, outputs.html)
    if outputs.table:
        _print(difference)
        for path in outputs.files.values():
            announce(path)
    return results[1].fits_in_memory


def read_side(file: Path, overrides: Sequence[str] = ()) -> Side:
    """A scenario, or the scenario of a result, with overrides."""
    mapping = read_mapping(file)
    if "scenario" in mapping:
        return _recorded(file, mapping, overrides)
    if file.suffix == ".json" and not mapping.keys() & ScenarioConfig.key_types().keys():
        raise InputError(f"{file}: is neither a scenario nor a result that `clustersim run --json` wrote")
    scenario = Scenario.load(file, overrides)
    return Side(scenario, file, _title(scenario, file, overrides))


def _recorded(file: Path, mapping: Mapping[str, Any], overrides: Sequence[str]) -> Side:
    """The scenario of a result, as if its file lay beside it."""
    written, recorded, name = (mapping.get(key) for key in ("scenario", "step_time_s", "name"))
    number = isinstance(recorded, (int, float)) and not isinstance(recorded, bool)
    if not (isinstance(written, dict) and number and isinstance(name, str)):
        raise InputError(
            f"{file}: has a scenario, but not the name and step_time_s of a result; `clustersim run --json` writes both"
        )
    try:
        scenario = Scenario.from_mapping(written, overrides, default_name=name, path=file)
    except InputError as error:
        raise InputError(f"{error} ({_PLACES})" if "cannot be read" in str(error) else str(error)) from error
    title = _title(scenario, file, overrides)
    kept = None if overrides else float(recorded)  # type: ignore[arg-type]
    return Side(scenario, file, title, kept)


def _title(scenario: Scenario, file: Path, overrides: Sequence[str]) -> str:
    """What it is of: the name where the file does not say it already, and what was changed."""
    name = str(file) if scenario.name == file.stem else f"{scenario.name} ({file})"
    return f"{name} with {', '.join(overrides)}" if overrides else name


def _compared(results: "Sequence[SimulationResult]", sides: Sequence[Side]) -> "Difference":
    from clustersim.report.result_difference import difference_of

    first, second = results
    notes = [note for name, side, result in zip("AB", sides, results, strict=True) for note in side.note(name, result)]
    return difference_of(first, second, (sides[0].title, sides[1].title), tuple(notes))


def _write_page(difference: "Difference", results: "Sequence[SimulationResult]", path: str) -> None:
    from clustersim.common.files import write_text_atomically
    from clustersim.report.result_difference_page import difference_page

    write_text_atomically(path, difference_page(difference, results))


def _print(difference: "Difference") -> None:
    from rich.console import Console

    from clustersim.report.terminal.difference import render_difference

    Console().print(render_difference(difference))
