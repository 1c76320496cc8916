"""What does nccl-tests' JSON (`-J FILE`) contain?

Schema versions 1 to 3 (NVIDIA/nccl-tests, src/util.cu, October 2025 to July 2026), of which 2 and 3 added
per-iteration statistics: the program and its options in `args`, the first GPU of each process in
`config.devices`, a result for each line of the table. An aborted run is closed as valid JSON all the same,
but without `out_of_bounds`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from calibrate.nccl_tests.run import NcclTestsRun, NcclTestsSample, TestedGpu, format_nccl_version
from clustersim.common.errors import InputError, format_value
from clustersim.common.input_files import parse_json

SCHEMA_VERSIONS: Final = (1, 2, 3)


class _NcclJsonModel(BaseModel):
    """Ignores unknown keys: newer versions add some."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class _NcclJsonDevice(_NcclJsonModel):
    group: int = 0
    hostname: str
    device_info: str


class _NcclJsonConfig(_NcclJsonModel):
    nthreads: int = Field(ge=1)
    ngpus: int = Field(ge=1)
    iterations: int = Field(default=1, ge=1)
    devices: list[_NcclJsonDevice]


class _NcclJsonTimes(_NcclJsonModel):
    time: float | None = None
    cpu_time: float | None = None
    nwrong: float | None


class _NcclJsonResult(_NcclJsonModel):
    size: int = Field(ge=0)
    count: int = Field(ge=0)
    type: str = "float"
    out_of_place: _NcclJsonTimes | None
    in_place: _NcclJsonTimes | None


class _NcclJsonBounds(_NcclJsonModel):
    count: int


class _NcclJsonReport(_NcclJsonModel):
    start_time: str = ""
    args: list[str] = []
    nccl_version: int = 0
    config: _NcclJsonConfig
    results: list[_NcclJsonResult]
    out_of_bounds: _NcclJsonBounds
    errors: list[str | None] = []


def read_json(path: Path, text: str) -> NcclTestsRun:
    """The run in a file; raise InputError that names the file and the key."""
    report = _validate_report(path, _load_json(path, text))
    for error in filter(None, report.errors):
        raise InputError(f"{path}: errors: the run had an error: {format_value(error)}")
    return NcclTestsRun(
        file=path.name,
        location=str(path),
        test=Path(report.args[0]).name if report.args else "",
        gpus=tuple(_listed_gpus(report.config)),
        version=format_nccl_version(report.nccl_version) if report.nccl_version else "",
        iterations=report.config.iterations,
        samples=tuple(_to_sample(f"{path}: results[{index}]", result) for index, result in enumerate(report.results)),
        out_of_bounds_count=report.out_of_bounds.count,
        date=report.start_time.partition(" ")[0],
    )


def _load_json(path: Path, text: str) -> dict[str, Any]:
    try:
        content = parse_json(text)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    version = content.get("version")
    if version not in SCHEMA_VERSIONS or not {"config", "results"} <= content.keys():
        raise InputError(
            f"{path}: is not what nccl-tests -J writes in version 1 to 3: version is {format_value(version)}, "
            f"and the keys are {format_value(', '.join(content))}"
        )
    if "out_of_bounds" not in content:
        raise InputError(f"{path}: out_of_bounds: is missing, so the run broke off")
    return dict(content)


def _validate_report(path: Path, content: dict[str, Any]) -> _NcclJsonReport:
    try:
        return _NcclJsonReport.model_validate(content)
    except ValidationError as error:
        problem = error.errors()[0]
        key = "".join(
            f"[{key_element}]" if isinstance(key_element, int) else f".{key_element}" for key_element in problem["loc"]
        ).removeprefix(".")
        raise InputError(
            f"{path}: {key}: {format_value(problem['input'])} is refused: {problem['msg'].lower()}"
        ) from error


def _listed_gpus(config: _NcclJsonConfig) -> Iterator[TestedGpu]:
    """Each GPU; a process lists only its first one."""
    for device in config.devices:
        yield from [TestedGpu(device.group, device.hostname, device.device_info)] * (config.nthreads * config.ngpus)


def _to_sample(location: str, result: _NcclJsonResult) -> NcclTestsSample:
    both_times = (result.out_of_place, result.in_place)
    if any(times is not None and times.cpu_time is not None for times in both_times):
        raise InputError(f"{location}: cpu_time is what launching takes, not the collective; run without -C")
    seconds = [None if times is None or times.time is None else times.time * 1e-6 for times in both_times]
    wrong_counts = [None if times is None else times.nwrong for times in both_times]
    return NcclTestsSample(
        location,
        float(result.size),
        result.count,
        result.type,
        seconds[0],
        seconds[1],
        (wrong_counts[0], wrong_counts[1]),
    )
