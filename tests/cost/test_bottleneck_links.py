"""Bottleneck links of a leaf with two NICs below and one uplink to a spine."""

from collections.abc import Sequence

import numpy as np
import pytest

from clustersim.cost.bottleneck_links import bottleneck_link_mask
from clustersim.hardware.topology import LINK_KINDS, LinkEndpoints, LinkKind, LinkTable
from clustersim.symmetry.link_load_matrix import LinkLoadMatrix

NIC, LEAF = LINK_KINDS.index(LinkKind.NIC), LINK_KINDS.index(LinkKind.LEAF)
NICS, SWITCH, SPINE = (0, 1), 2, 3
ENDS = LinkEndpoints(
    source=np.array([*NICS, SWITCH, SWITCH]), target=np.array([SWITCH, SWITCH, NICS[0], SPINE]), vertex_count=4
)
"""Links 0, 1: NICs up to the leaf; 2: down again; 3: the leaf up to the spine."""


def table(uplink_bandwidth: float, second_bandwidth: float = 1.0) -> LinkTable:
    """NICs of bandwidth 1 (the second may differ), one uplink."""
    bandwidth = np.array([1.0, second_bandwidth, 1.0, uplink_bandwidth])
    return LinkTable(np.array([NIC, NIC, NIC, LEAF], np.int8), bandwidth, np.zeros(4), np.zeros(4, np.int8))


def link_loads(links: LinkTable, *flows: tuple[int, float]) -> LinkLoadMatrix:
    """Link loads of groups that each send bytes from a NIC up to the spine."""
    entries = [(group, link, size) for group, (nic, size) in enumerate(flows) for link in (nic, 3)]
    group, link, size = (np.array(column) for column in zip(*entries, strict=True))
    return LinkLoadMatrix(group, link, size / links.bandwidth[link])


def kept_links(links: LinkTable, *loads: LinkLoadMatrix) -> Sequence[bool]:
    is_kept: list[bool] = bottleneck_link_mask(loads, links, ENDS).tolist()
    return is_kept


def test_an_uplink_as_fast_as_the_nics_below_is_no_bottleneck() -> None:
    links = table(uplink_bandwidth=2.0)
    assert kept_links(links, link_loads(links, (0, 1.0), (1, 1.0))) == [True, True, False, False]


@pytest.mark.parametrize("uplink", [1.0, 1.99])
def test_an_uplink_slower_than_the_nics_below_is_a_bottleneck(uplink: float) -> None:
    links = table(uplink)
    assert kept_links(links, link_loads(links, (0, 1.0), (1, 1.0))) == [True, True, False, True]


def test_unused_nics_do_not_load_the_uplink() -> None:
    """One NIC of two sends: an uplink of its bandwidth is enough."""
    links = table(uplink_bandwidth=1.0)
    assert kept_links(links, link_loads(links, (0, 1.0))) == [True, False, False, False]


def test_nics_count_by_their_bandwidth() -> None:
    """At full rate 1 and 3 bytes per second add up to 4: as much as the uplink carries."""
    links = table(uplink_bandwidth=4.0, second_bandwidth=3.0)
    assert kept_links(links, link_loads(links, (0, 1.0), (1, 1.0)))[3] is False
    assert (
        kept_links(table(uplink_bandwidth=3.9, second_bandwidth=3.0), link_loads(table(3.9, 3.0), (0, 1.0), (1, 1.0)))[
            3
        ]
        is True
    )


def test_traffic_that_bypasses_the_nics_makes_an_uplink_a_bottleneck() -> None:
    """A group that uses the uplink and no NIC below it: nothing bounds what it sends."""
    links = table(uplink_bandwidth=2.0)
    bypassing = LinkLoadMatrix(np.array([0]), np.array([3]), np.array([0.1]))
    assert kept_links(links, link_loads(links, (0, 1.0), (1, 1.0)), bypassing)[3] is True


def test_unused_links_are_dropped() -> None:
    assert kept_links(table(uplink_bandwidth=0.5)) == [False] * 4
