"""What did PyTorch's profiler record? Reader of its traces, one per rank.

Traces are written by `export_chrome_trace` or `tensorboard_trace_handler`. GPU events (categories kernel,
gpu_memcpy, gpu_memset) have a stream and times. A kernel belongs to the step (`ProfilerStep#N`, a host
annotation) in which the host launched it, according to its correlation id; kernels of a CUDA graph share
the launch of the graph. A trace without such marks has steps that end with the optimizer, which PyTorch
annotates by itself (`Optimizer.step#AdamW.step`). Matmul sizes are the input shapes of the operator that
launched the kernel, if the profiler recorded shapes. Times are microseconds with fractions; what a float
cannot resolve (a quarter of a microsecond in times since 1970, which older versions write) is lost.
Reference: pytorch/kineto, libkineto/src/output_json.cpp
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.common.errors import InputError, format_value
from clustersim.interop.host_kernels import add_host_kernels
from clustersim.interop.json_stream import JsonObjectStream, ReadProgress, no_progress
from clustersim.interop.kernel_launches import KernelLaunches
from clustersim.interop.kernel_names import make_span_label
from clustersim.interop.kineto_events import OPTIMIZER_MARKER, STEP_MARKER, RankEvents, lookup
from clustersim.results.profiled_step import GpuSpanLabel, RankSpans

TRACE_SUFFIXES: Final = (".json", ".json.gz")
FAKE_BACKEND: Final = "fake"
"""Backend of a process group whose collectives move nothing (torch.testing._internal.distributed.fake_pg)."""
_SCHEMA_VERSION: Final = 1
_HEADER_BYTES: Final = 2**20  # bytes within which `traceEvents` must begin


@dataclass(frozen=True, slots=True)
class ProfilerTraces:
    """Traces of one run. ranks: ascending, with equal step numbers; world_size: number of ranks.

    device_name: the GPU's own name, empty if no trace states it; has_shapes: whether input shapes were
    recorded; launches: of each rank's spans, in their order; producer: the program that wrote the traces, empty for
    PyTorch's profiler; backend: of the process group, such as `nccl`, empty where there is none.
    """

    source: str
    ranks: tuple[RankSpans, ...]
    world_size: int
    device_name: str
    has_shapes: bool
    launches: tuple[KernelLaunches, ...] = ()
    producer: str = ""
    backend: str = ""


def is_trace_path(path: Path) -> bool:
    """Whether a path holds traces: a directory, a compressed file, or JSON that begins like a trace."""
    if path.is_dir() or path.suffix == ".gz":
        return True
    if path.suffix != ".json" or not path.is_file():  # a pipe is read once
        return False
    try:
        with path.open("rb") as file:
            return b'"traceEvents"' in file.read(_HEADER_BYTES)
    except (OSError, ValueError):  # reported when the file is read
        return False


def read_traces(path: Path, progress: ReadProgress = no_progress, *, on_host: bool = False) -> ProfilerTraces:
    """Read a trace, or all traces of a directory; raises InputError that names the file and the problem.

    on_host: where nothing ran on a GPU, take the host's own operators for kernels.
    """
    traces = [_RankTrace.read(file, None, progress, on_host=on_host) for file in _trace_files(path)]
    return _combine_ranks(str(path), traces)


def parse_traces(source: str, contents: Iterable[tuple[Path, IO[bytes]]]) -> ProfilerTraces:
    """Traces from the content of files (JSON)."""
    return _combine_ranks(source, [_RankTrace.read(file, opened, no_progress) for file, opened in contents])


def trace_bytes(path: Path) -> int:
    """Bytes of the files that hold the traces, as they are on disk."""
    return sum(file.stat().st_size for file in _trace_files(path) if file.exists())


def _combine_ranks(source: str, traces: list["_RankTrace"]) -> ProfilerTraces:
    rank_traces = sorted(traces, key=lambda trace: trace.rank)
    for previous, following in pairwise(rank_traces):
        if previous.rank == following.rank:
            raise InputError(
                f"{following.file}: is of rank {following.rank}, as {previous.file} is; keep one trace of each rank"
            )
        if previous.world_size != following.world_size:
            raise InputError(
                f"{following.file}: is of {following.world_size} ranks, {previous.file} of {previous.world_size}; "
                "keep the traces of one run"
            )
    step_numbers = tuple(sorted(set.intersection(*(trace.step_numbers() for trace in rank_traces))))
    if not step_numbers:
        raise InputError(
            f"{source}: no {STEP_MARKER} with kernels is in the traces of all ranks; profile the same on each"
        )
    origin = min(trace.first_step_ns for trace in rank_traces)
    ranks = tuple(trace.rank_spans(step_numbers, origin) for trace in rank_traces)
    device = next((trace.device_name for trace in rank_traces if trace.device_name), "")
    shapes = any(label.matmul_shape is not None for trace in ranks for label in trace.labels)
    return ProfilerTraces(
        source,
        ranks,
        rank_traces[0].world_size,
        device,
        shapes,
        tuple(trace.kernel_launches() for trace in rank_traces),
        rank_traces[0].producer,
        rank_traces[0].backend,
    )


def _trace_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.name.endswith(TRACE_SUFFIXES))
    if not files:
        raise InputError(f"{path}: has no trace; their names end in {' or '.join(TRACE_SUFFIXES)}")
    return files


@dataclass(frozen=True)
class _RankTrace:
    """Trace of one rank. Times are microseconds.

    base_ns: origin of all times in nanoseconds; step_intervals: begin and end of each step on the host, by step
    number; process_groups: ranks of each process group.
    """

    file: Path
    rank: int
    world_size: int
    device_name: str
    base_ns: int
    step_intervals: Mapping[int, tuple[float, float]]
    events: RankEvents
    process_groups: Mapping[str, tuple[int, ...]]
    producer: str
    backend: str

    @classmethod
    def read(
        cls, file: Path, opened: IO[bytes] | None, progress: ReadProgress, *, on_host: bool = False
    ) -> "_RankTrace":
        """Read a file; opened: its content, else it is opened; on_host: as in `read_traces`."""
        stream, events = JsonObjectStream(file, "traceEvents", progress), RankEvents(file)
        for event in stream.elements(opened):
            events.add(event)
        content = stream.others
        if not stream.has_array:
            raise InputError(f"{file}: is no trace of PyTorch's profiler: traceEvents is missing")
        version = content.get("schemaVersion")
        if version != _SCHEMA_VERSION:
            raise InputError(
                f"{file}: schemaVersion: {format_value(version)} is not {_SCHEMA_VERSION}, which PyTorch's profiler "
                "writes and this program reads; another tool wrote the trace, or another version of it"
            )
        info = content.get("distributedInfo")
        info = info if isinstance(info, dict) else {}
        process_groups = dict(_process_groups(info))
        if on_host and not len(events.gpu):
            add_host_kernels(events, process_groups)
        trace = cls(
            file=file,
            rank=_non_negative_int(file, info, "rank", 0),
            world_size=_non_negative_int(file, info, "world_size", 1),
            device_name=_device_name(content),
            base_ns=_non_negative_int(file, content, "baseTimeNanoseconds", 0),
            step_intervals=events.marks or _optimizer_intervals(events),
            events=events,
            process_groups=process_groups,
            producer=str(content.get("producer", "")),
            backend=str(info.get("backend", "")),
        )
        trace.require_valid()
        return trace

    def require_valid(self) -> None:
        """Raise InputError if the trace cannot be used."""
        if not self.step_intervals:
            raise InputError(
                f"{self.file}: marks no steps ({STEP_MARKER}N), and has no {OPTIMIZER_MARKER}; call profiler.step() "
                "after each, as its schedule needs"
            )
        if not len(self.events.gpu):
            raise InputError(
                f"{self.file}: nothing ran on a GPU in it; profile with ProfilerActivity.CUDA, or name the cluster of "
                "CPUs that it ran on"
            )
        if self.rank >= self.world_size:
            raise InputError(f"{self.file}: rank: {self.rank} is not below world_size, which is {self.world_size}")

    @property
    def first_step_ns(self) -> int:
        """Begin of the trace's first step: nanoseconds since 1970, or on the clock that the machines share."""
        return self.base_ns + round(1000 * min(begin for begin, _ in self.step_intervals.values()))

    def step_numbers(self) -> set[int]:
        """Steps in which kernels were launched; a schedule's last marker has none."""
        marked_steps = sorted(self.step_intervals)
        step_index = self._step_indices(marked_steps)
        return {marked_steps[index] for index in np.unique(step_index[step_index >= 0]).tolist()}

    def rank_spans(self, step_numbers: Sequence[int], origin_ns: int) -> RankSpans:
        """GPU spans, sorted by start. step_numbers: the steps to use; origin_ns: origin of the returned times."""
        offset = (origin_ns - self.base_ns) / 1000
        start = (self.events.gpu.floats("start") - offset) * 1e-6
        label, labels = self._span_labels()
        order = self._order
        return RankSpans(
            rank=self.rank,
            start=start[order],
            end=(start + self.events.gpu.floats("duration") * 1e-6)[order],
            stream=self.events.gpu.integers("stream")[order],
            label_index=label[order],
            step_index=self._step_indices(step_numbers)[order],
            labels=labels,
            step_numbers=tuple(step_numbers),
        )

    def kernel_launches(self) -> KernelLaunches:
        """How the host launched each span, in their order."""
        return KernelLaunches.from_events(self.events, self._order)

    @cached_property
    def _order(self) -> IntArray:
        """GPU events by start."""
        return np.argsort(self.events.gpu.floats("start"), kind="stable")

    def _step_indices(self, step_numbers: Sequence[int]) -> IntArray:
        """Index among the given steps of the step in which each event was launched; -1: none.

        What ran before the first event whose launch is in the trace was launched before the profiler began.
        """
        launches, gpu = self.events.launches, self.events.gpu
        launched, is_known = lookup(
            launches.integers("correlation"), launches.floats("start"), gpu.integers("correlation")
        )
        starts = gpu.floats("start")
        times = np.where(is_known, launched, starts)
        if is_known.any():
            times = np.where(is_known | (starts >= starts[is_known].min()), times, -np.inf)
        bounds = np.array([self.step_intervals[step_number] for step_number in step_numbers])
        step = np.searchsorted(bounds[:, 0], times, side="right") - 1
        return np.where((step >= 0) & (times < bounds[step, 1]), step, -1)

    def _span_labels(self) -> tuple[IntArray, tuple[GpuSpanLabel, ...]]:
        """[events] index of each label, and the distinct ones; matmul sizes are those of the launching operator."""
        operators, gpu = self.events.operators, self.events.gpu
        has_dims = operators.integers("dims") >= 0
        dims, is_known = lookup(
            operators.integers("id")[has_dims], operators.integers("dims")[has_dims], gpu.integers("operator")
        )
        dims = np.where(is_known, dims, -1)
        pairs, pair_index = np.unique(np.stack([gpu.integers("label"), dims], axis=1), axis=0, return_inverse=True)
        label_ids: dict[GpuSpanLabel, int] = {}
        label_of_pair = [label_ids.setdefault(self._make_label(*pair), len(label_ids)) for pair in pairs.tolist()]
        return np.array(label_of_pair, dtype=np.int64)[pair_index.reshape(-1)], tuple(label_ids)

    def _make_label(self, label_index: int, dims_index: int) -> GpuSpanLabel:
        name, category, arguments = self.events.labels[label_index]
        dims = self.events.dims[dims_index] if dims_index >= 0 else None
        return make_span_label(name, category, arguments, dims, self.process_groups)


def _optimizer_intervals(events: RankEvents) -> dict[int, tuple[float, float]]:
    """Steps from the end of one optimizer step to that of the next, by number; the first begins with the first launch.

    Optimizers of one step, between which nothing is launched, are one.
    """
    updates = sorted(events.updates)
    launch_times = np.sort(events.launches.floats("start"))
    ends = [
        end
        for index, (_, end) in enumerate(updates)
        if index + 1 == len(updates) or np.diff(np.searchsorted(launch_times, (end, updates[index + 1][0])))[0] > 0
    ]
    return dict(enumerate(pairwise((*launch_times[:1].tolist(), *ends)))) if launch_times.size else {}


def _process_groups(info: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    configs = info.get("pg_config")
    for config in configs if isinstance(configs, list) else ():
        ranks = config.get("ranks") if isinstance(config, dict) else None
        if isinstance(ranks, list) and ranks:
            yield str(config.get("pg_name", "")), tuple(ranks)


def _device_name(content: Mapping[str, Any]) -> str:
    devices = content.get("deviceProperties")
    first = devices[0] if isinstance(devices, list) and devices else {}
    return str(first.get("name", "")) if isinstance(first, dict) else ""


def _non_negative_int(file: Path, mapping: Mapping[str, Any], key: str, default: int) -> int:
    value = mapping.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InputError(f"{file}: {key}: {format_value(value)} is not a whole number")
    return value
