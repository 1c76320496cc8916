"""What does `clustersim diff` do with a measured trace? Simulate the scenario, and read it as a profiler trace.

The prediction is written in the format of PyTorch's profiler for the ranks that were measured, and read by
the same reader, so that both sides are folded by the same rules.
"""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from clustersim.cli.outputs import Outputs, announce_file, write_json
from clustersim.cli.progress import show_activity
from clustersim.cli.what_if import simulate_what_ifs, what_ifs_to_json
from clustersim.common.errors import InputError
from clustersim.common.units import Seconds, format_seconds, format_step_time
from clustersim.interop.device_names import device_matches
from clustersim.interop.kineto import ProfilerTraces, parse_traces, read_traces
from clustersim.scenario import Scenario

if TYPE_CHECKING:
    from clustersim.results.profile_difference import ProfileDifference
    from clustersim.results.simulation_result import SimulationResult
    from clustersim.results.what_if import WhatIfReport


def show_profile_difference(
    measured: Path, scenario: Scenario, scenario_label: tuple[Path, str], outputs: Outputs
) -> bool:
    """Compare profiler traces with the prediction of a scenario; return whether the scenario fits in memory.

    scenario_label: file and title of the scenario.
    """
    file, title = scenario_label
    if outputs.html is not None:
        raise InputError(
            f"--html {outputs.html}: a measured trace is compared in the table and in --json; leave it out"
        )
    outputs.check_writable([measured, file, *scenario.files])
    with show_activity("reading"):
        traces = read_traces(measured, on_host=scenario.cluster.accelerator.is_cpu)
    world_size = scenario.layout.world_size
    if traces.world_size != world_size:
        ranks = f"{traces.world_size:,} rank{'s' * (traces.world_size > 1)}"
        raise InputError(
            f"{measured}: is of {ranks}, and {file} has {world_size:,} GPU{'s' * (world_size > 1)}; "
            f"compare with a scenario of as many, such as --set cluster.gpus={traces.world_size} and a layout for them"
        )
    from clustersim.simulation import simulate

    with show_activity("simulating"):
        result = simulate(scenario)
        difference = _compare_profiles(traces, result, title)
        if difference.step_times[0] <= 0.0:
            raise InputError(f"{measured}: its steps take no time, as none of their kernels does")
        what_ifs = simulate_what_ifs(result, requested=outputs.what_if)
        if outputs.json is not None:
            write_json(difference.to_json() | what_ifs_to_json(what_ifs), outputs.json)
    if outputs.table:
        _print_profile_difference(difference, what_ifs)
        for path in outputs.file_paths.values():
            announce_file(path)
    return difference.fits_in_memory


def _compare_profiles(traces: ProfilerTraces, result: "SimulationResult", title: str) -> "ProfileDifference":
    from clustersim.results.profile_difference import ProfileDifference
    from clustersim.results.profiled_step import collective_wait_seconds, median_step

    predicted = _predicted_traces(result, [spans.rank for spans in traces.ranks])
    step_seconds = result.step_time if result.scenario.steps == 1 else None
    steps = median_step(traces.ranks), median_step(predicted.ranks, step_seconds)
    wait_seconds = collective_wait_seconds(traces.ranks, steps[0].step_number)
    return ProfileDifference(
        titles=(_measured_title(traces, len(steps[0].step_times)), title),
        steps=steps,
        fits_in_memory=result.fits_in_memory,
        wait_seconds=wait_seconds,
        notes=tuple(_comparison_notes(traces, result, wait_seconds)),
    )


def _predicted_traces(result: "SimulationResult", ranks: Sequence[int]) -> ProfilerTraces:
    """The traces that a profiler would write for some ranks of a simulated step."""
    return parse_traces(result.scenario.name, _kineto_files(result, ranks))


def _kineto_files(result: "SimulationResult", ranks: Sequence[int]) -> Iterator[tuple[Path, IO[bytes]]]:
    from clustersim.report.export.kineto import write_kineto
    from clustersim.report.export.rank_selection import describe_trace_ranks
    from clustersim.report.export.span_table import TraceExport

    for rank, spans in TraceExport(result, describe_trace_ranks(result, ranks)):
        file = io.BytesIO()
        write_kineto(result, rank, spans, file)
        file.seek(0)
        yield Path(f"rank-{rank.rank}.json"), file


def _measured_title(traces: ProfilerTraces, step_count: int) -> str:
    step_text = "one step" if step_count == 1 else f"the median of {step_count} steps"
    rank_count = len(traces.ranks)
    rank_text = (
        f"{f'{rank_count:,} of ' if rank_count < traces.world_size else ''}{traces.world_size:,} "
        f"rank{'s' * (traces.world_size > 1)}"
    )
    return f"{traces.source} ({step_text}, {rank_text}{f', {traces.device_name}' if traces.device_name else ''})"


def _comparison_notes(traces: ProfilerTraces, result: "SimulationResult", wait_seconds: Seconds) -> Iterator[str]:
    missing = sorted(set(range(traces.world_size)) - {spans.rank for spans in traces.ranks})
    if missing:
        listed_ranks = ", ".join(map(str, missing[:4])) + (
            f" and {len(missing) - 4:,} more" if len(missing) > 4 else ""
        )
        yield f"A has no traces of {'rank' if len(missing) == 1 else 'ranks'} {listed_ranks}; both means leave them out"
    accelerators, _ = result.scenario.cluster.accelerator_kinds()
    if traces.device_name and not any(
        device_matches(traces.device_name, accelerator.name) for accelerator in accelerators
    ):
        yield f"A ran on {traces.device_name}, and B is of {accelerators[0].name}"
    if len(traces.ranks[0].step_numbers) == 1:
        yield "A has only one step, whose time is that of its first to last event; profile two steps or more"
    if not traces.has_shapes:
        yield "A has no matmul shapes; profile with record_shapes=True to compare them"
    if any(label.collective for rank in traces.ranks for label in rank.labels):
        wait_text = f" (here {format_seconds(wait_seconds)}, where all members have traces)" if wait_seconds else ""
        yield f"times of A's collectives include waiting for other ranks{wait_text}, those of B do not"
    if not result.fits_in_memory:
        yield f"B does not fit in memory; its step of {format_step_time(result.step_time)} could not be run"


def _print_profile_difference(difference: "ProfileDifference", what_ifs: "WhatIfReport | None") -> None:
    from clustersim.cli.terminal import new_console
    from clustersim.report.terminal.profile import render_profile

    new_console().print(render_profile(difference, what_ifs), crop=False)  # arguments are on one line, to be copied
