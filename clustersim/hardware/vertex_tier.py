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
class Layer:
    """`count` vertices numbered from `first`; per: how many names share a first number, None: they have only one."""

    word: str
    first: int
    count: int
    per: int | None

    def name(self, index: int) -> str:
        """The name of the index-th vertex.

        >>> Layer("leaf", 0, 16, per=8).name(9), Layer("gpu", 0, 16, per=None).name(9)
        ('leaf1.1', 'gpu9')
        """
        return f"{self.word}{index}" if self.per is None else f"{self.word}{index // self.per}.{index % self.per}"

    def find(self, name: str) -> int | None:
        """The number of the vertex of this name, None if it is not in this layer.

        >>> leaves = Layer("leaf", 100, 16, per=8)
        >>> leaves.find("leaf1.1"), leaves.find("leaf2.0"), leaves.find("leaf9"), leaves.find("gpu9")
        (109, None, None, None)
        """
        match = _NAME.fullmatch(name)
        if match is None or match[1] != self.word or (match[3] is None) != (self.per is None):
            return None
        if self.per is None:
            index = int(match[2])
        elif int(match[3]) < self.per:
            index = int(match[2]) * self.per + int(match[3])
        else:
            return None
        return self.first + index if index < self.count else None

    @property
    def span(self) -> str:
        """The names of the first and the last vertex."""
        return self.name(0) if self.count == 1 else f"{self.name(0)} to {self.name(self.count - 1)}"


def number_layers(*layers: tuple[str, int, int | None]) -> Iterator[Layer]:
    """Layers of (word, count, per), numbered one after the other."""
    first = 0
    for word, count, per in layers:
        yield Layer(word, first, count, per)
        first += count
