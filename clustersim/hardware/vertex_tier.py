"""Names and ids of a regular cluster's vertices.

Vertices of one kind form a tier and have consecutive ids. A name is the kind and an index (gpu17, nvswitch2),
or the kind and two indices: which node, unit, pod or plane, and which vertex in it (nic2.1, leaf0.3).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_NAME: Final = re.compile(r"([a-z]+)(\d{1,9})(?:\.(\d{1,9}))?")


@dataclass(frozen=True, slots=True)
class VertexTier:
    """`count` vertices with ids from `first_id`.

    per_group: vertices per first index of a name, None: names have one index.
    """

    kind: str
    first_id: int
    count: int
    per_group: int | None

    def vertex_name(self, index: int) -> str:
        """The name of the index-th vertex.

        >>> VertexTier("leaf", 0, 16, per_group=8).vertex_name(9)
        'leaf1.1'
        >>> VertexTier("gpu", 0, 16, per_group=None).vertex_name(9)
        'gpu9'
        """
        return (
            f"{self.kind}{index}"
            if self.per_group is None
            else f"{self.kind}{index // self.per_group}.{index % self.per_group}"
        )

    def find_vertex(self, name: str) -> int | None:
        """The id of the vertex of this name, None if it is not in this tier.

        >>> leaves = VertexTier("leaf", 100, 16, per_group=8)
        >>> [leaves.find_vertex(name) for name in ("leaf1.1", "leaf2.0", "leaf9", "gpu9")]
        [109, None, None, None]
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
        """The names of the first and the last vertex, for messages."""
        return (
            self.vertex_name(0) if self.count == 1 else f"{self.vertex_name(0)} to {self.vertex_name(self.count - 1)}"
        )


def number_tiers(*tiers: tuple[str, int, int | None]) -> Iterator[VertexTier]:
    """Tiers of (kind, count, per_group), numbered consecutively."""
    first_id = 0
    for kind, count, per_group in tiers:
        yield VertexTier(kind, first_id, count, per_group)
        first_id += count
