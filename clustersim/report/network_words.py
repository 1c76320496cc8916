"""What are tiers and axes called, and which colour does an axis have, wherever the network is shown?"""

from collections.abc import Mapping
from typing import Final

from clustersim.hardware.topology import LinkKind
from clustersim.report.keys import Html, named
from clustersim.report.theme import Category

LINK_WORDS: Final[Mapping[LinkKind, str]] = {
    LinkKind.NVLINK: "NVLink",
    LinkKind.PCIE: "PCIe",
    LinkKind.HOST: "host",
    LinkKind.NIC: "NIC",
    LinkKind.LEAF: "leaf to spine",
    LinkKind.SPINE: "spine to core",
}
"""What the links of a tier join, or belong to."""

AXIS_LOOKS: Final[Mapping[str, tuple[str, Category]]] = {
    "tp": ("tp", Category.TENSOR),
    "cp": ("cp", Category.CONTEXT),
    "dp": ("dp", Category.DATA),
    "pp": ("pp", Category.PIPELINE),
    "embedding": ("tied embeddings", Category.DATA),
    "model": ("replica", Category.DATA),
    "world": ("all ranks", Category.DATA),
}
"""Axes and roles in words, and their colours; the last three complete the gradients, as in the breakdown."""


def axis_words(axis: str) -> Html:
    """An axis or role for people, with the mark of its colour."""
    words, look = AXIS_LOOKS[axis]
    return named(look, words)
