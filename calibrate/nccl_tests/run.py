"""What does one run of nccl-tests say? The form that its text table and its JSON are read into.

Reference: NVIDIA/nccl-tests, src/util.cu and src/common.cu, versions 2.0 (2017) to 2.19 (2026).
"""

from dataclasses import dataclass

from clustersim.common.units import Bytes, Seconds


@dataclass(frozen=True, slots=True)
class TestedGpu:
    """One GPU that took part. group: NCCL_TESTS_SPLIT's, 0 without."""

    group: int
    host: str
    device: str


@dataclass(frozen=True, slots=True)
class NcclTestsSample:
    """One line of the table.

    where: for messages; type: of its numbers, as NCCL calls it; seconds, wrong: None where the test has none ("N/A").
    """

    location: str
    size: Bytes
    count: int
    type: str
    out_of_place: Seconds | None
    in_place: Seconds | None
    wrong_counts: tuple[float | None, float | None]


@dataclass(frozen=True, slots=True)
class NcclTestsRun:
    """One run.

    file: its name; where: for messages; test: the program's name, empty where the log does not say; version: NCCL's,
    empty likewise; iterations: that each time is the mean of; wrong: values that it found out of bounds in all;
    warnings: NCCL's own, which did not end it.
    """

    file: str
    location: str
    test: str
    gpus: tuple[TestedGpu, ...]
    version: str
    iterations: int
    samples: tuple[NcclTestsSample, ...]
    out_of_bounds_count: int
    date: str = ""
    warnings: tuple[str, ...] = ()


def format_nccl_version(code: int) -> str:
    """NCCL's version from its number (nccl.h: major * 10000 + minor * 100 + patch, * 1000 before 2.9).

    >>> version_of(22705), version_of(2804)
    ('2.27.5', '2.8.4')
    """
    major_unit = 10_000 if code >= 10_000 else 1_000
    return f"{code // major_unit}.{code % major_unit // 100}.{code % 100}"
