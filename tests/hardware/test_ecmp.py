"""The hash that spreads pairs over parallel links."""

import numpy as np

from clustersim.hardware.ecmp import Hashed, Spread


def test_spread_is_one_way_and_hashed_is_all_of_them():
    assert (Spread().ways(32), Hashed(0).ways(32)) == (1, 32)


def test_a_pair_hashes_alike_whatever_else_is_asked_and_its_reverse_does_not():
    ends = np.arange(100)
    together = Hashed(3).choose(ends, ends + 1)
    assert together[7] == Hashed(3).choose(np.array([7]), np.array([8]))[0]
    assert (together != Hashed(3).choose(ends + 1, ends)).all()
