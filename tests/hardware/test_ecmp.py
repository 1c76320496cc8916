"""The ECMP hash that spreads pairs over parallel links."""

import numpy as np

from clustersim.hardware.ecmp import HashedEcmp, SpreadEcmp


def test_spread_has_one_way_and_hashed_has_all():
    assert (SpreadEcmp().distinct_links(32), HashedEcmp(0).distinct_links(32)) == (1, 32)


def test_hashes_depend_only_on_the_ordered_pair():
    ends = np.arange(100)
    batched = HashedEcmp(3).choose_paths(ends, ends + 1)
    assert batched[7] == HashedEcmp(3).choose_paths(np.array([7]), np.array([8]))[0]
    assert (batched != HashedEcmp(3).choose_paths(ends + 1, ends)).all()
