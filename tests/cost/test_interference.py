"""Interference tables: how unmeasured pairs are filled in, and which collectives make a difference."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.cost.interference import KERNEL_CLASSES, Interference, InterferenceTable, KernelClass, kernel_class_of
from clustersim.model.kernels import KernelKind
from clustersim.program.task import CollectiveType

PAIRS = list(product(CollectiveType, KERNEL_CLASSES))
ALL_REDUCE, ALL_GATHER, SEND_RECV = CollectiveType.ALL_REDUCE, CollectiveType.ALL_GATHER, CollectiveType.SEND_RECV
COMPUTE, ATTENTION, MEMORY = KernelClass.COMPUTE, KernelClass.ATTENTION, KernelClass.MEMORY
SLOWDOWNS = st.dictionaries(st.sampled_from(PAIRS), st.sampled_from([0.0, 0.1, 0.3, 2.0]))


def test_every_kind_of_kernel_has_a_class() -> None:
    """Matmuls use the matrix units, attention both these and the vector units, all other kernels the memory."""
    kinds_by_class = {
        kernel_class: [kind for kind in KernelKind if kernel_class_of(kind) is kernel_class]
        for kernel_class in KernelClass
    }
    assert kinds_by_class[COMPUTE] == [
        KernelKind.MATMUL,
        KernelKind.GROUPED_MATMUL,
        KernelKind.STREAMED_MATMULS,
    ]
    assert kinds_by_class[ATTENTION] == [KernelKind.ATTENTION_FORWARD, KernelKind.ATTENTION_BACKWARD]
    assert len(kinds_by_class[MEMORY]) == len(KernelKind) - 5


@given(st.sampled_from([0.0, 0.06, 0.19, 0.3]))
def test_a_scalar_applies_to_every_pair_and_slows_no_collective(slowdown: float) -> None:
    table = Interference.uniform(slowdown)
    assert [table.kernels[pair] for pair in PAIRS] == [slowdown] * len(PAIRS)
    assert set(table.collectives.values()) == {0.0}


@given(st.sampled_from([0.0, 0.23, 1.0]), st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0]))
def test_what_slower_links_leave_idle_is_slack(slowdown: float, nvlink_share: float) -> None:
    """Slower links move data for a second, ports for their share of it, longer while kernels run; the later ends."""
    interference = Interference.uniform(0.19, slowdown)
    for pair in PAIRS:
        seconds = 1.0 + interference.collective_slowdown(*pair, nvlink_share)
        assert seconds == pytest.approx(max(1.0, nvlink_share * (1.0 + slowdown)))


@given(SLOWDOWNS, SLOWDOWNS, st.sampled_from([0.0, 0.5, 1.0]))
def test_a_measured_slowdown_is_that_of_the_collective(
    kernels: dict[tuple[CollectiveType, KernelClass], float],
    collectives: dict[tuple[CollectiveType, KernelClass], float],
    nvlink_share: float,
) -> None:
    """Whatever limits it: the measurement says what remains of the slack."""
    interference = Interference.from_measurements(kernels, collectives)
    for pair, slowdown in collectives.items():
        assert interference.collective_slowdown(*pair, nvlink_share) == slowdown


@given(SLOWDOWNS, SLOWDOWNS)
def test_measured_pairs_are_kept_exactly(
    kernels: dict[tuple[CollectiveType, KernelClass], float], collectives: dict
) -> None:  # type: ignore[type-arg]
    table = Interference.from_measurements(kernels, collectives)
    assert {pair: table.kernels[pair] for pair in kernels} == kernels
    assert {pair: table.collectives[pair] for pair in collectives} == collectives
    assert list(table.kernels) == list(table.collectives) == PAIRS
    for filled, measured in ((table.kernels, kernels), (table.collectives, collectives)):
        values = list(measured.values()) or [0.0]
        assert min(values) <= min(filled.values()) <= max(filled.values()) <= max(values), "means, and no guesses"


def test_unmeasured_pairs_are_filled_with_means() -> None:
    """All-reduce: 0.1, 0.3 and so (0.1 + 0.3)/2 of memory-bound kernels; send/recv: 0.5 of one class, so of all.

    Shifts are sends and receives; an all-gather, which is neither, is the mean of all-reduce and send/recv.
    """
    table = Interference.from_measurements(
        {(ALL_REDUCE, COMPUTE): 0.1, (ALL_REDUCE, ATTENTION): 0.3, (SEND_RECV, COMPUTE): 0.5}, {}
    ).kernels
    assert [table[ALL_REDUCE, kernel_class] for kernel_class in KERNEL_CLASSES] == pytest.approx([0.1, 0.3, 0.2])
    assert (
        [table[SEND_RECV, item] for item in KERNEL_CLASSES]
        == [table[CollectiveType.SHIFT, element] for element in KERNEL_CLASSES]
        == [0.5] * 3
    )
    assert [table[ALL_GATHER, entry] for entry in KERNEL_CLASSES] == pytest.approx([0.3, 0.4, 0.35])


def test_collectives_of_equal_slowdown_share_one_interference_level() -> None:
    first, second = Interference.uniform(0.19), Interference.uniform(0.5)
    assert InterferenceTable([first, second], CollectiveType, may_coincide=True).levels == [((0.19,) * 3, (0.5,) * 3)]
    assert InterferenceTable([], (), may_coincide=True).levels == []


def test_collectives_of_different_slowdown_have_different_levels() -> None:
    slowdowns = dict(Interference.uniform(0.2).kernels) | {(ALL_GATHER, MEMORY): 0.7}
    levels = InterferenceTable(
        [Interference.uniform(0.2), Interference.from_measurements(slowdowns, {})], CollectiveType, may_coincide=False
    )
    assert levels.levels == [((0.2, 0.2, 0.2),) * 2, ((0.2, 0.2, 0.2), (0.2, 0.2, 0.7))]
    assert {kind: levels.level_of(kind) for kind in CollectiveType} == {
        kind: 2 if kind is ALL_GATHER else 1 for kind in CollectiveType
    }


def test_two_concurrent_collectives_slow_by_the_larger_slowdown() -> None:
    slowdowns = {
        (ALL_GATHER, COMPUTE): 0.1,
        (ALL_GATHER, MEMORY): 0.7,
        (SEND_RECV, COMPUTE): 0.3,
        (SEND_RECV, MEMORY): 0.2,
    }
    levels = InterferenceTable(
        [Interference.from_measurements(slowdowns, {})], (ALL_GATHER, SEND_RECV), may_coincide=True
    )
    first, second = levels.level_of(ALL_GATHER), levels.level_of(SEND_RECV)
    combined = levels.combined_level(first, second)
    (level_row,) = levels.levels[combined - 1]
    assert level_row == tuple(map(max, *(levels.levels[item - 1][0] for item in (first, second))))
    assert levels.combined_level(second, first) == combined
    assert (levels.combined_level(first, 0), levels.combined_level(0, second), levels.combined_level(0, 0)) == (
        first,
        second,
        0,
    )
    assert levels.combined_level(first, first) == first
