"""How is a calibration record read and written?

One JSON file whose keys are the fields of `cost.record`, with enums by their values; a row is a line. Units are SI:
seconds, bytes, FLOP. What is unknown, missing or of another version is refused with the key and the value; a file is
written beside its place and then renamed, so that an interruption leaves the old one.
"""

import json
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from clustersim.cost.record import VERSION, Record
from clustersim.errors import InputError, OutputError, shown
from clustersim.shipped import read_mapping

_LISTS: Final = ("kernels", "collectives", "copies", "beside", "collective_fits")


@cache
def _adapter() -> TypeAdapter[Record]:
    return TypeAdapter(Record)


def read_record(path: Path) -> Record:
    """Read a record; raise InputError that names the file, the key and the value."""
    content = read_mapping(path)
    version = content.get("version")
    if version != VERSION:
        raise InputError(
            f"{path}: version: {shown(version)} is not {VERSION}, which this clustersim reads; calibrate again"
        )
    try:
        record = _adapter().validate_python(content, strict=False)
    except ValidationError as error:
        raise InputError(f"{path}: {_first(error)}") from error
    _require_finite(path, record)
    return record


def write_record(record: Record, path: Path) -> None:
    """Write a record, whole or not at all; raise OutputError where that cannot be done."""
    beside = path.with_name(f".{path.name}.part")
    try:
        beside.write_text(record_text(record), encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise OutputError(f"{path}: cannot be written ({error.strerror})") from error


def record_text(record: Record) -> str:
    """The file's text."""
    content = _adapter().dump_python(record, mode="json")
    entries = [f"  {json.dumps(key)}: {_value(key, value)}" for key, value in content.items()]
    return "{\n" + ",\n".join(entries) + "\n}\n"


def _value(key: str, value: Any) -> str:
    if key not in _LISTS or not value:
        return json.dumps(value, allow_nan=False)
    rows = ",\n".join(f"    {json.dumps(row, allow_nan=False)}" for row in value)
    return f"[\n{rows}\n  ]"


def _first(error: ValidationError) -> str:
    found = error.errors()[0]
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in found["loc"]).removeprefix(".")
    if found["type"] == "missing":
        return f"{key}: is missing"
    return f"{key}: {shown(found['input'])} is refused: {found['msg'].lower()}"


def _require_finite(path: Path, record: Record) -> None:
    for key, seconds in _times(record):
        if not 0.0 < seconds < math.inf:
            raise InputError(f"{path}: {key}: {seconds!r} is not a number of seconds above zero")


def _times(record: Record) -> Iterator[tuple[str, float]]:
    for place, kernel in enumerate(record.kernels):
        if kernel.time is not None:
            yield f"kernels[{place}].time.seconds", kernel.time.seconds
    for place, collective in enumerate(record.collectives):
        yield f"collectives[{place}].time.seconds", collective.time.seconds
    for place, copy in enumerate(record.copies):
        yield f"copies[{place}].time.seconds", copy.time.seconds
