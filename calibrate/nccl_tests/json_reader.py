"""What does nccl-tests' JSON (`-J FILE`) say?

Schema versions 1 to 3 (NVIDIA/nccl-tests, src/util.cu, October 2025 to July 2026), of which 2 and 3 added statistics of
single iterations: the program and its options in `args`, the first GPU of each process in `config.devices`, a result
for each line of the table. A run that broke off is closed as JSON all the same, but without `out_of_bounds`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from calibrate.nccl_tests.run import Place, Run, Sample, version_of
from clustersim.common.errors import InputError, format_value

VERSIONS: Final = (1, 2, 3)


class _Loose(BaseModel):
    """Other keys are left alone: newer versions add some."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class _Device(_Loose):
    group: int = 0
    hostname: str
    device_info: str


class _Config(_Loose):
    nthreads: int = Field(ge=1)
    ngpus: int = Field(ge=1)
    iterations: int = Field(default=1, ge=1)
    devices: list[_Device]


class _Times(_Loose):
    time: float | None = None
    cpu_time: float | None = None
    nwrong: float | None


class _Result(_Loose):
    size: int = Field(ge=0)
    count: int = Field(ge=0)
    type: str = "float"
    out_of_place: _Times | None
    in_place: _Times | None


class _Bounds(_Loose):
    count: int


class _Report(_Loose):
    start_time: str = ""
    args: list[str] = []
    nccl_version: int = 0
    config: _Config
    results: list[_Result]
    out_of_bounds: _Bounds
    errors: list[str | None] = []


def read_json(path: Path, text: str) -> Run:
    """The run of a file; raise InputError that names the file and the key."""
    report = _report(path, _content(path, text))
    for error in filter(None, report.errors):
        raise InputError(f"{path}: errors: the run had an error: {format_value(error)}")
    return Run(
        file=path.name,
        where=str(path),
        test=Path(report.args[0]).name if report.args else "",
        places=tuple(_places(report.config)),
        version=version_of(report.nccl_version) if report.nccl_version else "",
        iterations=report.config.iterations,
        samples=tuple(_sample(f"{path}: results[{place}]", result) for place, result in enumerate(report.results)),
        wrong=report.out_of_bounds.count,
        date=report.start_time.partition(" ")[0],
    )


def _content(path: Path, text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: is not valid JSON, or truncated: {error}") from error
    version = content.get("version")
    if version not in VERSIONS or not {"config", "results"} <= content.keys():
        raise InputError(
            f"{path}: is not what nccl-tests -J writes in version 1 to 3: version is {format_value(version)}, "
            f"and the keys are {format_value(', '.join(content))}"
        )
    if "out_of_bounds" not in content:
        raise InputError(f"{path}: out_of_bounds: is missing, so the run broke off")
    return dict(content)


def _report(path: Path, content: dict[str, Any]) -> _Report:
    try:
        return _Report.model_validate(content)
    except ValidationError as error:
        found = error.errors()[0]
        key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in found["loc"]).removeprefix(".")
        raise InputError(f"{path}: {key}: {format_value(found['input'])} is refused: {found['msg'].lower()}") from error


def _places(config: _Config) -> Iterator[Place]:
    """Each GPU; a process names the first of its own."""
    for device in config.devices:
        yield from [Place(device.group, device.hostname, device.device_info)] * (config.nthreads * config.ngpus)


def _sample(where: str, result: _Result) -> Sample:
    both = (result.out_of_place, result.in_place)
    if any(times is not None and times.cpu_time is not None for times in both):
        raise InputError(f"{where}: cpu_time is what launching takes, not the collective; run without -C")
    seconds = [None if times is None or times.time is None else times.time * 1e-6 for times in both]
    wrong = [None if times is None else times.nwrong for times in both]
    return Sample(where, float(result.size), result.count, result.type, seconds[0], seconds[1], (wrong[0], wrong[1]))
