"""What does one run of nccl-tests contain? The form that its text table and its JSON are read into.

Reference: NVIDIA/nccl-tests, src/util.cu and src/common.cu, versions 2.0 (2017) to 2.19 (2026).
"""

from dataclasses import dataclass

from clustersim.common.units import Bytes, Seconds


@dataclass(frozen=True, slots=True)
class TestedGpu:
    """One participating GPU. group: of NCCL_TESTS_SPLIT, 0 without."""

    group: int
    host: str
    device: str


@dataclass(frozen=True, slots=True)
class NcclTestsSample:
    """One line of the table.

    location: file and line, for messages; size: bytes; count: elements; type: NCCL's name of the element type;
    out_of_place, in_place: seconds; wrong_counts: wrong values (out of place, in place); None where the test has
    none ("N/A").
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

    file: its name; location: for messages; test: the program's name, empty where the log does not state it;
    version: NCCL's, empty likewise; iterations: that each time is the mean of; out_of_bounds_count: wrong values
    in total; warnings: NCCL's warnings, which did not end the run.
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
    """NCCL's version from its code (nccl.h: major * 10000 + minor * 100 + patch, * 1000 before 2.9).

    >>> format_nccl_version(22705), format_nccl_version(2804)
    ('2.27.5', '2.8.4')
    """
    major_unit = 10_000 if code >= 10_000 else 1_000
    return f"{code // major_unit}.{code % major_unit // 100}.{code % 100}"
