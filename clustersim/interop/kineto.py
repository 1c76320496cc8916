"""What did PyTorch's profiler see? Its traces (`export_chrome_trace`, `tensorboard_trace_handler`), one of each rank.

What ran on the GPU (categories kernel, gpu_memcpy, gpu_memset), on which stream and when. A kernel belongs to the step
(`ProfilerStep#N`, a mark of the host) in which the host launched it, which its correlation tells; those of a graph,
which one launch starts, have that launch's. Sizes of products are those of the operator that launched the kernel,
where the profiler recorded shapes. Times are microseconds with fractions; what a float cannot tell of them (a quarter
of a microsecond in times since 1970, which older versions write) is lost.
Reference: pytorch/kineto, libkineto/src/output_json.cpp
"""

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.errors import InputError, format_value
from clustersim.interop.kernel_names import label_of
from clustersim.results.profiled_step import RankSpans, SpanLabel

ENDINGS: Final = (".json", ".json.gz")
_VERSION: Final = 1
_BEGINNING: Final = 2**20  # bytes, in which a trace has come to its events
_ON_GPU: Final = ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset")
_LAUNCHES: Final = ("cuda_runtime", "cuda_driver", "runtime", "driver", "privateuse1_runtime")
_MARK: Final = "ProfilerStep#"
Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Traces:
    """What traces of one run say. ranks: ascending, with equal `numbers`; world: how many ranks there are.

    device: the GPU's own name, empty where no trace says it; shapes: whether operators have their sizes.
    """

    source: str
    ranks: tuple[RankSpans, ...]
    world: int
    device: str
    shapes: bool


def is_traces(path: Path) -> bool:
    """Whether a path is one of traces: a directory, a compressed file, or JSON that begins as traces do."""
    if path.is_dir() or path.suffix == ".gz":
        return True
    try:
        with path.open("rb") as file:
            return path.suffix == ".json" and b'"traceEvents"' in file.read(_BEGINNING)
    except (OSError, ValueError):  # what cannot be read is told by who reads it
        return False


def read_traces(path: Path) -> Traces:
    """Read a trace, or all traces of a directory; raise InputError that names the file and what is wrong with it."""
    files = _files(path)
    return traces_of(str(path), ((file, _content(file)) for file in files))


def traces_of(source: str, contents: Iterable[tuple[Path, Any]]) -> Traces:
    """What the contents of files say, as JSON has them."""
    read = sorted((_Trace.of(file, content) for file, content in contents), key=lambda each: each.rank)
    for before, after in pairwise(read):
        if before.rank == after.rank:
            raise InputError(f"{after.file}: is of rank {after.rank}, as {before.file} is; keep one trace of each rank")
        if before.world != after.world:
            raise InputError(
                f"{after.file}: is of {after.world} ranks, {before.file} of {before.world}; keep the traces of one run"
            )
    numbers = tuple(sorted(set.intersection(*(trace.numbers() for trace in read))))
    if not numbers:
        raise InputError(f"{source}: no {_MARK} with kernels is in the traces of all ranks; profile the same on each")
    origin = min(item.first for item in read)
    ranks = tuple(element.spans(numbers, origin) for element in read)
    device = next((entry.device for entry in read if entry.device), "")
    shapes = any(label.product is not None for rank in ranks for label in rank.labels)
    return Traces(source, ranks, read[0].world, device, shapes)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(item for item in path.iterdir() if item.name.endswith(ENDINGS))
    if not files:
        raise InputError(f"{path}: has no trace; their names end in {' or '.join(ENDINGS)}")
    return files


def _content(file: Path) -> Any:
    """What the file holds; control characters, which the profiler leaves in names, are taken."""
    try:
        packed = file.read_bytes()
        return json.loads(gzip.decompress(packed) if file.suffix == ".gz" else packed, strict=False)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{file}: is not valid gzip, or truncated: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: is not valid JSON, or truncated: {error}") from error


@dataclass(frozen=True, slots=True)
class _Trace:
    """One file. marks: begin and end of each step on the host, by its number; events: the GPU's; times: microseconds.

    base: nanoseconds that all times are counted from; launched: when the host launched what has a correlation; dims:
    sizes of operators, by their number; groups: ranks of each process group.
    """

    file: Path
    rank: int
    world: int
    device: str
    base: int
    marks: Mapping[int, tuple[float, float]]
    events: Sequence[Event]
    launched: Mapping[int | str | None, float]
    dims: Mapping[int | str | None, Any]
    groups: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, file: Path, content: Any) -> "_Trace":
        events = _events(file, content)
        info = content.get("distributedInfo")
        info = info if isinstance(info, dict) else {}
        found = cls(
            file=file,
            rank=_count(file, info, "rank", 0),
            world=_count(file, info, "world_size", 1),
            device=_device(content),
            base=_count(file, content, "baseTimeNanoseconds", 0),
            marks=_marks(file, events),
            events=[event for event in events if _category(event) in _ON_GPU],
            launched={
                number: _time(file, item, "ts")
                for item in events
                if _category(item) in _LAUNCHES and (number := _number(item, "correlation")) is not None
            },
            dims=dict(_dims(events)),
            groups=dict(_groups(info)),
        )
        found.require()
        return found

    def require(self) -> None:
        """Raise InputError where nothing can be made of the trace."""
        if not self.marks:
            raise InputError(
                f"{self.file}: marks no steps ({_MARK}N); call profiler.step() after each, as its schedule needs"
            )
        if not self.events:
            raise InputError(f"{self.file}: nothing ran on a GPU in it; profile with ProfilerActivity.CUDA")
        if self.rank >= self.world:
            raise InputError(f"{self.file}: rank: {self.rank} is not below world_size, which is {self.world}")

    @property
    def first(self) -> int:
        """When the trace's first step began: nanoseconds since 1970, or by whatever clock the machines share."""
        return self.base + round(1000 * min(begin for begin, _ in self.marks.values()))

    def numbers(self) -> set[int]:
        """Steps in which something was launched; a schedule's last mark has none."""
        known = sorted(self.marks)
        step = self._steps(known)
        return {known[place] for place in np.unique(step[step >= 0]).tolist()}

    def spans(self, numbers: Sequence[int], origin: int) -> RankSpans:
        """The spans, by start. numbers: of the steps that count; origin: nanoseconds from which times are counted."""
        offset = (origin - self.base) / 1000
        start = (self._times("ts") - offset) * 1e-6
        stream = np.array([_stream(event) for event in self.events], dtype=np.int64)
        label, labels = self._labels()
        order = np.argsort(start, kind="stable")
        return RankSpans(
            rank=self.rank,
            start=start[order],
            end=(start + self._times("dur") * 1e-6)[order],
            stream=stream[order],
            label=label[order],
            step=self._steps(numbers)[order],
            labels=labels,
            numbers=tuple(numbers),
        )

    def _steps(self, numbers: Sequence[int]) -> IntArray:
        """In which of some steps each span was launched, as a place among them, or -1."""
        launched = (self.launched.get(_number(event, "correlation")) for event in self.events)
        own = self._times("ts").tolist()
        when = np.array([start if host is None else host for host, start in zip(launched, own, strict=True)])
        bounds = np.array([self.marks[number] for number in numbers])
        step = np.searchsorted(bounds[:, 0], when, side="right") - 1
        return np.where((step >= 0) & (when < bounds[step, 1]), step, -1)

    def _times(self, key: str) -> FloatArray:
        return np.array([_time(self.file, event, key) for event in self.events])

    def _labels(self) -> tuple[IntArray, tuple[SpanLabel, ...]]:
        places: dict[SpanLabel, int] = {}
        found = [places.setdefault(label, len(places)) for label in map(self._label, self.events)]
        return np.array(found, dtype=np.int64), tuple(places)

    def _label(self, event: Event) -> SpanLabel:
        arguments = _arguments(event)
        dims = self.dims.get(_number(event, "External id"))
        return label_of(str(event.get("name", "")), _category(event), arguments, dims, self.groups)


def _events(file: Path, content: Any) -> list[Event]:
    keys = content.keys() if isinstance(content, dict) else ()
    if "traceEvents" not in keys or not isinstance(content["traceEvents"], list):
        raise InputError(f"{file}: is no trace of PyTorch's profiler: traceEvents is missing")
    version = content.get("schemaVersion")
    if version != _VERSION:
        raise InputError(
            f"{file}: schemaVersion: {format_value(version)} is not {_VERSION}, which PyTorch's profiler writes and this "
            "program reads; another tool wrote the trace, or another version of it"
        )
    return [item for item in content["traceEvents"] if isinstance(item, dict)]


def _marks(file: Path, events: Iterable[Event]) -> dict[int, tuple[float, float]]:
    """Steps on the host: of those that the GPU has, too, and of threads that repeat them, the first."""
    found: dict[int, tuple[float, float]] = {}
    for event in events:
        number = str(event.get("name", "")).removeprefix(_MARK)
        if len(number) < len(str(event.get("name", ""))) and number.isdecimal() and event.get("ph") == "X":
            if _category(event).startswith("gpu"):
                continue
            begin = _time(file, event, "ts")
            found.setdefault(int(number), (begin, begin + _time(file, event, "dur")))
    return found


def _dims(events: Iterable[Event]) -> Iterator[tuple[int | str, Any]]:
    for event in events:
        arguments, number = _arguments(event), _number(event, "External id")
        if "Input Dims" in arguments and number is not None:
            yield number, arguments["Input Dims"]


def _groups(info: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    configured = info.get("pg_config")
    for item in configured if isinstance(configured, list) else ():
        ranks = item.get("ranks") if isinstance(item, dict) else None
        if isinstance(ranks, list) and ranks:
            yield str(item.get("pg_name", "")), tuple(ranks)


def _device(content: Mapping[str, Any]) -> str:
    devices = content.get("deviceProperties")
    first = devices[0] if isinstance(devices, list) and devices else {}
    return str(first.get("name", "")) if isinstance(first, dict) else ""


def _arguments(event: Event) -> Mapping[str, Any]:
    found = event.get("args")
    return found if isinstance(found, dict) else {}


def _number(event: Event, key: str) -> int | str | None:
    """By which events are told to belong together; None where there is none."""
    found = _arguments(event).get(key)
    return found if isinstance(found, int | str) else None


def _category(event: Event) -> str:
    return str(event.get("cat", "")).lower()


def _stream(event: Event) -> int:
    found = _arguments(event).get("stream", event.get("tid", 0))
    return found if isinstance(found, int) else 0


def _count(file: Path, holder: Mapping[str, Any], key: str, default: int) -> int:
    value = holder.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InputError(f"{file}: {key}: {format_value(value)} is not a whole number")
    return value


def _time(file: Path, event: Event, key: str) -> float:
    """Microseconds."""
    value = event.get(key)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise InputError(
            f"{file}: {key} of {format_value(event.get('name'))}: {format_value(value)} is no number of microseconds"
        )
    if key == "dur" and value < 0:
        raise InputError(f"{file}: dur of {format_value(event.get('name'))}: {format_value(value)} is below zero")
    return float(value)
