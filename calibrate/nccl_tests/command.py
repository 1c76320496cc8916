"""What did nccl-tests measure on a cluster?

    python -m calibrate import-nccl-tests all_reduce_perf.txt all_gather.json --cluster dgx-h100 -o h100.json

Reads the text table and the JSON of any version (`nccl_text`, `nccl_json`) into rows of a record. nccl-tests launches
a collective many times back to back and prints the mean over launches and ranks, so a row's percentiles are its mean,
unless the same line was printed several times (`-N`, or several files): then they are of those.

Out-of-place times are taken, those that nccl-tests prints first; `--in-place` takes the others. sendrecv has every rank
send to the next one at the same time: a row of send_recv in pairs, across nodes if the ring of ranks crosses nodes,
since the slowest pair sets the time. Reductions are of the format in the column `type`.
"""

import argparse
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import numpy as np

from calibrate.collectives.record_update import added
from calibrate.collectives.tables import fit_table
from calibrate.fit.alpha_beta import fit_calls
from calibrate.nccl_tests.json_reader import read_json
from calibrate.nccl_tests.run import Place, Run, Sample
from calibrate.nccl_tests.text_reader import read_text
from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError, format_value, suggest_nearest
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
from clustersim.program.task import CollectiveType

METHOD: Final = "nccl-tests: mean over back-to-back launches and ranks, {} buffers"
_COLLECTIVES: Final = {  # as nccl-tests and files named after it spell them, without "_" and "-"
    "allreduce": CollectiveType.ALL_REDUCE,
    "allgather": CollectiveType.ALL_GATHER,
    "reducescatter": CollectiveType.REDUCE_SCATTER,
    "alltoall": CollectiveType.ALL_TO_ALL,
    "sendrecv": CollectiveType.SEND_RECV,
    "broadcast": CollectiveType.BROADCAST,
    "scatter": CollectiveType.SCATTER,
    "gather": CollectiveType.GATHER,
    "reduce": CollectiveType.REDUCE,
}
_FORMATS: Final = {  # what NCCL calls them (nccl-tests, src/common.cu: test_typenames)
    "float": DType.FP32,
    "bfloat16": DType.BF16,
    "half": DType.FP16,
    "fp8_e4m3": DType.FP8,
}
_OTHERS: Final = ("alltoallv", "hypercube")  # tests of what no layout here does


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `command`."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="what nccl-tests printed, or its JSON (-J)")
    parser.add_argument("--cluster", required=True, metavar="NAME", help="where it ran: a shipped cluster, or a file")
    parser.add_argument(
        "-o", "--output", metavar="RECORD", required=True, help="record to write, or to add to, in JSON"
    )
    parser.add_argument("--in-place", action="store_true", help="take the in-place times, not the out-of-place ones")
    parser.add_argument("--collective", metavar="NAME", help="which one, where neither log nor file name says")
    parser.add_argument("--ranks", type=int, metavar="N", help="how many GPUs, where the log lists none")
    parser.add_argument("--nodes", type=int, metavar="N", help="on how many nodes, where the log lists no GPUs")


def command(options: argparse.Namespace) -> None:
    """Read the files, add their rows to the record, and print what was read and how a line fits it."""
    cluster = load_cluster(options.cluster)
    runs = tuple(run for file in options.files for run in read_runs(Path(file)))
    rows = tuple(_rows(runs, cluster, options))
    for run in runs:
        if run.warnings:
            print(f"{run.where}: NCCL warned {len(run.warnings)} times, first of: {run.warnings[0]}", file=sys.stderr)
    output = Path(options.output)
    record = added(CalibrationRecord(_device(runs, cluster), _conditions(runs, options), collectives=rows), output)
    record = replace(record, collective_fits=fit_calls(record.collectives))
    write_record(record, output)
    shapes = Counter((row.call.collective.value, row.call.ranks, row.call.nodes) for row in rows)
    for (name, ranks, nodes), count in shapes.items():
        print(f"{count} sizes of {name}, {ranks} ranks on {nodes} node{'s' * (nodes > 1)}")
    print(fit_table(record.collective_fits))
    print(f"wrote {output}; use: cost: {{record: {output}}}")


def read_runs(path: Path) -> tuple[Run, ...]:
    """All runs of a file, whichever form it has; raise InputError that names what is wrong with it."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: cannot be read (not UTF-8 text)") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', error)})") from error
    if not text.strip():
        raise InputError(f"{path}: is empty")
    return (read_json(path, text),) if text.lstrip().startswith("{") else read_text(path, text)


def _rows(runs: Iterable[Run], cluster: Cluster, options: argparse.Namespace) -> Iterator[CollectiveSample]:
    """A row for each call, of all its samples."""
    samples: dict[CollectiveCall, list[Seconds]] = {}
    origin: dict[CollectiveCall, tuple[str, int]] = {}
    for run in runs:
        collective, shape = _collective(run, options.collective), _shape(run, cluster, options)
        for sample in run.samples:
            _require_right(sample)
            if sample.size:  # a payload too small for a part of each rank is printed as 0
                call = _call(collective, sample, shape)
                samples.setdefault(call, []).append(_seconds(sample, options.in_place))
                origin[call] = (run.file, run.iterations)
        if run.wrong:
            raise InputError(f"{run.where}: the run found {run.wrong:,} values out of bounds; its results are wrong")
    if not samples:
        raise InputError(f"{', '.join(sorted({run.file for run in runs}))}: no size is above 0 bytes")
    for call, seconds in samples.items():
        source, iterations = origin[call]
        source = f"{source}, means of {iterations} iterations"
        p5, median, p95 = (float(value) for value in np.percentile(seconds, (5, 50, 95)))
        yield CollectiveSample(call, TimeStatistics(median, p5, p95, len(seconds)), source)


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """How many ranks a run's groups have, on how many nodes each."""

    ranks: int
    nodes: int


def _call(collective: CollectiveType, sample: Sample, shape: Shape) -> CollectiveCall:
    if collective is CollectiveType.SEND_RECV:
        return CollectiveCall(collective, sample.size, 2, min(2, shape.nodes))
    form = _summed(sample) if collective.is_reduction else DType.FP32
    return CollectiveCall(collective, sample.size, shape.ranks, shape.nodes, form)


def _summed(sample: Sample) -> DType:
    """The format that a reduction sums in."""
    if sample.type not in _FORMATS:
        raise InputError(
            f"{sample.where}: sums {format_value(sample.type)}, which no training does; run with -d {' or '.join(_FORMATS)}"
        )
    return _FORMATS[sample.type]


def _require_right(sample: Sample) -> None:
    """Refuse a line whose results were wrong, in or out of place; unchecked ones are taken."""
    for wrong in sample.wrong:
        if wrong:
            raise InputError(
                f"{sample.where}: {wrong:,g} wrong values at size {sample.size:,.0f} B, count {sample.count:,}; "
                "a collective with wrong results has no time worth keeping"
            )


def _seconds(sample: Sample, in_place: bool) -> Seconds:
    seconds = sample.in_place if in_place else sample.out_of_place
    if seconds is None or not 0.0 < seconds < np.inf:
        kind = "in-place" if in_place else "out-of-place"
        raise InputError(f"{sample.where}: there is no {kind} time above zero")
    return seconds


def _collective(run: Run, option: str | None) -> CollectiveType:
    """Which collective a run is of: the log says, else --collective, else the file's name."""
    said = _spelt(run.test.partition("_perf")[0])
    if run.test and said is None:
        raise InputError(f"{run.where}: {run.test} tests nothing that clustersim has; {_choices(run.test)}")
    asked = None if option is None else _spelt(option)
    if option is not None and asked is None:
        raise InputError(f"--collective: there is no collective {option!r}; {_choices(option)}")
    if said is not None and asked not in (None, said):
        raise InputError(f"{run.where}: is {run.test}, not the --collective {option}")
    found = said or asked or _named(run.file)
    if found is None:
        raise InputError(f"{run.where}: neither log nor file name says which collective it is; add --collective NAME")
    return found


def _spelt(name: str) -> CollectiveType | None:
    return _COLLECTIVES.get(re.sub("[-_]", "", name).lower())


def _choices(name: str) -> str:
    return suggest_nearest(name, [collective.value for collective in _COLLECTIVES.values()])


def _named(file: str) -> CollectiveType | None:
    """The collective in a file's name; longer names stand before those that they contain."""
    plain = re.sub("[-_]", "", file).lower()
    if any(other in plain for other in _OTHERS):
        return None
    return next((collective for word, collective in _COLLECTIVES.items() if word in plain), None)


def _shape(run: Run, cluster: Cluster, options: argparse.Namespace) -> Shape:
    """The shape of all of the run's groups."""
    if run.places:
        shapes = {_shape_of(run, group) for group in _groups(run.places)}
        if len(shapes) > 1:
            raise InputError(f"{run.where}: its groups differ, {_shapes(shapes)}; a row is of equal ones")
        shape = shapes.pop()
    elif options.ranks is None or options.nodes is None:
        raise InputError(f"{run.where}: lists no GPUs; say how many ran with --ranks N --nodes N")
    else:
        shape = Shape(options.ranks, options.nodes)
    _require_agreed(run, options, shape)
    _require_legal(run, cluster, shape)
    return shape


def _groups(places: Sequence[Place]) -> list[list[Place]]:
    numbers = dict.fromkeys(place.group for place in places)
    return [[place for place in places if place.group == number] for number in numbers]


def _shape_of(run: Run, group: Sequence[Place]) -> Shape:
    hosts = Counter(place.host for place in group)
    if len(set(hosts.values())) > 1:
        raise InputError(
            f"{run.where}: {min(hosts.values())} to {max(hosts.values())} ranks on a node; a row has as many on each"
        )
    return Shape(len(group), len(hosts))


def _shapes(shapes: Iterable[Shape]) -> str:
    return " and ".join(f"{shape.ranks} ranks on {shape.nodes} nodes" for shape in sorted(shapes))


def _require_agreed(run: Run, options: argparse.Namespace, shape: Shape) -> None:
    for name, given, found in (("ranks", options.ranks, shape.ranks), ("nodes", options.nodes, shape.nodes)):
        if given not in (None, found):
            raise InputError(f"{run.where}: has {found} {name}, not the --{name} {given}")


def _require_legal(run: Run, cluster: Cluster, shape: Shape) -> None:
    ranks, nodes = shape.ranks, shape.nodes
    if ranks < 2 or nodes < 1 or ranks % nodes:
        raise InputError(f"{run.where}: {ranks} ranks on {nodes} nodes are not two or more, as many on each node")
    if ranks // nodes > cluster.gpus_per_node:
        raise InputError(
            f"{run.where}: {ranks // nodes} ranks on a node, but {cluster.gpus_per_node} GPUs in {cluster.name}"
        )


def _device(runs: Sequence[Run], cluster: Cluster) -> DeviceInfo:
    """What the runs ran on; raise InputError where that is not the cluster's accelerator, or differs."""
    names = _one("device", [(run, place.device) for run in runs for place in run.places])
    versions = _one("NCCL version", [(run, run.version) for run in runs if run.version])
    if names and not same_chip(names, cluster.accelerator.name):
        raise InputError(
            f"{runs[0].where}: ran on {names}, but {cluster.name} has {cluster.accelerator.name}; "
            "name the cluster that it ran on"
        )
    library = Path(cluster.library).stem
    return DeviceInfo(cluster.accelerator.name, names, collectives=f"{library} {versions}" if versions else "")


def _one(what: str, found: Sequence[tuple[Run, str]]) -> str:
    """The one value of all runs, "" where there is none."""
    for run, value in found:
        if value != found[0][1]:
            raise InputError(f"{run.where}: {what} {value}, but {found[0][1]} before; keep a record for each")
    return found[0][1] if found else ""


def _conditions(runs: Sequence[Run], options: argparse.Namespace) -> MeasurementConditions:
    return MeasurementConditions(
        date=max(run.date for run in runs) or datetime.now(UTC).date().isoformat(),
        command=shlex.join(["python", "-m", "calibrate", *sys.argv[1:]]),
        method=METHOD.format("in-place" if options.in_place else "out-of-place"),
    )
