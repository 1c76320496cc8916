"""What may a scenario file say of how unevenly tokens choose experts?

`training.expert_load`: `balanced`; a variation from which loads are drawn; or rows as they were measured.
"""

import math
from typing import Annotated, ClassVar, Final, Self

from pydantic import AfterValidator, Field, model_validator

from clustersim.common.errors import format_value
from clustersim.model.moe_expert_load import ExpertLoad, MeasuredExpertLoad, RandomExpertLoad
from clustersim.scenario.config_reader import ConfigModel, config_error, value_parser
from clustersim.scenario.id_ranges import MAX_SEED

MAX_VARIATION: Final = 10.0
_EXAMPLE: Final = "[[120, 80, 95, 105]], of all layers, or one such list for each routed layer"


def none_from_balanced(value: object) -> object:
    """The word `balanced` is nothing; there are no others."""
    if isinstance(value, str) and value != "balanced":
        raise config_error(f"{format_value(value)} is unknown; write {ExpertLoadConfig.example}")
    return None if value == "balanced" else value


def _check_variation(value: float) -> float:
    if not 0.0 <= value <= MAX_VARIATION:
        raise config_error(f"{format_value(value)} is not between 0 and {MAX_VARIATION:g}; 0.3 is that of many routers")
    return value


def _parse_token_counts(value: object) -> object:
    """Lists of rows; one list alone is that of all layers."""
    if not isinstance(value, list) or not value:
        raise config_error(f"{format_value(value)} is no list of rows of each expert; write {_EXAMPLE}")
    return value if all(isinstance(item, list) for item in value) else [value]


def _check_token_counts(token_counts: list[list[float]]) -> list[list[float]]:
    for list_index, counts in enumerate(token_counts):
        invalid = [count for count in counts if not (math.isfinite(count) and count >= 0.0)]
        if invalid:
            raise config_error(
                f"{format_value(invalid[0])} in list {list_index + 1} is no number of rows; write 0 or more"
            )
        if sum(counts) <= 0.0:
            raise config_error(f"list {list_index + 1} has no rows at all; at least one expert gets some")
    return token_counts


class ExpertLoadConfig(ConfigModel):
    """`training.expert_load`: a bare number is the variation."""

    shorthand_key: ClassVar[str | None] = "variation"
    example: ClassVar[str] = "balanced, {variation: 0.3, seed: 0} or {rows: [120, 80, 95, 105]}"
    variation: Annotated[float, AfterValidator(_check_variation)] | None = None
    """standard deviation over mean of experts' tokens, from which each layer's and step's are drawn; left out: none"""
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] = 0
    """another seed draws other loads"""
    rows: (
        Annotated[
            list[list[float]],
            value_parser(_parse_token_counts, "a list of numbers, or a list of such lists", "[120, 80, 95, 105]"),
            AfterValidator(_check_token_counts),
        ]
        | None
    ) = None
    """tokens of each expert as measured: one list for all layers, or one for each routed layer; left out: none"""

    @model_validator(mode="after")
    def _require_one_form(self) -> Self:
        if (self.variation is None) == (self.rows is None):
            raise config_error(f"says loads by variation or by rows, one of the two; write {self.example}")
        return self

    def expert_load(self) -> ExpertLoad:
        """The load as the inside knows it."""
        if self.rows is not None:
            return MeasuredExpertLoad(tuple(tuple(item) for item in self.rows))
        return RandomExpertLoad(self.variation or 0.0, self.seed)
