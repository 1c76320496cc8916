"""Tables of who slows whom: what is filled in for what was not measured, and which collectives make a difference."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.cost.interference import KERNEL_CLASSES, Interference, InterferenceTable, KernelClass, kernel_class_of
from clustersim.model.kernels import KernelKind
from clustersim.program.task import CollectiveType

PAIRS = list(product(CollectiveType, KERNEL_CLASSES))
REDUCED, GATHERED, SENT = CollectiveType.ALL_REDUCE, CollectiveType.ALL_GATHER, CollectiveType.SEND_RECV
COMPUTE, ATTENTION, MEMORY = KernelClass.COMPUTE, KernelClass.ATTENTION, KernelClass.MEMORY
PARTS = st.dictionaries(st.sampled_from(PAIRS), st.sampled_from([0.0, 0.1, 0.3, 2.0]))


def test_every_kind_of_kernel_has_a_class() -> None:
    """Products keep matrix units busy, attention these and others, everything else the memory."""
    found = {
        kernel_class: [kind for kind in KernelKind if kernel_class_of(kind) is kernel_class]
        for kernel_class in KernelClass
    }
    assert found[COMPUTE] == [
        KernelKind.MATMUL,
        KernelKind.GROUPED_MATMUL,
        KernelKind.STREAMED_MATMULS,
    ]
    assert found[ATTENTION] == [KernelKind.ATTENTION_FORWARD, KernelKind.ATTENTION_BACKWARD]
    assert len(found[MEMORY]) == len(KernelKind) - 5


@given(st.sampled_from([0.0, 0.06, 0.19, 0.3]))
def test_one_number_is_that_of_every_pair_and_slows_no_collective(part: float) -> None:
    table = Interference.uniform(part)
    assert [table.kernels[pair] for pair in PAIRS] == [part] * len(PAIRS)
    assert set(table.collectives.values()) == {0.0}


@given(PARTS, PARTS)
def test_what_was_measured_stands_as_it_is(
    kernels: dict[tuple[CollectiveType, KernelClass], float], calls: dict
) -> None:  # type: ignore[type-arg]
    table = Interference.from_measurements(kernels, calls)
    assert {pair: table.kernels[pair] for pair in kernels} == kernels
    assert {pair: table.collectives[pair] for pair in calls} == calls
    assert list(table.kernels) == list(table.collectives) == PAIRS
    for filled, known in ((table.kernels, kernels), (table.collectives, calls)):
        values = list(known.values()) or [0.0]
        assert min(values) <= min(filled.values()) <= max(filled.values()) <= max(values), "means, and no guesses"


def test_what_stands_for_what_was_not_measured() -> None:
    """All-reduce: 0.1, 0.3 and so (0.1 + 0.3)/2 of memory-bound kernels; send/recv: 0.5 of one class, so of all.

    Shifts are sends and receives; an all-gather, which is neither, is the mean of all-reduce and send/recv.
    """
    table = Interference.from_measurements(
        {(REDUCED, COMPUTE): 0.1, (REDUCED, ATTENTION): 0.3, (SENT, COMPUTE): 0.5}, {}
    ).kernels
    assert [table[REDUCED, kernel_class] for kernel_class in KERNEL_CLASSES] == pytest.approx([0.1, 0.3, 0.2])
    assert (
        [table[SENT, item] for item in KERNEL_CLASSES]
        == [table[CollectiveType.SHIFT, element] for element in KERNEL_CLASSES]
        == [0.5] * 3
    )
    assert [table[GATHERED, entry] for entry in KERNEL_CLASSES] == pytest.approx([0.3, 0.4, 0.35])


def test_collectives_that_slow_all_kernels_alike_are_one_pace() -> None:
    one, two = Interference.uniform(0.19), Interference.uniform(0.5)
    assert InterferenceTable([one, two], CollectiveType, may_coincide=True).levels == [((0.19,) * 3, (0.5,) * 3)]
    assert InterferenceTable([], (), may_coincide=True).levels == []


def test_collectives_that_slow_any_class_on_any_machine_in_their_own_way_are_paces_of_their_own() -> None:
    parts = dict(Interference.uniform(0.2).kernels) | {(GATHERED, MEMORY): 0.7}
    paces = InterferenceTable(
        [Interference.uniform(0.2), Interference.from_measurements(parts, {})], CollectiveType, may_coincide=False
    )
    assert paces.levels == [((0.2, 0.2, 0.2),) * 2, ((0.2, 0.2, 0.2), (0.2, 0.2, 0.7))]
    assert {kind: paces.level_of(kind) for kind in CollectiveType} == {
        kind: 2 if kind is GATHERED else 1 for kind in CollectiveType
    }


def test_two_collectives_at_once_slow_each_class_by_the_larger_part() -> None:
    parts = {(GATHERED, COMPUTE): 0.1, (GATHERED, MEMORY): 0.7, (SENT, COMPUTE): 0.3, (SENT, MEMORY): 0.2}
    paces = InterferenceTable([Interference.from_measurements(parts, {})], (GATHERED, SENT), may_coincide=True)
    first, second = paces.level_of(GATHERED), paces.level_of(SENT)
    both = paces.combined_level(first, second)
    (row,) = paces.levels[both - 1]
    assert row == tuple(map(max, *(paces.levels[item - 1][0] for item in (first, second))))
    assert paces.combined_level(second, first) == both
    assert (paces.combined_level(first, 0), paces.combined_level(0, second), paces.combined_level(0, 0)) == (
        first,
        second,
        0,
    )
    assert paces.combined_level(first, first) == first
