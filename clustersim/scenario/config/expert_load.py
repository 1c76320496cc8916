"""What may a scenario file say about the imbalance of tokens over experts?

`training.expert_load`: `balanced`; a coefficient of variation from which loads are drawn; or measured token
counts.
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
    """None for the word `balanced`; other words are refused."""
    if isinstance(value, str) and value != "balanced":
        raise config_error(f"{format_value(value)} is unknown; write {ExpertLoadConfig.example}")
    return None if value == "balanced" else value


def _check_variation(value: float) -> float:
    if not 0.0 <= value <= MAX_VARIATION:
        raise config_error(f"{format_value(value)} is not between 0 and {MAX_VARIATION:g}; 0.3 is that of many routers")
    return value


def _parse_token_counts(value: object) -> object:
    """Lists of token counts per expert; a single list applies to all layers."""
    if not isinstance(value, list) or not value:
        raise config_error(f"{format_value(value)} is no list of tokens per expert; write {_EXAMPLE}")
    return value if all(isinstance(element, list) for element in value) else [value]


def _check_token_counts(token_counts: list[list[float]]) -> list[list[float]]:
    for list_index, counts in enumerate(token_counts):
        invalid = [count for count in counts if not (math.isfinite(count) and count >= 0.0)]
        if invalid:
            raise config_error(
                f"{format_value(invalid[0])} in list {list_index + 1} is no number of tokens; write 0 or more"
            )
        if sum(counts) <= 0.0:
            raise config_error(f"list {list_index + 1} has no tokens at all; at least one expert gets some")
    return token_counts


class ExpertLoadConfig(ConfigModel):
    """`training.expert_load`: imbalance of tokens over experts; a bare number is the coefficient of variation."""

    shorthand_key: ClassVar[str | None] = "coefficient_of_variation"
    example: ClassVar[str] = (
        "balanced, {coefficient_of_variation: 0.3, seed: 0} or {tokens_per_expert: [120, 80, 95, 105]}"
    )
    coefficient_of_variation: Annotated[float, AfterValidator(_check_variation)] | None = None
    """coefficient of variation of tokens per expert, from which each layer's and step's load is drawn.

    Left out: none
    """
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] = 0
    """of the random draws"""
    tokens_per_expert: (
        Annotated[
            list[list[float]],
            value_parser(_parse_token_counts, "a list of numbers, or a list of such lists", "[120, 80, 95, 105]"),
            AfterValidator(_check_token_counts),
        ]
        | None
    ) = None
    """measured tokens per expert: one list for all layers, or one per MoE layer; left out: none"""

    @model_validator(mode="after")
    def _require_one_form(self) -> Self:
        if (self.coefficient_of_variation is None) == (self.tokens_per_expert is None):
            raise config_error(
                f"says loads by coefficient_of_variation or by tokens_per_expert, one of the two; write {self.example}"
            )
        return self

    def expert_load(self) -> ExpertLoad:
        """The expert load as the simulator represents it."""
        if self.tokens_per_expert is not None:
            return MeasuredExpertLoad(tuple(tuple(counts) for counts in self.tokens_per_expert))
        return RandomExpertLoad(self.coefficient_of_variation or 0.0, self.seed)
