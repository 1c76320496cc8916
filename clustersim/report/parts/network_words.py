"""What are tiers and axes called, and which colour does an axis have, wherever the network is shown?"""

from collections.abc import Mapping
from typing import Final

from markupsafe import Markup

from clustersim.hardware.topology import LinkKind
from clustersim.parallel.mesh import ROLES
from clustersim.report.keys import named
from clustersim.report.theme import AXIS_LOOKS, Category

LINK_WORDS: Final[Mapping[LinkKind, str]] = {
    LinkKind.NVLINK: "NVLink",
    LinkKind.PCIE: "PCIe",
    LinkKind.HOST: "host",
    LinkKind.NIC: "NIC",
    LinkKind.LEAF: "leaf to spine",
    LinkKind.SPINE: "spine to core",
}
"""What the links of a tier join, or belong to."""

LISTED_LOOKS: Final[Mapping[str, tuple[str, Category]]] = {
    **{axis.name: (axis.name, look) for axis, look in AXIS_LOOKS.items()},
    **{role.listed: (role.label, AXIS_LOOKS[role.serves]) for role in ROLES.values()},
}
"""Axes and roles as they are listed, in words, and their colours."""


def axis_words(axis: str) -> Markup:
    """An axis or role for people, with the mark of its colour."""
    words, look = LISTED_LOOKS[axis]
    return named(look, words)
