"""What are tiers and axes called, and which colour does an axis have, wherever the network is shown?"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Final

from clustersim.hardware.topology import LinkKind
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


def axis_words(axis: str) -> str:
    """An axis or role for people, as HTML, with a box of its colour."""
    return axis_key(axis) + escape(AXIS_LOOKS[axis][0])


def axis_key(axis: str) -> str:
    """A small box in the axis' colour."""
    return f'<span class="key" style="background:{AXIS_LOOKS[axis][1].colour}"></span>'


def table_of(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of HTML cells; the first of each row is its heading."""
    lines = ((first, "".join(f"<td>{cell}</td>" for cell in rest)) for first, *rest in rows)
    inside = "".join(f'<tr><th scope="row">{first}</th>{rest}</tr>' for first, rest in lines)
    heading = "".join(f'<th scope="col">{word}</th>' for word in head)
    return f'<table class="parts"><thead><tr>{heading}</tr></thead><tbody>{inside}</tbody></table>'
