"""What does `clustersim diff` do with a measured trace? Simulate the scenario, and look at it as a profiler would.

The prediction is written as PyTorch's profiler writes traces, of the ranks that were measured, and read by the same
reader, so both sides are folded by the same rules.
"""

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clustersim.cli.outputs import Outputs, announce, write_json
from clustersim.cli.progress import waiting_for
from clustersim.common.errors import InputError
from clustersim.common.units import Seconds, format_seconds, format_step_time
from clustersim.interop.device_names import same_chip
from clustersim.interop.kineto import Traces, read_traces, traces_of
from clustersim.scenario import Scenario

if TYPE_CHECKING:
    from clustersim.results.profile_difference import ProfileDifference
    from clustersim.results.simulation_result import SimulationResult


def show_profile_difference(measured: Path, scenario: Scenario, named: tuple[Path, str], outputs: Outputs) -> bool:
    """Compare what a profiler saw with the prediction of a scenario; whether the scenario fits in memory.

    named: the scenario's file, and what it is of.
    """
    file, title = named
    if outputs.html is not None:
        raise InputError(
            f"--html {outputs.html}: a measured trace is compared in the table and in --json; leave it out"
        )
    outputs.require([measured, file, *scenario.files])
    with waiting_for("reading"):
        traces = read_traces(measured)
    world = scenario.layout.world_size
    if traces.world != world:
        ranks = f"{traces.world:,} rank{'s' * (traces.world > 1)}"
        raise InputError(
            f"{measured}: is of {ranks}, and {file} has {world:,} GPU{'s' * (world > 1)}; "
            f"compare with a scenario of as many, such as --set cluster.gpus={traces.world} and a layout for them"
        )
    from clustersim.simulation import simulate

    with waiting_for("simulating"):
        difference = _compared(traces, simulate(scenario), title)
        if outputs.json is not None:
            write_json(difference.to_json(), outputs.json)
    if outputs.table:
        _print(difference)
        for path in outputs.files.values():
            announce(path)
    return difference.fits


def _compared(traces: Traces, result: "SimulationResult", title: str) -> "ProfileDifference":
    from clustersim.results.profile_difference import ProfileDifference
    from clustersim.results.profiled_step import median_step, waiting

    predicted = _predicted(result, [rank.rank for rank in traces.ranks])
    only = result.step_time if result.scenario.steps == 1 else None
    steps = median_step(traces.ranks), median_step(predicted.ranks, only)
    waited = waiting(traces.ranks, steps[0].number)
    return ProfileDifference(
        titles=(_measured_title(traces, len(steps[0].step_times)), title),
        steps=steps,
        fits=result.fits_in_memory,
        waiting=waited,
        notes=tuple(_notes(traces, result, waited)),
    )


def _predicted(result: "SimulationResult", ranks: Sequence[int]) -> Traces:
    """What the profiler would have seen of some ranks of a simulated step."""
    return traces_of(result.scenario.name, _written(result, ranks))


def _written(result: "SimulationResult", ranks: Sequence[int]) -> Iterator[tuple[Path, Any]]:
    from clustersim.report.export.kineto import write_kineto
    from clustersim.report.export.rank_selection import trace_ranks
    from clustersim.report.export.span_table import Export

    for rank, spans in Export(result, trace_ranks(result, ranks)):
        file = io.BytesIO()
        write_kineto(result, rank, spans, file)
        yield Path(f"rank-{rank.rank}.json"), json.loads(file.getvalue())


def _measured_title(traces: Traces, steps: int) -> str:
    of = "one step" if steps == 1 else f"the median of {steps} steps"
    many = len(traces.ranks)
    ranks = f"{f'{many:,} of ' if many < traces.world else ''}{traces.world:,} rank{'s' * (traces.world > 1)}"
    return f"{traces.source} ({of}, {ranks}{f', {traces.device}' if traces.device else ''})"


def _notes(traces: Traces, result: "SimulationResult", waited: Seconds) -> Iterator[str]:
    missing = sorted(set(range(traces.world)) - {rank.rank for rank in traces.ranks})
    if missing:
        few = ", ".join(map(str, missing[:4])) + (f" and {len(missing) - 4:,} more" if len(missing) > 4 else "")
        yield f"A has no traces of {'rank' if len(missing) == 1 else 'ranks'} {few}; both means leave them out"
    accelerators, _ = result.scenario.cluster.accelerator_kinds()
    if traces.device and not any(same_chip(traces.device, accelerator.name) for accelerator in accelerators):
        yield f"A ran on {traces.device}, and B is of {accelerators[0].name}"
    if len(traces.ranks[0].numbers) == 1:
        yield "A has one step alone, which is taken to last while anything of it runs; profile two steps or more"
    if not traces.shapes:
        yield "A does not say sizes of products; profile with record_shapes=True to compare them"
    if any(label.moved for rank_spans in traces.ranks for label in rank_spans.labels):
        known = f" (here {format_seconds(waited)}, where all members have traces)" if waited else ""
        yield f"A's collectives last while they wait for other ranks, too{known}, B's while data move alone"
    if not result.fits_in_memory:
        yield f"B does not fit in memory; its step of {format_step_time(result.step_time)} could not be run"


def _print(difference: "ProfileDifference") -> None:
    from rich.console import Console

    from clustersim.report.terminal.profile import render_profile

    Console().print(render_profile(difference))
