"""What did nccl-tests measure on a cluster?

    python -m calibrate import-nccl-tests all_reduce_perf.txt all_gather.json --cluster dgx-h100 -o h100.json

Reads the text table and the JSON of any version (`text_reader`, `json_reader`) into samples of a record.
nccl-tests launches a collective many times back to back and prints the mean over launches and ranks, so a
sample's percentiles equal its mean, unless the same line was printed several times (`-N`, or several files):
then they are percentiles of those means.

Out-of-place times are read, which nccl-tests prints first; `--in-place` selects the others. In sendrecv every
rank sends to the next one at the same time: a sample of send_recv in pairs, across nodes if the ring of ranks
crosses nodes, since the slowest pair determines the time. Reductions are of the format in the column `type`.
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

from calibrate.collectives.record_update import add_record_arguments, add_to_record
from calibrate.collectives.tables import fit_table
from calibrate.fit.alpha_beta import fit_collectives
from calibrate.nccl_tests.json_reader import read_json
from calibrate.nccl_tests.run import NcclTestsRun, NcclTestsSample, TestedGpu
from calibrate.nccl_tests.text_reader import read_text
from clustersim.common import input_files
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
from clustersim.interop.device_names import device_matches
from clustersim.program.task import CollectiveType

METHOD: Final = "nccl-tests: mean over back-to-back launches and ranks, {} buffers"
_COLLECTIVE_BY_NAME: Final = {  # spelling of nccl-tests and of file names, without "_" and "-"
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
_DTYPE_BY_TYPE: Final = {  # NCCL's names (nccl-tests, src/common.cu: test_typenames)
    "float": DType.FP32,
    "bfloat16": DType.BF16,
    "half": DType.FP16,
    "fp8_e4m3": DType.FP8,
}
_UNSUPPORTED_TESTS: Final = ("alltoallv", "hypercube")  # tests of operations that no layout uses


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `command`."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="output of nccl-tests, as text or JSON (-J)")
    add_record_arguments(parser)
    parser.add_argument(
        "--in-place", action="store_true", help="use the in-place times instead of the out-of-place ones"
    )
    parser.add_argument("--collective", metavar="NAME", help="collective, if neither log nor file name states it")
    parser.add_argument("--ranks", type=int, metavar="N", help="number of GPUs, if the log does not list them")
    parser.add_argument("--nodes", type=int, metavar="N", help="number of nodes, if the log does not list GPUs")


def command(options: argparse.Namespace) -> None:
    """Read the files, add their samples to the record, and print what was read and the alpha-beta fits."""
    cluster = load_cluster(options.cluster)
    runs = tuple(run for file in options.files for run in read_runs(Path(file)))
    samples = tuple(_collective_samples(runs, cluster, options))
    for run in runs:
        if run.warnings:
            print(
                f"{run.location}: NCCL warned {len(run.warnings)} times, first of: {run.warnings[0]}", file=sys.stderr
            )
    output = Path(options.output)
    record = add_to_record(
        CalibrationRecord(_device_info(runs, cluster), _conditions(runs, options), collectives=samples), output
    )
    record = replace(record, collective_fits=fit_collectives(record.collectives))
    write_record(record, output)
    shapes = Counter((sample.call.collective.value, sample.call.ranks, sample.call.nodes) for sample in samples)
    for (name, ranks, nodes), count in shapes.items():
        print(f"{count} sizes of {name}, {ranks} ranks on {nodes} node{'s' * (nodes > 1)}")
    print(fit_table(record.collective_fits))
    print(f"wrote {output}; use: cost: {{record: {output}}}")


def read_runs(path: Path) -> tuple[NcclTestsRun, ...]:
    """All runs in a file of either form; raise InputError that names the problem."""
    text = input_files.read_text(path)
    if not text.strip():
        raise InputError(f"{path}: is empty")
    return (read_json(path, text),) if text.lstrip().startswith("{") else read_text(path, text)


def _collective_samples(
    runs: Iterable[NcclTestsRun], cluster: Cluster, options: argparse.Namespace
) -> Iterator[CollectiveSample]:
    """One sample per call, over all its lines."""
    seconds_by_call: dict[CollectiveCall, list[Seconds]] = {}
    source_by_call: dict[CollectiveCall, tuple[str, int]] = {}
    for run in runs:
        collective, group_shape = _select_collective(run, options.collective), _group_shape(run, cluster, options)
        for sample in run.samples:
            _check_results(sample)
            if sample.size:  # a payload too small for one element per rank is printed as 0
                call = _collective_call(collective, sample, group_shape)
                seconds_by_call.setdefault(call, []).append(_sample_seconds(sample, options.in_place))
                source_by_call[call] = (run.file, run.iterations)
        if run.out_of_bounds_count:
            raise InputError(
                f"{run.location}: the run found {run.out_of_bounds_count:,} values out of bounds; its results are wrong"
            )
    if not seconds_by_call:
        raise InputError(f"{', '.join(sorted({run.file for run in runs}))}: no size is above 0 bytes")
    for call, seconds in seconds_by_call.items():
        source, iterations = source_by_call[call]
        source = f"{source}, means of {iterations} iterations"
        p5, median, p95 = (float(value) for value in np.percentile(seconds, (5, 50, 95)))
        yield CollectiveSample(call, TimeStatistics(median, p5, p95, len(seconds)), source)


@dataclass(frozen=True, slots=True, order=True)
class NcclGroupShape:
    """Ranks of a run's groups, and nodes of each group."""

    ranks: int
    nodes: int


def _collective_call(collective: CollectiveType, sample: NcclTestsSample, shape: NcclGroupShape) -> CollectiveCall:
    if collective is CollectiveType.SEND_RECV:
        return CollectiveCall(collective, sample.size, 2, min(2, shape.nodes))
    dtype = _reduction_dtype(sample) if collective.is_reduction else DType.FP32
    return CollectiveCall(collective, sample.size, shape.ranks, shape.nodes, dtype)


def _reduction_dtype(sample: NcclTestsSample) -> DType:
    """The dtype that a reduction sums in."""
    if sample.type not in _DTYPE_BY_TYPE:
        raise InputError(
            f"{sample.location}: sums {format_value(sample.type)}, which no training does; run with -d "
            f"{' or '.join(_DTYPE_BY_TYPE)}"
        )
    return _DTYPE_BY_TYPE[sample.type]


def _check_results(sample: NcclTestsSample) -> None:
    """Raise InputError for a line with wrong results, in or out of place; unchecked results are accepted."""
    for wrong_count in sample.wrong_counts:
        if wrong_count:
            raise InputError(
                f"{sample.location}: {wrong_count:,g} wrong values at size {sample.size:,.0f} B, count "
                f"{sample.count:,}; "
                "a collective with wrong results has no time worth keeping"
            )


def _sample_seconds(sample: NcclTestsSample, in_place: bool) -> Seconds:
    seconds = sample.in_place if in_place else sample.out_of_place
    if seconds is None or not 0.0 < seconds < np.inf:
        kind = "in-place" if in_place else "out-of-place"
        raise InputError(f"{sample.location}: there is no {kind} time above zero")
    return seconds


def _select_collective(run: NcclTestsRun, option: str | None) -> CollectiveType:
    """The collective of a run: from the log, else --collective, else the file's name."""
    from_log = _lookup_collective(run.test.partition("_perf")[0])
    if run.test and from_log is None:
        raise InputError(
            f"{run.location}: {run.test} tests nothing that clustersim has; {_suggest_collective(run.test)}"
        )
    from_option = None if option is None else _lookup_collective(option)
    if option is not None and from_option is None:
        raise InputError(f"--collective: there is no collective {option!r}; {_suggest_collective(option)}")
    if from_log is not None and from_option not in (None, from_log):
        raise InputError(f"{run.location}: is {run.test}, not the --collective {option}")
    collective = from_log or from_option or _collective_in_file_name(run.file)
    if collective is None:
        raise InputError(
            f"{run.location}: neither log nor file name says which collective it is; add --collective NAME"
        )
    return collective


def _lookup_collective(name: str) -> CollectiveType | None:
    return _COLLECTIVE_BY_NAME.get(re.sub("[-_]", "", name).lower())


def _suggest_collective(name: str) -> str:
    return suggest_nearest(name, [collective.value for collective in _COLLECTIVE_BY_NAME.values()])


def _collective_in_file_name(file: str) -> CollectiveType | None:
    """The collective in a file's name; longer names are tried before those that they contain."""
    normalized = re.sub("[-_]", "", file).lower()
    if any(test in normalized for test in _UNSUPPORTED_TESTS):
        return None
    return next((collective for name, collective in _COLLECTIVE_BY_NAME.items() if name in normalized), None)


def _group_shape(run: NcclTestsRun, cluster: Cluster, options: argparse.Namespace) -> NcclGroupShape:
    """The common shape of all groups of the run."""
    if run.gpus:
        shapes = {_shape_of_group(run, group) for group in _gpus_by_group(run.gpus)}
        if len(shapes) > 1:
            raise InputError(f"{run.location}: its groups differ, {_format_shapes(shapes)}; a row is of equal ones")
        shape = shapes.pop()
    elif options.ranks is None or options.nodes is None:
        raise InputError(f"{run.location}: lists no GPUs; say how many ran with --ranks N --nodes N")
    else:
        shape = NcclGroupShape(options.ranks, options.nodes)
    _check_options(run, options, shape)
    _check_shape(run, cluster, shape)
    return shape


def _gpus_by_group(gpus: Sequence[TestedGpu]) -> list[list[TestedGpu]]:
    group_ids = dict.fromkeys(gpu.group for gpu in gpus)
    return [[gpu for gpu in gpus if gpu.group == group_id] for group_id in group_ids]


def _shape_of_group(run: NcclTestsRun, group: Sequence[TestedGpu]) -> NcclGroupShape:
    hosts = Counter(gpu.host for gpu in group)
    if len(set(hosts.values())) > 1:
        raise InputError(
            f"{run.location}: {min(hosts.values())} to {max(hosts.values())} ranks on a node; a row has as many on each"
        )
    return NcclGroupShape(len(group), len(hosts))


def _format_shapes(shapes: Iterable[NcclGroupShape]) -> str:
    return " and ".join(f"{shape.ranks} ranks on {shape.nodes} nodes" for shape in sorted(shapes))


def _check_options(run: NcclTestsRun, options: argparse.Namespace, shape: NcclGroupShape) -> None:
    for name, option_value, run_value in (("ranks", options.ranks, shape.ranks), ("nodes", options.nodes, shape.nodes)):
        if option_value not in (None, run_value):
            raise InputError(f"{run.location}: has {run_value} {name}, not the --{name} {option_value}")


def _check_shape(run: NcclTestsRun, cluster: Cluster, shape: NcclGroupShape) -> None:
    ranks, nodes = shape.ranks, shape.nodes
    if ranks < 2 or nodes < 1 or ranks % nodes:
        raise InputError(f"{run.location}: {ranks} ranks on {nodes} nodes are not two or more, as many on each node")
    if ranks // nodes > cluster.gpus_per_node:
        raise InputError(
            f"{run.location}: {ranks // nodes} ranks on a node, but {cluster.gpus_per_node} GPUs in {cluster.name}"
        )


def _device_info(runs: Sequence[NcclTestsRun], cluster: Cluster) -> DeviceInfo:
    """The device of the runs; raise InputError where it is not the cluster's accelerator, or runs differ."""
    device_name = _single_value("device", [(run, gpu.device) for run in runs for gpu in run.gpus])
    version = _single_value("NCCL version", [(run, run.version) for run in runs if run.version])
    if device_name and not device_matches(device_name, cluster.accelerator.name):
        raise InputError(
            f"{runs[0].location}: ran on {device_name}, but {cluster.name} has {cluster.accelerator.name}; "
            "name the cluster that it ran on"
        )
    library = Path(cluster.library).stem
    return DeviceInfo(cluster.accelerator.name, device_name, collectives=f"{library} {version}" if version else "")


def _single_value(label: str, values: Sequence[tuple[NcclTestsRun, str]]) -> str:
    """The common value of all runs, "" where there is none."""
    for run, value in values:
        if value != values[0][1]:
            raise InputError(f"{run.location}: {label} {value}, but {values[0][1]} before; keep a record for each")
    return values[0][1] if values else ""


def _conditions(runs: Sequence[NcclTestsRun], options: argparse.Namespace) -> MeasurementConditions:
    return MeasurementConditions(
        date=max(run.date for run in runs) or datetime.now(UTC).date().isoformat(),
        command=shlex.join(["python", "-m", "calibrate", *sys.argv[1:]]),
        method=METHOD.format("in-place" if options.in_place else "out-of-place"),
    )
