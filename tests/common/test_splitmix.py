"""The splitmix64 hash of 64-bit integers."""

import numpy as np

from clustersim.common.splitmix import splitmix64


def test_splitmix64_gives_the_reference_sequence():
    """First outputs of the reference generator (Vigna's splitmix64.c) from the states 0 and 1234567."""
    states = np.array([0, 1234567], np.uint64)
    assert splitmix64(states).tolist() == [0xE220A8397B1DCDAF, 6457827717110365317]
