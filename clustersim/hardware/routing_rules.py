"""Which links may a transfer use?

What hardware would not do is tried last:

    1. GPUs of one NVLink domain use NVLink alone
    2. GPUs of one node use PCIe and host links, and pass through no NIC or GPU
    3. others use everything but NVLink, and pass through no GPU
    4. where that leaves no route, GPUs forward (a torus of GPUs, a dead NIC) and NVLink is mixed with the rest
"""

from dataclasses import dataclass
from typing import Final

from clustersim.hardware.topology import LINK_KINDS, LinkKind


@dataclass(frozen=True, slots=True)
class Rule:
    """Routes use links of these kinds and pass through no vertex of the barred kinds."""

    kinds: frozenset[LinkKind]
    barred: frozenset[str] = frozenset()


WITHIN_DOMAIN: Final = Rule(frozenset({LinkKind.NVLINK}))
WITHIN_NODE: Final = Rule(frozenset({LinkKind.PCIE, LinkKind.HOST}), barred=frozenset({"gpu", "nic"}))
BY_NETWORK: Final = Rule(frozenset(LINK_KINDS) - WITHIN_DOMAIN.kinds, barred=frozenset({"gpu"}))
ANYHOW: Final = Rule(frozenset(LINK_KINDS))

RULES: Final = (WITHIN_DOMAIN, WITHIN_NODE, BY_NETWORK, ANYHOW)


def first_rule(*, same_domain: bool, same_node: bool) -> Rule:
    """The rule that a transfer follows if it can."""
    if same_domain:
        return WITHIN_DOMAIN
    return WITHIN_NODE if same_node else BY_NETWORK


def next_rule(rule: Rule) -> Rule:
    """The rule where one leaves no route; raise ValueError where no rule can."""
    if rule == ANYHOW:
        raise ValueError("there is no route between two GPUs that are cut off from each other")
    return BY_NETWORK if rule == WITHIN_NODE else ANYHOW
