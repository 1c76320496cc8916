"""What did the caching allocator hold at its peak, by a memory snapshot of PyTorch?

`torch.cuda.memory._dump_snapshot` writes a pickle of lists, dicts, text and numbers. It is read without running
anything: a pickle that names any class or function is refused before that is looked up. JSON of the same content is
read, too, and both compressed with gzip.

The snapshot has the blocks at its end, and the history of allocations before (`record_memory_history`): going back
through it gives the peak, of allocated bytes (until a tensor is freed) and of reserved ones (segments of the device).
Reference: pytorch/pytorch, torch/cuda/memory.py (_snapshot), c10/cuda/CUDACachingAllocator.cpp
"""

import io
import json
import pickle
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from clustersim.common.errors import InputError
from clustersim.common.input_files import MAX_TRACE_BYTES, expand_gzip, read_bytes
from clustersim.common.units import Bytes

_GZIP: Final = b"\x1f\x8b"
_FREED: Final = "free_requested"
_LIVE_STATES: Final = ("active_allocated",)
_LIBRARY: Final = re.compile(
    r"(site|dist)-packages/(torch|einops)/|/torch/(nn|_|utils|autograd|distributed)|/transformers/utils/"
)
_AUTOGRAD_NODE: Final = re.compile(r"autograd::(?:\w+::)*(\w+)::apply\(")
_OPERATOR: Final = re.compile(r"at::_ops::(\w+)::")
_ROUND_COUNT: Final = 10_000  # of events, as people choose `max_entries`
_UNKNOWN_ORIGIN: Final = "before the history began"


@dataclass(frozen=True, slots=True)
class SnapshotPeak:
    """Memory of one device at the peak of allocated bytes.

    reserved: the most that was reserved; origins: bytes at the peak by the code that allocated them, most first;
    event_count: of the history; without any, the snapshot's end is taken for the peak; begins_at_peak: nothing is
    allocated in it before the peak.
    """

    allocated: Bytes
    reserved: Bytes
    origins: tuple[tuple[str, Bytes], ...]
    event_count: int
    begins_at_peak: bool

    @property
    def doubt(self) -> str | None:
        """Why the real peak may be higher: the history keeps the last `max_entries` events, and may begin too late."""
        if not self.event_count:
            return "the snapshot has no history, so that its end is taken for the peak"
        if self.begins_at_peak:
            return "the history begins at its peak: a higher one may lie before"
        if self.event_count % _ROUND_COUNT == 0:
            return f"the history has just {self.event_count:,} events, as if cut off: a higher peak may lie before"
        return None


class _PlainUnpickler(pickle.Unpickler):
    """Reads containers, text and numbers; anything else is refused."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse a class or function, which a pickle could run."""
        raise pickle.UnpicklingError(f"it names {module}.{name}; a snapshot has only lists, dicts, text and numbers")

    def persistent_load(self, pid: Any) -> NoReturn:
        """Refuse a reference to an object elsewhere."""
        raise pickle.UnpicklingError(f"it refers to an object elsewhere ({pid!r})")


def read_snapshot(path: Path) -> SnapshotPeak:
    """The peak of a snapshot; raises InputError that names the file and the problem."""
    try:
        content = _load(_read_expanded(path))
    except EOFError as error:
        raise InputError(f"{path}: is truncated: {error}") from error
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, MemoryError, RecursionError,
            OverflowError, pickle.UnpicklingError) as error:  # fmt: skip
        raise InputError(f"{path}: is no memory snapshot of PyTorch: {error}") from error
    segments = content.get("segments") if isinstance(content, dict) else None
    if not isinstance(segments, list) or not segments:
        raise InputError(f"{path}: is no memory snapshot of PyTorch: segments is missing, or empty")
    try:
        return _peak(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: is no memory snapshot of PyTorch: {error!r}") from error


def _read_expanded(path: Path) -> bytes:
    data = read_bytes(path, MAX_TRACE_BYTES)
    return expand_gzip(data, str(path)) if data.startswith(_GZIP) else data


def _load(data: bytes) -> Any:
    if data.lstrip()[:1] == b"{":
        return json.loads(data)
    return _PlainUnpickler(io.BytesIO(data)).load()


def _peak(content: Mapping[str, Any]) -> SnapshotPeak:
    device = _busiest_device(content["segments"])
    segments = [segment for segment in content["segments"] if segment.get("device", 0) == device]
    blocks = {
        int(block["address"]): block
        for segment in segments
        for block in _with_addresses(segment)
        if block["state"] in _LIVE_STATES
    }
    live = {address: (float(block["size"]), block.get("frames", ())) for address, block in blocks.items()}
    traces = content.get("device_traces") or []
    history = traces[device] if device < len(traces) else []
    allocated, reserved = (
        sum(size for size, _ in live.values()),
        float(sum(segment["total_size"] for segment in segments)),
    )
    peak, peak_reserved, at = allocated, reserved, len(history)
    for index in range(len(history) - 1, -1, -1):
        event = history[index]
        size = float(event["size"])
        match event["action"]:
            case "alloc":
                allocated -= size
            case "free_requested":
                allocated += size
            case "segment_alloc" | "segment_map":
                reserved -= size
            case "segment_free" | "segment_unmap":
                reserved += size
            case _:
                continue
        if allocated > peak:
            peak, at = allocated, index
        peak_reserved = max(peak_reserved, reserved)
    begins_at_peak = all(event["action"] != "alloc" for event in history[:at])
    return SnapshotPeak(peak, peak_reserved, _origins(live, history, at), len(history), begins_at_peak)


def _busiest_device(segments: Sequence[Mapping[str, Any]]) -> int:
    totals: Counter[int] = Counter()
    for segment in segments:
        totals[int(segment.get("device", 0))] += int(segment["total_size"])
    return totals.most_common(1)[0][0]


def _with_addresses(segment: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Blocks of a segment with their addresses, which older versions do not write."""
    address = int(segment["address"])
    for block in segment["blocks"]:
        yield {"address": address, **block}
        address += int(block["size"])


def _origins(
    live: Mapping[int, tuple[float, Any]], history: Sequence[Mapping[str, Any]], at: int
) -> tuple[tuple[str, Bytes], ...]:
    """Bytes by origin of what is allocated before the event at this index of the history."""
    held = dict(live)
    for event in reversed(history[at:]):
        if event["action"] == "alloc":
            held.pop(int(event["addr"]), None)
        elif event["action"] == _FREED:
            held[int(event["addr"])] = float(event["size"]), event.get("frames", ())
    frames_of = {int(event["addr"]): event.get("frames", ()) for event in history[:at] if event["action"] == "alloc"}
    sizes: Counter[str] = Counter()
    for address, (size, frames) in held.items():
        sizes[_origin(frames_of.get(address, frames))] += int(size)
    return tuple((name, float(size)) for name, size in sizes.most_common())


def _origin(frames: Any) -> str:
    """The innermost function that is not a library's: its file, line and name.

    Threads of autograd have no frames of Python, but those of its nodes and operators, where C++ frames were recorded.
    """
    for frame in frames or ():
        file = str(frame.get("filename", ""))
        if file.endswith(".py") and not _LIBRARY.search(file):
            return f"{Path(file).name}:{frame.get('line', 0)} {frame.get('name', '')}".strip()
    names = [str(frame.get("name", "")) for frame in frames or ()]
    for pattern, label in ((_AUTOGRAD_NODE, "backward, "), (_OPERATOR, "aten::")):
        match = next((match for name in names if (match := pattern.search(name))), None)
        if match:
            return f"{label}{match[1]}"
    return names[0] or "library" if names else _UNKNOWN_ORIGIN
