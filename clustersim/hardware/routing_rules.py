"""Which links may a transfer use?

In order of preference; real hardware does not do the last one:

    1. GPUs of one NVLink domain use NVLink only
    2. GPUs of one node use PCIe and host links, and pass through no NIC or GPU
    3. others use everything but NVLink, and pass through no GPU
    4. where that leaves no route, GPUs forward (a torus of GPUs, a dead NIC), over links of all kinds
"""

from dataclasses import dataclass
from typing import Final

from clustersim.hardware.topology import LINK_KINDS, LinkKind


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """Routes use links of `link_kinds` and pass through no vertex of `barred_kinds`."""

    link_kinds: frozenset[LinkKind]
    barred_kinds: frozenset[str] = frozenset()


WITHIN_DOMAIN: Final = RoutingRule(frozenset({LinkKind.NVLINK}))
WITHIN_NODE: Final = RoutingRule(frozenset({LinkKind.PCIE, LinkKind.HOST}), barred_kinds=frozenset({"gpu", "nic"}))
VIA_NETWORK: Final = RoutingRule(frozenset(LINK_KINDS) - WITHIN_DOMAIN.link_kinds, barred_kinds=frozenset({"gpu"}))
UNRESTRICTED: Final = RoutingRule(frozenset(LINK_KINDS))

RULES: Final = (WITHIN_DOMAIN, WITHIN_NODE, VIA_NETWORK, UNRESTRICTED)


def first_rule(*, same_domain: bool, same_node: bool) -> RoutingRule:
    """The preferred rule of a transfer."""
    if same_domain:
        return WITHIN_DOMAIN
    return WITHIN_NODE if same_node else VIA_NETWORK


def next_rule(rule: RoutingRule) -> RoutingRule:
    """The rule to try after one that leaves no route; raise ValueError after the last one."""
    if rule == UNRESTRICTED:
        raise ValueError("there is no route between two GPUs that are cut off from each other")
    return VIA_NETWORK if rule == WITHIN_NODE else UNRESTRICTED
