"""What did one rank really do? A record made of a trace that PyTorch's profiler wrote.

    clustersim calibrate from-profile TRACE [--snapshot FILE] --for plan.yaml -o record.json

TRACE is a file or the directory of a run's traces; --for is the scenario of the profiled step itself. Other layouts,
depths and batches are then simulated with `--set cost.record=record.json`. Needs no PyTorch.
"""

import argparse
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Final

from calibrate.profile.memory import MemoryComparison, compare_memory
from calibrate.profile.record import ProfileRecord, record_from_profile
from clustersim.cli.progress import count_progress, show_activity
from clustersim.common.errors import InputError
from clustersim.common.units import Dimension, Seconds, format_bytes, format_seconds, parse_quantity
from clustersim.cost.calibration_record import CalibrationRecord, ProfileAnchor
from clustersim.cost.record_file import write_record
from clustersim.cost.record_kinds import MeasurementOutcome
from clustersim.interop.kineto import FAKE_BACKEND, ProfilerTraces, read_traces, trace_bytes
from clustersim.scenario import Scenario
from clustersim.simulation import simulate

_LISTED: Final = 8  # unmatched calls that are printed
_MEGABYTE: Final = 10**6
_HOST_BOUND: Final = 0.05  # share of stalls above which the profiler's own time in the host matters


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `command`."""
    parser.add_argument(
        "trace", metavar="TRACE", type=Path, help="a trace (.json, .json.gz), or the directory of a run's traces"
    )
    parser.add_argument(
        "--for", dest="scenario", metavar="SCENARIO", required=True, help="scenario of the profiled step itself"
    )
    parser.add_argument("--set", dest="overrides", metavar="KEY=VALUE", action="append", default=[],
                        help="override a key of the scenario")  # fmt: skip
    parser.add_argument(
        "--snapshot", metavar="FILE", type=Path,
        help="a memory snapshot of the same rank (torch.cuda.memory._dump_snapshot, pickle or JSON)",
    )  # fmt: skip
    parser.add_argument(
        "--step-time", metavar="TIME", type=_parse_time,
        help="time of the same step without a profiler, which slows the host (such as 61.2ms)",
    )  # fmt: skip
    parser.add_argument("-o", "--output", metavar="RECORD", type=Path, required=True, help="record to write (JSON)")


def command(options: argparse.Namespace) -> None:
    """Read the trace, write its record, and print how both agree."""
    scenario = Scenario.load(options.scenario, options.overrides)
    if options.output.resolve() in {
        path.resolve() for path in (options.trace, Path(options.scenario), *scenario.files)
    }:
        raise InputError(f"-o {options.output}: is one of the files that are read; name another file")
    traces = _read(options.trace, on_host=scenario.cluster.accelerator.is_cpu)
    with show_activity("matching"):
        profile = record_from_profile(traces, scenario, options.step_time)
    memory = None
    if options.snapshot is not None:
        memory = compare_memory(options.snapshot, scenario, traces.ranks[0].rank)
        profile = profile.with_memory(memory.anchor)
    write_record(profile.record, options.output)
    _print_summary(profile, scenario, traces)
    if memory is not None:
        _print_memory(memory)
    print(f"wrote {options.output}; use: cost: {{record: {options.output}}}")


def _parse_time(text: str) -> Seconds:
    try:
        return parse_quantity(text, Dimension.TIME)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _read(path: Path, *, on_host: bool) -> ProfilerTraces:
    total = max(1, trace_bytes(path) // _MEGABYTE) if path.exists() else None
    with count_progress(f"reading {path}, MB", total) as report:
        return read_traces(path, lambda done: report(done // _MEGABYTE), on_host=on_host)


def _print_summary(profile: ProfileRecord, scenario: Scenario, traces: ProfilerTraces) -> None:
    record, anchor = profile.record, profile.anchor
    print(_steps_text(anchor, record))
    print(_matched_text(anchor))
    for call in anchor.unmatched[:_LISTED]:
        print(f"  {call.phase}: {call.count:g} x {call.name}, {format_seconds(call.seconds)}")
    absent = Counter(sample.name for sample in record.kernels if sample.outcome is MeasurementOutcome.ABSENT)
    if absent:
        print(f"operators of the plan that the step runs no kernel for: {', '.join(absent)}")
    with show_activity("simulating"):
        predicted = {
            label: simulate(replace(scenario, cost=replace(scenario.cost, record=used))).step_time
            for label, used in (("without it", None), ("with it", record))
        }
    errors = "; ".join(
        f"{label} {format_seconds(seconds)} ({seconds / anchor.step_time - 1.0:+.1%})"
        for label, seconds in predicted.items()
    )
    print(f"step measured {format_seconds(anchor.step_time)}; predicted {errors}")
    for note in _notes(profile, scenario, traces):
        print(f"note: {note}", file=sys.stderr)


def _print_memory(memory: MemoryComparison) -> None:
    anchor = memory.anchor
    print(
        f"memory: allocated {format_bytes(anchor.allocated)} at the peak, reserved {format_bytes(anchor.reserved)}; "
        f"the model has {format_bytes(anchor.modelled)} of it ({anchor.modelled / anchor.allocated - 1.0:+.1%})"
    )
    modelled = ", ".join(f"{category} {format_bytes(size)}" for category, size in memory.by_category.items())
    print(f"  modelled: {modelled}")
    for origin, size in memory.peak.origins[:_LISTED]:
        print(f"  {format_bytes(size)} {origin}")
    if memory.peak.doubt:
        print(f"note: {memory.peak.doubt}; record_memory_history(max_entries=...) keeps more", file=sys.stderr)


def _steps_text(anchor: ProfileAnchor, record: CalibrationRecord) -> str:
    ranks = "1 rank" if anchor.ranks == 1 else f"{anchor.ranks:,} ranks"
    steps = "1 step" if anchor.steps == 1 else f"{anchor.steps:,} steps"
    measured = sum(1 for sample in record.kernels if sample.time is not None)
    collectives = f", {len(record.collectives)} collectives" if record.collectives else ""
    return f"{steps} of {ranks}: {measured} kernels{collectives}"


def _matched_text(anchor: ProfileAnchor) -> str:
    share = anchor.matched / anchor.busy if anchor.busy else 0.0
    text = f"{share:.2%} of the busy time ({format_seconds(anchor.busy)}) is of the plan's operators"
    return f"{text}; work of none:" if anchor.unmatched else text


def _notes(profile: ProfileRecord, scenario: Scenario, traces: ProfilerTraces) -> list[str]:
    anchor, notes = profile.anchor, list(profile.notes)
    if traces.backend == FAKE_BACKEND:
        notes.append("a fake process group moves nothing: collectives and waiting are modelled, not measured")
    elif anchor.ranks < scenario.layout.world_size:
        notes.append(
            f"traces of {anchor.ranks:,} of {scenario.layout.world_size:,} ranks: waiting for the others cannot be "
            "told from transfers"
        )
    idle = 1.0 - anchor.busy / anchor.step_time
    if anchor.host_scale != 1.0:
        kernels = ", as kernels and collectives do" if anchor.kernel_scale != 1.0 else ""
        notes.append(f"without the profiler the host takes {anchor.host_scale:.2f} of its time in the trace{kernels}")
    elif idle > _HOST_BOUND and scenario.layout.world_size == 1:
        notes.append(
            f"the GPU is idle for {idle:.0%} of the profiled step; the profiler itself slows the host, so that such a "
            "step is faster without it: --step-time says how long it takes then"
        )
    return notes
