"""A leaf with two NICs below and one uplink to a spine."""

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


def table(uplink: float, second: float = 1.0) -> LinkTable:
    """NICs of bandwidth 1 (the second may have another), one uplink."""
    bandwidth = np.array([1.0, second, 1.0, uplink])
    return LinkTable(np.array([NIC, NIC, NIC, LEAF]), bandwidth, np.zeros(4), np.zeros(4, dtype=np.int64))


def sent(links: LinkTable, *flows: tuple[int, float]) -> LinkLoadMatrix:
    """Groups that send bytes from a NIC up to the spine, one each."""
    entries = [(group, link, size) for group, (nic, size) in enumerate(flows) for link in (nic, 3)]
    group, link, size = (np.array(column) for column in zip(*entries, strict=True))
    return LinkLoadMatrix(group, link, size / links.bandwidth[link])


def kept(links: LinkTable, *crossings: LinkLoadMatrix) -> Sequence[bool]:
    found: list[bool] = bottleneck_link_mask(crossings, links, ENDS).tolist()
    return found


def test_an_uplink_that_carries_what_the_nics_below_bring_cannot_decide() -> None:
    links = table(uplink=2.0)
    assert kept(links, sent(links, (0, 1.0), (1, 1.0))) == [True, True, False, False]


@pytest.mark.parametrize("uplink", [1.0, 1.99])
def test_one_that_carries_less_can(uplink: float) -> None:
    links = table(uplink)
    assert kept(links, sent(links, (0, 1.0), (1, 1.0))) == [True, True, False, True]


def test_nics_that_nobody_uses_bring_nothing() -> None:
    """One NIC of two sends: an uplink of its bandwidth is enough."""
    links = table(uplink=1.0)
    assert kept(links, sent(links, (0, 1.0))) == [True, False, False, False]


def test_nics_count_by_their_bandwidth() -> None:
    """At full speed 1 and 3 s per second come to 4: as much as the uplink carries."""
    links = table(uplink=4.0, second=3.0)
    assert kept(links, sent(links, (0, 1.0), (1, 1.0)))[3] is False
    assert kept(table(uplink=3.9, second=3.0), sent(table(3.9, 3.0), (0, 1.0), (1, 1.0)))[3] is True


def test_what_comes_from_elsewhere_may_fill_an_uplink() -> None:
    """A group that keeps the uplink busy and no NIC below it: nothing bounds what it sends."""
    links = table(uplink=2.0)
    other = LinkLoadMatrix(np.array([0]), np.array([3]), np.array([0.1]))
    assert kept(links, sent(links, (0, 1.0), (1, 1.0)), other)[3] is True


def test_links_that_nobody_crosses_are_left_out() -> None:
    assert kept(table(uplink=0.5)) == [False] * 4
