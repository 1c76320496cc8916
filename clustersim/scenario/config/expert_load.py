"""What may a scenario file say of how unevenly tokens choose experts?

`training.expert_load`: `balanced`; a variation from which loads are drawn; or rows as they were measured.
"""

import math
from typing import Annotated, ClassVar, Final, Self

from pydantic import AfterValidator, Field, model_validator

from clustersim.common.errors import shown
from clustersim.model.moe_expert_load import DrawnLoad, ExpertLoad, MeasuredLoad
from clustersim.scenario.config_reader import Section, mistake, reads
from clustersim.scenario.id_ranges import MOST_SEED

MOST_VARIATION: Final = 10.0
_EXAMPLE: Final = "[[120, 80, 95, 105]], of all layers, or one such list for each routed layer"


def balanced_or(value: object) -> object:
    """The word `balanced` is nothing; there are no others."""
    if isinstance(value, str) and value != "balanced":
        raise mistake(f"{shown(value)} is unknown; write {ExpertLoadSection.example}")
    return None if value == "balanced" else value


def _variation(value: float) -> float:
    if not 0.0 <= value <= MOST_VARIATION:
        raise mistake(f"{shown(value)} is not between 0 and {MOST_VARIATION:g}; 0.3 is that of many routers")
    return value


def _vectors(value: object) -> object:
    """Lists of rows; one list alone is that of all layers."""
    if not isinstance(value, list) or not value:
        raise mistake(f"{shown(value)} is no list of rows of each expert; write {_EXAMPLE}")
    return value if all(isinstance(item, list) for item in value) else [value]


def _loads(vectors: list[list[float]]) -> list[list[float]]:
    for place, rows in enumerate(vectors):
        wrong = [item for item in rows if not (math.isfinite(item) and item >= 0.0)]
        if wrong:
            raise mistake(f"{shown(wrong[0])} in list {place + 1} is no number of rows; write 0 or more")
        if sum(rows) <= 0.0:
            raise mistake(f"list {place + 1} has no rows at all; at least one expert gets some")
    return vectors


class ExpertLoadSection(Section):
    """`training.expert_load`: a bare number is the variation."""

    short: ClassVar[str | None] = "variation"
    example: ClassVar[str] = "balanced, {variation: 0.3, seed: 0} or {rows: [120, 80, 95, 105]}"
    variation: Annotated[float, AfterValidator(_variation)] | None = None
    """standard deviation over mean of experts' tokens, from which each layer's and step's are drawn; left out: none"""
    seed: Annotated[int, Field(ge=0, le=MOST_SEED)] = 0
    """another seed draws other loads"""
    rows: (
        Annotated[
            list[list[float]],
            reads(_vectors, "a list of numbers, or a list of such lists", "[120, 80, 95, 105]"),
            AfterValidator(_loads),
        ]
        | None
    ) = None
    """tokens of each expert as measured: one list for all layers, or one for each routed layer; left out: none"""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.variation is None) == (self.rows is None):
            raise mistake(f"says loads by variation or by rows, one of the two; write {self.example}")
        return self

    def load(self) -> ExpertLoad:
        """The load as the inside knows it."""
        if self.rows is not None:
            return MeasuredLoad(tuple(tuple(item) for item in self.rows))
        return DrawnLoad(self.variation or 0.0, self.seed)
