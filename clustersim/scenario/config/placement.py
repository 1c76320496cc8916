"""What may a scenario file say of the GPUs that a job gets?

Numbers of GPUs and nodes are the machine's, as in `disturbances` and in `cluster.mixed`.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from clustersim.common import data_files
from clustersim.common.errors import InputError
from clustersim.hardware.allocation import Allocation, Filled, Listed, PerDomain, PerNode, Scatter, twice
from clustersim.hardware.cluster import MOST_GPUS
from clustersim.scenario.config_reader import Degree, Section, member, mistake, reads
from clustersim.scenario.id_ranges import MOST_SEED, Ranges, ranges

_WHOLE: Final = ("per_node", "per_domain", "nodes", "spare", "scatter", "seed")
_RANGES: Final = re.compile(r"[\d\s-]+")


def _order(value: object) -> object:
    """Numbers and ranges, or the name of a file of them."""
    return value if isinstance(value, str) and value.strip() and not _RANGES.fullmatch(value) else ranges(value)


class PlacementSection(Section):
    """`cluster.placement`: which GPUs of the cluster the job gets, and in which order ranks take them."""

    example: ClassVar[str] = "{per_node: 6}, {per_domain: 64}, {nodes: [0, 4-7]} or {scatter: nodes, seed: 1}"
    per_node: Degree | None = None
    """the first GPUs of every node; left out: all"""
    per_domain: Degree | None = None
    """the first GPUs of every NVLink domain; left out: all"""
    nodes: Ranges | None = None
    """these nodes, in this order; left out: in order"""
    spare: Annotated[int, Field(ge=0, le=MOST_GPUS)] | None = None
    """nodes that the machine has more than the job needs; left out: 0"""
    scatter: Annotated[Scatter, member(Scatter)] | None = None
    """a random order of nodes, or of all GPUs; left out: none"""
    seed: Annotated[int, Field(ge=0, le=MOST_SEED)] | None = None
    """of that order; left out: 0"""
    order: (
        Annotated[str | tuple[Any, ...], reads(_order, "a number, a range, a list of both, or a file", "[8-15, 0-7]")]
        | None
    ) = None
    """exactly these GPUs, rank by rank, or a file with a number or a range on each line; left out: none"""

    @model_validator(mode="after")
    def _says_one_thing(self) -> Self:
        if not self.model_fields_set:
            raise mistake(f"says nothing; write {self.example}, or leave it out")
        for sentence in self._conflicts():
            raise mistake(sentence)
        return self

    def _conflicts(self) -> Iterator[str]:
        """Keys that say two things at once."""
        beside = [key for key in _WHOLE if getattr(self, key) is not None]
        if self.order is not None and beside:
            yield f"has both order and {beside[0]}; order names every GPU, so keep one of them"
        if self.per_node is not None and self.per_domain is not None:
            yield "has both per_node and per_domain; keep one"
        if self.nodes is not None and self.spare is not None:
            yield "has both nodes and spare; nodes says which are used, so keep one of them"
        if self.seed is not None and self.scatter is None:
            yield "has a seed but no scatter; write scatter: nodes, or scatter: gpus"

    def files(self, base: Path) -> tuple[Path, ...]:
        """The file of the order, if it has one."""
        return (data_files.beside(base, self.order),) if isinstance(self.order, str) else ()

    def allocation(self, base: Path) -> Allocation:
        """The allocation as the inside knows it; raise InputError for what is named twice or cannot be read."""
        if self.order is not None:
            listed = self.order if isinstance(self.order, tuple) else _read(*self.files(base))
            return Listed(_numbers("order", "GPU", listed))
        parts = [PerNode(self.per_node)] if self.per_node else [PerDomain(self.per_domain)] if self.per_domain else []
        return Filled(
            part=parts[0] if parts else None,
            nodes=None if self.nodes is None else _numbers("nodes", "node", self.nodes),
            spare=self.spare or 0,
            scatter=self.scatter,
            seed=self.seed or 0,
        )


def _numbers(key: str, word: str, listed: Sequence[range]) -> tuple[int, ...]:
    """All numbers of some ranges, in their order; raise InputError for one that comes twice."""
    count = sum(map(len, listed))
    if count > MOST_GPUS:
        raise InputError(f"placement.{key}: names {count:,} {word}s; {MOST_GPUS:,} are the most")
    numbers = tuple(number for item in listed for number in item)
    again = twice(numbers)
    if again is not None:
        raise InputError(f"placement.{key}: {word} {again:,} comes twice; keep one")
    return numbers


def _read(path: Path) -> tuple[range, ...]:
    """The GPUs of a file: on each line a number or a range, lines that are empty or start with # aside."""
    try:
        lines = data_files.read_text(path).splitlines()
    except InputError as error:
        raise InputError(f"placement.order: {error}") from error
    found: list[range] = []
    for number, line in enumerate((line.strip() for line in lines), start=1):
        if line and not line.startswith("#"):
            found += _line(f"placement.order: {path}, line {number}", line)
    if not found:
        raise InputError(f"placement.order: {path} names no GPU; write one on each line")
    return tuple(found)


def _line(place: str, line: str) -> tuple[range, ...]:
    try:
        return ranges(int(line) if line.isdecimal() else line)
    except PydanticCustomError as error:
        raise InputError(f"{place}: {error.message()}") from error
