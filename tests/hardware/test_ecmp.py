"""The hash that spreads pairs over parallel links."""

import numpy as np

from clustersim.hardware.ecmp import HashedEcmp, SpreadEcmp


def test_spread_is_one_way_and_hashed_is_all_of_them():
    assert (SpreadEcmp().distinct_links(32), HashedEcmp(0).distinct_links(32)) == (1, 32)


def test_a_pair_hashes_alike_whatever_else_is_asked_and_its_reverse_does_not():
    ends = np.arange(100)
    together = HashedEcmp(3).choose_paths(ends, ends + 1)
    assert together[7] == HashedEcmp(3).choose_paths(np.array([7]), np.array([8]))[0]
    assert (together != HashedEcmp(3).choose_paths(ends + 1, ends)).all()
