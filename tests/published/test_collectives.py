"""The shipped table of collectives is what nccl-tests prints: a slip of transcription breaks its own arithmetic."""

import itertools
from collections.abc import Iterator

import pytest

from clustersim.validation.cases import CannotPredictError, ValidationCase
from clustersim.validation.collectives import parse_benchmark, read_collectives

PLACE = ("source", "gpu", "n_gpus", "gpus_per_node", "nodes", "interconnect", "collective")
RUN = ("case_id", "locator", "library", "algo", "gpus_per_process", "timed", "in_place", "notes")
ROUNDED = 0.012  # of bandwidths: tables print two decimals, times four digits
KEEPING = ("all_gather", "reduce_scatter", "all_to_all")  # a GPU's own part stays where it is
LAST_DIGITS = 0.011  # GB/s


def bus_factor(collective: str, gpus: int) -> float | None:
    """Bus bandwidth over algorithm bandwidth: doc/PERFORMANCE.md of nccl-tests; None for what it does not measure."""
    once = (gpus - 1) / gpus
    return {
        "all_reduce": 2.0 * once,
        **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all"), once),
        **dict.fromkeys(("broadcast", "reduce", "send_recv"), 1.0),
    }.get(collective)


@pytest.fixture(scope="module")
def rows() -> list[ValidationCase]:
    return read_collectives()


@pytest.fixture(scope="module")
def printed(rows: list[ValidationCase]) -> list[ValidationCase]:
    """Rows of tables of whole places: with a time, and a factor for the bus."""
    return [
        validation_case
        for validation_case in rows
        if validation_case.text("exact") == "yes" and validation_case.text("time_us") and validation_case.text("n_gpus")
        if bus_factor(validation_case.text("collective"), validation_case.positive_int("n_gpus")) is not None
    ]


def agree(stated: float, derived: float) -> bool:
    return abs(stated - derived) <= max(LAST_DIGITS, ROUNDED * derived)


def algorithm_rate(row: ValidationCase) -> float:
    """GB/s, of bytes over time."""
    return row.positive_float("bytes") / row.positive_float("time_us") / 1e3


def where(row: ValidationCase) -> str:
    return f"line {row.line_number}: {row.text('case_id')}, {row.text('bytes')} bytes"


def test_algorithm_bandwidth_is_bytes_over_time(printed: list[ValidationCase]) -> None:
    stated = [validation_case for validation_case in printed if validation_case.text("algbw_GBps")]
    assert len(stated) > 1000
    wrong = [where(item) for item in stated if not agree(float(item.text("algbw_GBps")), algorithm_rate(item))]
    assert not wrong


def test_bus_bandwidth_is_the_algorithm_s_times_the_factor_of_the_collective(printed: list[ValidationCase]) -> None:
    """Which also finds a wrong number of ranks."""
    stated = [validation_case for validation_case in printed if validation_case.text("busbw_GBps")]
    assert len(stated) > 1200

    def of_the_bus(row: ValidationCase) -> float:
        factor = bus_factor(row.text("collective"), row.positive_int("n_gpus"))
        assert factor is not None
        return algorithm_rate(row) * factor

    wrong = [where(item) for item in stated if not agree(float(item.text("busbw_GBps")), of_the_bus(item))]
    assert not wrong


def test_nodes_hold_the_gpus(rows: list[ValidationCase]) -> None:
    placed = [
        validation_case
        for validation_case in rows
        if validation_case.text("nodes") and validation_case.text("n_gpus") and validation_case.text("gpus_per_node")
    ]
    wrong = [
        where(item)
        for item in placed
        if item.positive_int("nodes") != -(-item.positive_int("n_gpus") // item.positive_int("gpus_per_node"))
    ]
    assert not wrong


def tables(rows: list[ValidationCase]) -> Iterator[tuple[ValidationCase, list[ValidationCase]]]:
    """Runs of rows that were printed together, one per benchmark, way and place in memory, each with its first."""
    ways = dict.fromkeys(tuple(validation_case.text(column) for column in RUN) for validation_case in rows)
    for way in ways:
        table = [item for item in rows if tuple(item.text(column) for column in RUN) == way]
        yield table[0], table


def test_sizes_ascend_within_a_table(rows: list[ValidationCase]) -> None:
    for first, table in tables(
        [
            validation_case
            for validation_case in rows
            if validation_case.text("exact") == "yes" and validation_case.text("bytes")
        ]
    ):
        sizes = [item.positive_float("bytes") for item in table]
        assert all(a < b for a, b in itertools.pairwise(sizes)), where(first)


def test_a_case_has_one_place(printed: list[ValidationCase]) -> None:
    seen: dict[str, tuple[str, ...]] = {}
    for validation_case in printed:
        place = tuple(validation_case.text(column) for column in PLACE)
        assert seen.setdefault(validation_case.text("case_id"), place) == place, where(validation_case)


@pytest.mark.slow
def test_no_port_carries_more_than_it_can(printed: list[ValidationCase]) -> None:
    """All of a message goes through a GPU's own port at least once, but for its own part where nothing is reduced."""
    checked = 0
    for validation_case in printed:
        try:
            place = parse_benchmark(validation_case)
        except CannotPredictError:
            continue
        own = 1.0 - 1.0 / place.gpu_count if validation_case.text("collective") in KEEPING else 1.0
        checked += 1
        assert algorithm_rate(validation_case) * 1e9 * own <= place.scale_up_bandwidth, where(validation_case)
    assert checked > 1200
