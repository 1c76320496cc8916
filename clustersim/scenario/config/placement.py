"""What may a scenario file say about the GPUs that a job is allocated?

Ids of GPUs and nodes are the cluster's, as in `degradations` and in `cluster.mixed`.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from clustersim.common import data_files
from clustersim.common.errors import InputError
from clustersim.common.input_files import quote_cell
from clustersim.hardware.allocation import (
    Allocation,
    BlockAllocation,
    ExplicitAllocation,
    PerDomain,
    PerNode,
    Scatter,
    first_duplicate,
)
from clustersim.hardware.cluster import MAX_GPUS
from clustersim.scenario.config_reader import ConfigModel, Degree, config_error, enum_parser, value_parser
from clustersim.scenario.id_ranges import MAX_SEED, IdRanges, parse_ranges

_KEYS_EXCLUDED_BY_ORDER: Final = ("per_node", "per_domain", "nodes", "spare", "scatter", "seed")
_RANGES_PATTERN: Final = re.compile(r"[\d\s-]+")


def _parse_order(value: object) -> object:
    """Ids and ranges, or the name of a file of them."""
    return (
        value
        if isinstance(value, str) and value.strip() and not _RANGES_PATTERN.fullmatch(value)
        else parse_ranges(value)
    )


class PlacementConfig(ConfigModel):
    """`cluster.placement`: which GPUs of the cluster the job gets, and their order by rank."""

    example: ClassVar[str] = "{per_node: 6}, {per_domain: 64}, {nodes: [0, 4-7]} or {scatter: nodes, seed: 1}"
    per_node: Degree | None = None
    """use only the first GPUs of every node; left out: all"""
    per_domain: Degree | None = None
    """use only the first GPUs of every NVLink domain; left out: all"""
    nodes: IdRanges | None = None
    """node ids, in rank order; left out: all, in order"""
    spare: Annotated[int, Field(ge=0, le=MAX_GPUS)] | None = None
    """additional nodes of the cluster that the job does not use; left out: 0"""
    scatter: Annotated[Scatter, enum_parser(Scatter)] | None = None
    """shuffle the nodes, or all GPUs; left out: no"""
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    """of the shuffle; left out: 0"""
    order: (
        Annotated[
            str | tuple[Any, ...],
            value_parser(_parse_order, "a number, a range, a list of both, or a file", "[8-15, 0-7]"),
        ]
        | None
    ) = None
    """GPU ids in rank order, or a file with an id or a range on each line; left out: none"""

    @model_validator(mode="after")
    def _check_conflicts(self) -> Self:
        if not self.model_fields_set:
            raise config_error(f"says nothing; write {self.example}, or leave it out")
        for sentence in self._conflicts():
            raise config_error(sentence)
        return self

    def _conflicts(self) -> Iterator[str]:
        """Messages for keys that exclude each other."""
        conflicting = [key for key in _KEYS_EXCLUDED_BY_ORDER if getattr(self, key) is not None]
        if self.order is not None and conflicting:
            yield f"has both order and {conflicting[0]}; order names every GPU, so keep one of them"
        if self.per_node is not None and self.per_domain is not None:
            yield "has both per_node and per_domain; keep one"
        if self.nodes is not None and self.spare is not None:
            yield "has both nodes and spare; nodes says which are used, so keep one of them"
        if self.seed is not None and self.scatter is None:
            yield "has a seed but no scatter; write scatter: nodes, or scatter: gpus"

    def files(self, base: Path) -> tuple[Path, ...]:
        """The file of the GPU order, if there is one."""
        return (data_files.resolve_relative(base, self.order),) if isinstance(self.order, str) else ()

    def allocation(self, base: Path) -> Allocation:
        """The allocation as the simulator represents it; raises InputError for duplicates or an unreadable file."""
        if self.order is not None:
            id_ranges = self.order if isinstance(self.order, tuple) else _read_order_file(*self.files(base))
            return ExplicitAllocation(_expand_unique_ids("order", "GPU", id_ranges))
        fillings = (
            [PerNode(self.per_node)] if self.per_node else [PerDomain(self.per_domain)] if self.per_domain else []
        )
        return BlockAllocation(
            per_unit=fillings[0] if fillings else None,
            node_ids=None if self.nodes is None else _expand_unique_ids("nodes", "node", self.nodes),
            spare_nodes=self.spare or 0,
            scatter=self.scatter,
            seed=self.seed or 0,
        )


def _expand_unique_ids(key: str, noun: str, id_ranges: Sequence[range]) -> tuple[int, ...]:
    """All ids of some ranges, in order; raises InputError for duplicates."""
    count = sum(map(len, id_ranges))
    if count > MAX_GPUS:
        raise InputError(f"placement.{key}: names {count:,} {noun}s; {MAX_GPUS:,} are the most")
    ids = tuple(gpu_id for id_range in id_ranges for gpu_id in id_range)
    duplicate = first_duplicate(ids)
    if duplicate is not None:
        raise InputError(f"placement.{key}: {noun} {duplicate:,} comes twice; keep one")
    return ids


def _read_order_file(path: Path) -> tuple[range, ...]:
    """GPU id ranges from a file: an id or a range per line; empty lines and lines starting with # are skipped."""
    try:
        lines = data_files.read_text(path).splitlines()
    except InputError as error:
        raise InputError(f"placement.order: {error}") from error
    id_ranges: list[range] = []
    for line_number, line in enumerate((line.strip() for line in lines), start=1):
        if line and not line.startswith("#"):
            id_ranges += _parse_order_line(f"placement.order: {path}, line {line_number}", line)
    if not id_ranges:
        raise InputError(f"placement.order: {path} names no GPU; write one on each line")
    return tuple(id_ranges)


def _parse_order_line(location: str, line: str) -> tuple[range, ...]:
    try:
        return parse_ranges(int(line) if line.isdecimal() else line)
    except PydanticCustomError as error:
        quoted = quote_cell(line, "-0-9a-z., ")
        reason = error.message() if quoted.startswith("'") else f"{quoted} is neither an id nor a range of ids"
        raise InputError(f"{location}: {reason}") from error
