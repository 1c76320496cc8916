"""The hash that spreads pairs over parallel links."""

import numpy as np

from clustersim.hardware.routing import Hashed, Spread, splitmix64


def test_splitmix64_gives_the_reference_sequence():
    """First outputs of the reference generator (Vigna's splitmix64.c) from the states 0 and 1234567."""
    states = np.array([0, 1234567], np.uint64)
    assert splitmix64(states).tolist() == [0xE220A8397B1DCDAF, 6457827717110365317]


def test_spread_is_one_way_and_hashed_is_all_of_them():
    assert (Spread().ways(32), Hashed(0).ways(32)) == (1, 32)


def test_a_pair_hashes_alike_whatever_else_is_asked_and_its_reverse_does_not():
    ends = np.arange(100)
    together = Hashed(3).choose(ends, ends + 1)
    assert together[7] == Hashed(3).choose(np.array([7]), np.array([8]))[0]
    assert (together != Hashed(3).choose(ends + 1, ends)).all()
