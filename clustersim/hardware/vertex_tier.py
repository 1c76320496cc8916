"""What are the vertices of a regular cluster called, and how are they numbered?

Vertices of one kind form a layer and have successive numbers. A name is the kind and a number (gpu17, nvswitch2), or
the kind and two: which node, unit, pod or plane, and which one in it (nic2.1, leaf0.3).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_NAME: Final = re.compile(r"([a-z]+)(\d{1,9})(?:\.(\d{1,9}))?")


@dataclass(frozen=True, slots=True)
class VertexTier:
    """`count` vertices numbered from `first`; per: how many names share a first number, None: they have only one."""

    kind: str
    first_id: int
    count: int
    per_group: int | None

    def vertex_name(self, index: int) -> str:
        """The name of the index-th vertex.

        >>> Layer("leaf", 0, 16, per=8).name(9), Layer("gpu", 0, 16, per=None).name(9)
        ('leaf1.1', 'gpu9')
        """
        return (
            f"{self.kind}{index}"
            if self.per_group is None
            else f"{self.kind}{index // self.per_group}.{index % self.per_group}"
        )

    def find_vertex(self, name: str) -> int | None:
        """The number of the vertex of this name, None if it is not in this layer.

        >>> leaves = Layer("leaf", 100, 16, per=8)
        >>> leaves.find("leaf1.1"), leaves.find("leaf2.0"), leaves.find("leaf9"), leaves.find("gpu9")
        (109, None, None, None)
        """
        match = _NAME.fullmatch(name)
        if match is None or match[1] != self.kind or (match[3] is None) != (self.per_group is None):
            return None
        if self.per_group is None:
            index = int(match[2])
        elif int(match[3]) < self.per_group:
            index = int(match[2]) * self.per_group + int(match[3])
        else:
            return None
        return self.first_id + index if index < self.count else None

    @property
    def name_range(self) -> str:
        """The names of the first and the last vertex."""
        return (
            self.vertex_name(0) if self.count == 1 else f"{self.vertex_name(0)} to {self.vertex_name(self.count - 1)}"
        )


def number_tiers(*tiers: tuple[str, int, int | None]) -> Iterator[VertexTier]:
    """Layers of (word, count, per), numbered one after the other."""
    first_id = 0
    for kind, count, per_group in tiers:
        yield VertexTier(kind, first_id, count, per_group)
        first_id += count
