"""A small pipeline step, simulated once per set of overrides."""

import inspect
import io
from dataclasses import fields
from functools import cache
from typing import Any

from rich.console import Console

from clustersim.report.terminal.run import render_run
from clustersim.results.simulation_result import SimulationResult
from clustersim.scenario import Scenario
from clustersim.simulation import simulate

PIPELINE_MAPPING: dict[str, Any] = {  # stage 2 is ranks 8 to 11
    "model": {"preset": "llama3-8b", "layers": 8},
    "cluster": {"name": "dgx-h100", "gpus": 16},
    "layout": {"tp": 2, "pp": 4, "dp": 2, "data": "zero1"},
    "training": {"sequence": 4096, "global_batch": 16},
    "framework": {"name": "ideal", "launch": "10 us"},
}


def pipeline_scenario(*overrides: str) -> Scenario:
    """Two replicas of four stages of two layers on two nodes, with overrides."""
    return Scenario.from_mapping(PIPELINE_MAPPING, overrides, default_name="small")


@cache
def simulate_pipeline(*overrides: str) -> SimulationResult:
    """The cached result of its step."""
    return simulate(pipeline_scenario(*overrides))


def override_result(result: SimulationResult, **overrides: Any) -> SimulationResult:
    """A copy of a result with overridden fields, properties and methods; methods return the given value."""

    def class_attribute(name: str, value: Any) -> Any:
        return (lambda _: value) if inspect.isfunction(getattr(SimulationResult, name, None)) else value

    field_names = {dataclass_field.name for dataclass_field in fields(result)}
    assert all(name in field_names or hasattr(SimulationResult, name) for name in overrides)
    result_class = type(
        "OverriddenResult",
        (SimulationResult,),
        {name: class_attribute(name, value) for name, value in overrides.items() if name not in field_names},
    )
    overridden: SimulationResult = result_class(
        *(overrides.get(item.name, getattr(result, item.name)) for item in fields(result))
    )
    return overridden


def render_terminal(result: SimulationResult, width: int = 100, *, terminal: bool = False) -> str:
    """The terminal report of a result."""
    colours = "truecolor" if terminal else "auto"
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=colours)
    console.print(render_run(result))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
