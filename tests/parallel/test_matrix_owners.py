"""Who orthogonalizes which matrices: every matrix once, and the busiest rank has at least the mean."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from clustersim.model.newton_schulz import newton_schulz_flops
from clustersim.model.optimizers import Muon
from clustersim.model.weight_matrices import WeightMatrix
from clustersim.parallel.matrix_owners import SharedMatrix, busiest_owner, busiest_slice, count_matrices

SIDES = st.sampled_from([256, 1024, 4096])
MATRICES = st.lists(
    st.builds(SharedMatrix, st.builds(WeightMatrix, SIDES, SIDES, count=st.integers(1, 5))), min_size=1, max_size=8
)
RANKS = st.integers(1, 40)


def cost(counts: Counter[SharedMatrix]) -> float:
    """FLOP of one step on some matrices."""
    return sum(count * newton_schulz_flops(shared.matrix, 1) for shared, count in counts.items())


@given(MATRICES, RANKS)
def test_the_busiest_owner_has_between_the_mean_and_twice_it(matrices: list[SharedMatrix], ranks: int) -> None:
    """List scheduling: at most the mean and one more matrix; at least the largest one."""
    counts = count_matrices(matrices)
    owned = busiest_owner(counts, Muon(), ranks)
    largest = max(newton_schulz_flops(shared.matrix, 1) for shared in counts)
    assert max(largest, cost(counts) / ranks) <= cost(owned) * (1 + 1e-9)
    assert cost(owned) <= cost(counts) / ranks + largest
    assert all(count <= counts[shared] for shared, count in owned.items())


@given(MATRICES, RANKS)
def test_a_slice_of_a_flat_buffer_touches_whole_matrices(matrices: list[SharedMatrix], ranks: int) -> None:
    """What a rank lacks is less than two of the largest matrices; a single rank has everything."""
    touched, missing = busiest_slice(matrices, Muon(), ranks)
    elements = {shared: shared.matrix.elements for shared in touched}
    total = sum(shared.matrix.elements * shared.matrix.count for shared in matrices)
    assert sum(count * elements[shared] for shared, count in touched.items()) - missing == total / ranks or missing >= 0
    assert 0 <= missing < 2 * max(elements.values())
    if ranks == 1:
        assert (touched, missing) == (count_matrices(matrices), 0)


def test_equal_layers_on_as_many_ranks_are_one_each() -> None:
    matrices = [SharedMatrix(WeightMatrix(4096, 4096)), SharedMatrix(WeightMatrix(14336, 4096, 2))] * 8
    owned = busiest_owner(count_matrices(matrices), Muon(), 8)
    assert owned == count_matrices(matrices[:2])
    assert busiest_slice(matrices, Muon(), 8) == (owned, 0)
