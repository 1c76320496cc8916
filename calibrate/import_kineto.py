"""What did collectives take in a step that PyTorch's profiler measured?

    python -m calibrate import-kineto traces --cluster dgx-h100 -o my-gpu.json

Reads the traces of a run (`clustersim.interop.kineto`) into collective samples of a record: by name, payload
and group, over all steps in the traces. NCCL kernels include waiting for other ranks, so the shortest kernel
among the members of a collective counts, that of the last arriver; where some members have no trace,
remaining waiting time is in the sample, which is printed. Collectives of a step overlap with kernels and
with each other: samples are of that, not of isolated collectives. The node of a rank follows from its id, as
launchers assign them: consecutive ranks fill a node.

Skipped: collectives without a payload in the trace (older versions of PyTorch, or kernels of a token
dispatcher), groups whose members are unknown or unevenly distributed over nodes, and messages in groups of
more than two, whose peer is not in the trace.
"""

import argparse
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import numpy as np

from calibrate.collectives.record_update import add_record_arguments, add_to_record
from calibrate.collectives.tables import fit_table
from calibrate.fit.alpha_beta import fit_collectives
from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import (
    CalibrationRecord,
    CollectiveCall,
    CollectiveSample,
    DeviceInfo,
    MeasurementConditions,
    TimeStatistics,
)
from clustersim.cost.record_file import write_record
from clustersim.hardware.cluster import Cluster, load_cluster
from clustersim.interop.device_names import device_matches
from clustersim.interop.kineto import ProfilerTraces, read_traces
from clustersim.program.task import CollectiveType
from clustersim.results.profiled_step import ProfiledCollective, RankSpans, collective_durations

METHOD: Final = (
    "PyTorch's profiler: collectives of training steps, concurrent with kernels; the shortest of their members'"
)
_COLLECTIVE_BY_NAME: Final = {kind.value: kind for kind in CollectiveType if not kind.is_token_routing}
_DTYPE_BY_NAME: Final = {dtype.value: dtype for dtype in DType}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `command`."""
    parser.add_argument(
        "traces", metavar="TRACES", help="a trace (.json, .json.gz), or the directory of a run's traces"
    )
    add_record_arguments(parser)


def command(options: argparse.Namespace) -> None:
    """Read the traces, add their samples to the record, and print what was read and the alpha-beta fits."""
    cluster, output = load_cluster(options.cluster), Path(options.output)
    traces = read_traces(Path(options.traces), on_host=cluster.accelerator.is_cpu)
    if traces.device_name and not device_matches(traces.device_name, cluster.accelerator.name):
        raise InputError(
            f"{traces.source}: ran on {traces.device_name}, but {cluster.name} has {cluster.accelerator.name}; "
            "name the cluster that it ran on"
        )
    durations = _collective_durations(traces, cluster)
    samples = tuple(_samples(durations.seconds, traces.source))
    if not samples:
        raise InputError(f"{traces.source}: has no collective of a known group and payload{_skipped_text(durations)}")
    device = DeviceInfo(
        cluster.accelerator.name,
        traces.device_name,
        collectives=Path(cluster.library).stem,
        threads=int(cluster.accelerator.is_cpu),
    )
    conditions = MeasurementConditions(
        date=datetime.now(UTC).date().isoformat(),
        command=shlex.join(["python", "-m", "calibrate", *sys.argv[1:]]),
        method=METHOD,
    )
    record = add_to_record(CalibrationRecord(device, conditions, collectives=samples), output)
    record = replace(record, collective_fits=fit_collectives(record.collectives))
    write_record(record, output)
    _print_summary(durations, record, output)


@dataclass(frozen=True, slots=True)
class _TraceDurations:
    """Durations of collective calls in the traces.

    seconds: one duration per execution of a call by a group; incomplete_count: executions of which some members
    have no trace; skipped_by_reason: number of kernels that belong to no call.
    """

    seconds: Mapping[CollectiveCall, list[Seconds]]
    incomplete_count: int
    skipped_by_reason: Mapping[str, int]


def _collective_durations(traces: ProfilerTraces, cluster: Cluster) -> _TraceDurations:
    calls = {
        collective: call_or_reason(collective, cluster)
        for spans in traces.ranks
        for collective in _collectives_of(spans)
    }
    seconds: dict[CollectiveCall, list[Seconds]] = defaultdict(list)
    skipped: Counter[str] = Counter()
    incomplete_count = 0
    for (collective, _), seconds_by_rank in collective_durations(traces.ranks).items():
        call = calls[collective]
        if isinstance(call, str):
            skipped[call] += len(seconds_by_rank)
            continue
        seconds[call].append(min(seconds_by_rank.values()))
        incomplete_count += len(seconds_by_rank) < collective.group_size
    return _TraceDurations(seconds, incomplete_count, skipped)


def _collectives_of(spans: RankSpans) -> Iterable[ProfiledCollective]:
    return {label.collective for label in spans.labels if label.collective is not None}


def call_or_reason(moved: ProfiledCollective, cluster: Cluster) -> CollectiveCall | str:
    """The call as a record describes it, or the reason why it is skipped."""
    collective = _COLLECTIVE_BY_NAME.get(moved.name)
    if collective is None or not moved.payload:
        return "no payload in the trace"
    if len(moved.members) != moved.group_size or moved.group_size < 2:
        return "members that the trace does not say"
    if collective is CollectiveType.SEND_RECV and moved.group_size > 2:
        return "messages in a group of more than two"
    nodes = Counter(rank // cluster.gpus_per_node for rank in moved.members)
    if len(set(nodes.values())) > 1:
        return "groups that lie unevenly on nodes"
    dtype = _DTYPE_BY_NAME.get(moved.reduction, DType.FP32)
    return CollectiveCall(collective, moved.payload, moved.group_size, len(nodes), dtype)


def _samples(seconds: Mapping[CollectiveCall, list[Seconds]], source: str) -> Iterator[CollectiveSample]:
    for call, durations in seconds.items():
        p5, median, p95 = (float(value) for value in np.percentile(durations, (5, 50, 95)))
        yield CollectiveSample(call, TimeStatistics(median, p5, p95, len(durations)), source)


def _print_summary(durations: _TraceDurations, record: CalibrationRecord, output: Path) -> None:
    if durations.incomplete_count:
        total = sum(map(len, durations.seconds.values()))
        text = "have no traces of some members, so waiting for these may be in their times"
        print(f"{durations.incomplete_count:,} of {total:,} collectives {text}", file=sys.stderr)
    if durations.skipped_by_reason:
        print(f"left out{_skipped_text(durations)}", file=sys.stderr)
    shapes = Counter((call.collective.value, call.ranks, call.nodes) for call in durations.seconds)
    for (name, ranks, nodes), count in shapes.items():
        print(f"{count} sizes of {name}, {ranks} ranks on {nodes} node{'s' * (nodes > 1)}")
    print(fit_table(record.collective_fits))
    print(f"wrote {output}; use: cost: {{record: {output}}}")


def _skipped_text(durations: _TraceDurations) -> str:
    """The reasons for skipping and the number of kernels of each, as text."""
    return "".join(f"; {reason}: {count:,} kernels" for reason, count in durations.skipped_by_reason.items())
