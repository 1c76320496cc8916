"""What did collectives take in a step that PyTorch's profiler measured?

    python -m calibrate import-kineto traces --cluster dgx-h100 -o my-gpu.json

Reads the traces of a run (`clustersim.interop.kineto`) into rows of a record: collectives by name, payload and group,
over all steps that they cover. NCCL's kernels last while they wait for other ranks, so of each collective the shortest
of its members' kernels counts, that of whoever came last; where not all members have traces, what is left of waiting is
in the row, which is said. Collectives of a step run beside kernels and each other: rows are of that, not of the
collective alone. Which node a rank is on follows from its number, as launchers count: so many GPUs of a node at a time.

Left out: what has no payload in the trace (of older versions of PyTorch, or kernels of a dispatcher's own), groups
whose members are not known or lie unevenly on nodes, and messages in groups of more than two, whose peer no trace says.
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

from calibrate.collectives.record_update import added
from calibrate.collectives.tables import fit_table
from calibrate.fit.alpha_beta import fit_calls
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
from clustersim.interop.device_names import same_chip
from clustersim.interop.kineto import Traces, read_traces
from clustersim.program.task import CollectiveType
from clustersim.results.profiled_step import Moved, RankSpans, met

METHOD: Final = "PyTorch's profiler: collectives of training steps, beside kernels; the shortest of their members'"
_KNOWN: Final = {kind.value: kind for kind in CollectiveType if not kind.is_token_routing}
_FORMATS: Final = {dtype.value: dtype for dtype in DType}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `command`."""
    parser.add_argument("traces", metavar="TRACES", help="a trace (.json, .json.gz), or a directory of one run's")
    parser.add_argument("--cluster", required=True, metavar="NAME", help="where it ran: a shipped cluster, or a file")
    parser.add_argument(
        "-o", "--output", metavar="RECORD", required=True, help="record to write, or to add to, in JSON"
    )


def command(options: argparse.Namespace) -> None:
    """Read the traces, add their rows to the record, and print what was read and how a line fits it."""
    cluster, output = load_cluster(options.cluster), Path(options.output)
    traces = read_traces(Path(options.traces))
    if traces.device and not same_chip(traces.device, cluster.accelerator.name):
        raise InputError(
            f"{traces.source}: ran on {traces.device}, but {cluster.name} has {cluster.accelerator.name}; "
            "name the cluster that it ran on"
        )
    found = _found(traces, cluster)
    rows = tuple(_rows(found.seconds, traces.source))
    if not rows:
        raise InputError(f"{traces.source}: has no collective of a known group and payload{_left_out(found)}")
    device = DeviceInfo(cluster.accelerator.name, traces.device, collectives=Path(cluster.library).stem)
    conditions = MeasurementConditions(
        date=datetime.now(UTC).date().isoformat(),
        command=shlex.join(["python", "-m", "calibrate", *sys.argv[1:]]),
        method=METHOD,
    )
    record = added(CalibrationRecord(device, conditions, collectives=rows), output)
    record = replace(record, collective_fits=fit_calls(record.collectives))
    write_record(record, output)
    _print(found, record, output)


@dataclass(frozen=True, slots=True)
class _Found:
    """Seconds of each call, once for every time that a group did it; partly: how many of these not all members saw.

    left_out: how many kernels are of no call, by why.
    """

    seconds: Mapping[CollectiveCall, list[Seconds]]
    partly: int
    left_out: Mapping[str, int]


def _found(traces: Traces, cluster: Cluster) -> _Found:
    calls = {moved: _call(moved, cluster) for rank in traces.ranks for moved in _moves(rank)}
    seconds: dict[CollectiveCall, list[Seconds]] = defaultdict(list)
    left_out: Counter[str] = Counter()
    partly = 0
    for (moved, _), took in met(traces.ranks).items():
        call = calls[moved]
        if isinstance(call, str):
            left_out[call] += len(took)
            continue
        seconds[call].append(min(took.values()))
        partly += len(took) < moved.ranks
    return _Found(seconds, partly, left_out)


def _moves(spans: RankSpans) -> Iterable[Moved]:
    return {label.moved for label in spans.labels if label.moved is not None}


def _call(moved: Moved, cluster: Cluster) -> CollectiveCall | str:
    """What a record calls it, or why it has no row."""
    collective = _KNOWN.get(moved.name)
    if collective is None or not moved.payload:
        return "no payload in the trace"
    if len(moved.members) != moved.ranks or moved.ranks < 2:
        return "members that the trace does not say"
    if collective is CollectiveType.SEND_RECV and moved.ranks > 2:
        return "messages in a group of more than two"
    nodes = Counter(rank // cluster.gpus_per_node for rank in moved.members)
    if len(set(nodes.values())) > 1:
        return "groups that lie unevenly on nodes"
    form = _FORMATS.get(moved.reduces, DType.FP32)
    return CollectiveCall(collective, moved.payload, moved.ranks, len(nodes), form)


def _rows(seconds: Mapping[CollectiveCall, list[Seconds]], source: str) -> Iterator[CollectiveSample]:
    for call, some in seconds.items():
        p5, median, p95 = (float(value) for value in np.percentile(some, (5, 50, 95)))
        yield CollectiveSample(call, TimeStatistics(median, p5, p95, len(some)), source)


def _print(found: _Found, record: CalibrationRecord, output: Path) -> None:
    if found.partly:
        many = sum(map(len, found.seconds.values()))
        words = "have no traces of some members, so waiting for these may be in their times"
        print(f"{found.partly:,} of {many:,} collectives {words}", file=sys.stderr)
    if found.left_out:
        print(f"left out{_left_out(found)}", file=sys.stderr)
    shapes = Counter((call.collective.value, call.ranks, call.nodes) for call in found.seconds)
    for (name, ranks, nodes), count in shapes.items():
        print(f"{count} sizes of {name}, {ranks} ranks on {nodes} node{'s' * (nodes > 1)}")
    print(fit_table(record.collective_fits))
    print(f"wrote {output}; use: cost: {{record: {output}}}")


def _left_out(found: _Found) -> str:
    """Why, and how many kernels."""
    return "".join(f"; {why}: {many:,} kernels" for why, many in found.left_out.items())
