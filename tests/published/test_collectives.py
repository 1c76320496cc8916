"""The packaged table of collectives satisfies nccl-tests' own arithmetic, which transcription errors would break."""

import itertools
from collections.abc import Iterator

import pytest

from clustersim.validation.cases import CannotPredictError, ValidationCase
from clustersim.validation.collectives import parse_benchmark, read_collectives

BENCHMARK_COLUMNS = ("source", "gpu", "n_gpus", "gpus_per_node", "nodes", "interconnect", "collective")
RUN_COLUMNS = ("case_id", "locator", "library", "algo", "gpus_per_process", "timed", "in_place", "notes")
ROUNDING = 0.012  # relative, of bandwidths: tables print two decimals, times four digits
KEEPS_LOCAL_SHARD = ("all_gather", "reduce_scatter", "all_to_all")  # a GPU's own shard is not sent
LAST_DIGIT = 0.011  # GB/s


def bus_factor(collective: str, gpus: int) -> float | None:
    """Bus bandwidth over algorithm bandwidth: doc/PERFORMANCE.md of nccl-tests.

    None for collectives it does not measure.
    """
    ring_factor = (gpus - 1) / gpus
    return {
        "all_reduce": 2.0 * ring_factor,
        **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all"), ring_factor),
        **dict.fromkeys(("broadcast", "reduce", "send_recv"), 1.0),
    }.get(collective)


@pytest.fixture(scope="module")
def cases() -> list[ValidationCase]:
    return read_collectives()


@pytest.fixture(scope="module")
def table_cases(cases: list[ValidationCase]) -> list[ValidationCase]:
    """Cases of complete tables: with a time, and a bus factor."""
    return [
        case
        for case in cases
        if case.text("exact") == "yes" and case.text("time_us") and case.text("n_gpus")
        if bus_factor(case.text("collective"), case.positive_int("n_gpus")) is not None
    ]


def is_within_rounding(stated: float, derived: float) -> bool:
    return abs(stated - derived) <= max(LAST_DIGIT, ROUNDING * derived)


def algorithm_bandwidth(case: ValidationCase) -> float:
    """Algorithm bandwidth in GB/s: bytes over time."""
    return case.positive_float("bytes") / case.positive_float("time_us") / 1e3


def case_location(case: ValidationCase) -> str:
    return f"line {case.line_number}: {case.text('case_id')}, {case.text('bytes')} bytes"


def test_algorithm_bandwidth_is_bytes_over_time(table_cases: list[ValidationCase]) -> None:
    stated = [case for case in table_cases if case.text("algbw_GBps")]
    assert len(stated) > 1000
    wrong = [
        case_location(case)
        for case in stated
        if not is_within_rounding(float(case.text("algbw_GBps")), algorithm_bandwidth(case))
    ]
    assert not wrong


def test_bus_bandwidth_is_algorithm_bandwidth_times_the_bus_factor(table_cases: list[ValidationCase]) -> None:
    """Which also finds a wrong number of ranks."""
    stated = [entry for entry in table_cases if entry.text("busbw_GBps")]
    assert len(stated) > 1200

    def bus_bandwidth(case: ValidationCase) -> float:
        factor = bus_factor(case.text("collective"), case.positive_int("n_gpus"))
        assert factor is not None
        return algorithm_bandwidth(case) * factor

    wrong = [
        case_location(entry)
        for entry in stated
        if not is_within_rounding(float(entry.text("busbw_GBps")), bus_bandwidth(entry))
    ]
    assert not wrong


def test_node_count_matches_gpu_count(cases: list[ValidationCase]) -> None:
    located = [case for case in cases if case.text("nodes") and case.text("n_gpus") and case.text("gpus_per_node")]
    wrong = [
        case_location(case)
        for case in located
        if case.positive_int("nodes") != -(-case.positive_int("n_gpus") // case.positive_int("gpus_per_node"))
    ]
    assert not wrong


def tables_of_runs(cases: list[ValidationCase]) -> Iterator[tuple[ValidationCase, list[ValidationCase]]]:
    """Cases that were printed in one table (one benchmark run), each table with its first case."""
    run_keys = dict.fromkeys(tuple(case.text(column) for column in RUN_COLUMNS) for case in cases)
    for run_key in run_keys:
        table = [case for case in cases if tuple(case.text(column) for column in RUN_COLUMNS) == run_key]
        yield table[0], table


def test_message_sizes_ascend_within_a_table(cases: list[ValidationCase]) -> None:
    for first, table in tables_of_runs([case for case in cases if case.text("exact") == "yes" and case.text("bytes")]):
        sizes = [case.positive_float("bytes") for case in table]
        assert all(a < b for a, b in itertools.pairwise(sizes)), case_location(first)


def test_a_case_id_has_one_benchmark_configuration(table_cases: list[ValidationCase]) -> None:
    seen: dict[str, tuple[str, ...]] = {}
    for case in table_cases:
        benchmark = tuple(case.text(column) for column in BENCHMARK_COLUMNS)
        assert seen.setdefault(case.text("case_id"), benchmark) == benchmark, case_location(case)


@pytest.mark.slow
def test_no_port_exceeds_its_bandwidth(table_cases: list[ValidationCase]) -> None:
    """Every GPU's port carries the whole message at least once, minus the local shard where nothing is reduced."""
    checked = 0
    for case in table_cases:
        try:
            benchmark = parse_benchmark(case)
        except CannotPredictError:
            continue
        transferred_share = 1.0 - 1.0 / benchmark.gpu_count if case.text("collective") in KEEPS_LOCAL_SHARD else 1.0
        checked += 1
        assert algorithm_bandwidth(case) * 1e9 * transferred_share <= benchmark.scale_up_bandwidth, case_location(case)
    assert checked > 1200
