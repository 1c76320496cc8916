"""How is a calibration record read and written?

One JSON file whose keys are the fields of `cost.calibration_record`, with enums by value; each sample is a
line. Units are SI: seconds, bytes, FLOP. Unknown or missing keys, other versions and impossible
measurements (times that are not above zero, the same measurement twice) are refused with the key and the
value; a file is written to a temporary path and then renamed, so that an interruption leaves the old one.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from clustersim.common.data_files import read_mapping
from clustersim.common.deserialize import deserialize
from clustersim.common.errors import InputError, OutputError, format_value
from clustersim.common.files import write_text_atomically
from clustersim.cost.calibration_record import FORMAT_VERSION, CalibrationRecord
from clustersim.cost.record_kinds import RecordOrigin
from clustersim.cost.record_validation import validate_record

_SAMPLE_LISTS: Final = (
    "kernels", "collectives", "copies", "interference", "imbalanced_gemms", "collective_fits", "telemetry", "in_situ",
    "host_launches", "gpus", "holdout_steps",
)  # fmt: skip


@cache
def _type_adapter() -> TypeAdapter[CalibrationRecord]:
    return TypeAdapter(CalibrationRecord)


def read_record(path: Path) -> CalibrationRecord:
    """Read a record; raise InputError that names the file, the key and the value."""
    content = read_mapping(path)
    version = content.get("version")
    if version is None or ("device" not in content and version == FORMAT_VERSION):
        raise InputError(f"{path}: is no calibration record: {'device' if version else 'version'} is missing")
    if version != FORMAT_VERSION:
        raise InputError(
            f"{path}: version: is {format_value(version)}, and this clustersim reads {FORMAT_VERSION}; measure again, "
            "into another file"
        )
    try:
        record: CalibrationRecord = deserialize(content, CalibrationRecord)
        validate_record(record)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    return record


def write_record(record: CalibrationRecord, path: Path) -> None:
    """Write a record atomically; raise OutputError on failure."""
    try:
        write_text_atomically(path, record_text(record))
    except ValueError as error:
        raise OutputError(f"{path}: cannot be written: it would hold a number that is not finite") from error


def require_same_origin(path: Path, origin: RecordOrigin) -> None:
    """Raise InputError where writing a record of this origin would overwrite a file of another origin."""
    if path.exists() and read_record(path).origin is not origin:
        raise InputError(f"{path}: is there already, and is no {origin.value} record; name another file")


def record_text(record: CalibrationRecord) -> str:
    """A record as JSON text."""
    content = _type_adapter().dump_python(record, mode="json")
    shown = {key: value for key, value in content.items() if key != "profile" or value is not None}
    entries = [f"  {json.dumps(key)}: {_format_value(key, value)}" for key, value in shown.items()]
    return "{\n" + ",\n".join(entries) + "\n}\n"


def _format_value(key: str, value: Any) -> str:
    if key not in _SAMPLE_LISTS or not value:
        return json.dumps(value, allow_nan=False)
    lines = ",\n".join(f"    {json.dumps(element, allow_nan=False)}" for element in value)
    return f"[\n{lines}\n  ]"
