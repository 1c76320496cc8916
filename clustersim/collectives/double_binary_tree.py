"""Flows of two complementary binary trees.

Each tree carries half of the payload; its vertices are NVLink domains. The second tree is the first with all
domains shifted by one, so that an inner vertex of one is a leaf of the other (with an odd number of domains, all
but one are), and every domain sends and receives about twice the payload. NCCL shifts for one parity of the number
of domains and mirrors for the other: other pairs of domains, the same load of each.

Reference: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
2009; NCCL's double binary trees (2.4).
"""

import numpy as np

from clustersim.collectives.phase import Flows
from clustersim.common.arrays import IntArray


def tree_depth(domain_count: int) -> int:
    """Levels of the tree below its root."""
    return int(domain_count - 1).bit_length()


def tree_fill_stages(domain_count: int) -> float:
    """Pipeline fill in chunk times, of a broadcast, a reduction, or both in turn.

    A hop takes half of a chunk time, because an inner vertex's port carries the chunks of two children (with two
    domains there is one child, and a hop takes a whole one); from the leaves to the root and back there are twice as
    many hops as levels.
    """
    return float(tree_depth(domain_count) if domain_count > 2 else 2 * tree_depth(domain_count))


def tree_flows(heads: IntArray, *, up: bool, down: bool) -> list[Flows]:
    """Flows of both trees over each rail, heads [groups, domains, rails]: towards the roots, from them, or both."""
    domains, rails = heads.shape[1:]
    child, parent = binary_tree(domains)
    flow_list: list[Flows] = []
    for shift in (0, 1):
        lower, upper = heads[:, (child + shift) % domains], heads[:, (parent + shift) % domains]
        flow_list += up_down_flows(lower, upper, 0.5 / rails, up=up, down=down)
    return flow_list


def up_down_flows(child: IntArray, parent: IntArray, share: float, *, up: bool, down: bool) -> list[Flows]:
    """Flows from children to parents, from parents to children, or both."""
    up_flows = [Flows(child, parent, share)] if up else []
    down_flows = [Flows(parent, child, share)] if down else []
    return up_flows + down_flows


def binary_tree(node_count: int) -> tuple[IntArray, IntArray]:
    """Children and their parents in a binary tree over nodes 0 ... node_count-1 whose odd nodes are its leaves.

    Node 0 is the root and has one child; a node's lowest set bit is its height.
    """
    child = np.arange(1, node_count, dtype=np.int64)
    lowest_bit = child & -child
    upper_parent = (child ^ lowest_bit) | (lowest_bit << 1)
    return child, np.where(upper_parent < node_count, upper_parent, child ^ lowest_bit)


def tree_site_crossings(domain_sites: IntArray | None) -> IntArray | int:
    """The most edges between sites on a way from a leaf of either tree to its root: [groups], or 0 without sites.

    domain_sites: [groups, domains] site of each domain.
    """
    if domain_sites is None:
        return 0
    domains = domain_sites.shape[1]
    child, parent = binary_tree(domains)
    crossings = np.zeros((2, *domain_sites.shape), np.int64)
    for height in range(domains.bit_length(), -1, -1):
        lower, upper = child[child & -child == 1 << height], parent[child & -child == 1 << height]
        for shift in (0, 1):
            is_crossing = domain_sites[:, (lower + shift) % domains] != domain_sites[:, (upper + shift) % domains]
            crossings[shift][:, lower] = crossings[shift][:, upper] + is_crossing
    most: IntArray = crossings.max(axis=(0, 2))
    return most
