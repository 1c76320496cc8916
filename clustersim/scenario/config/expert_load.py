"""What may a scenario file say about the imbalance of tokens over experts?

`training.expert_load`: `balanced`; a coefficient of variation from which loads are drawn; or measured token
counts, in the file or in one of their own.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Final, Self

from pydantic import AfterValidator, Field, model_validator

from clustersim.common import data_files
from clustersim.common.errors import InputError, format_value
from clustersim.common.input_files import NUMBER_ALPHABET, quote_cell
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
    """Lists of token counts per expert, or the name of a file of them; a single list applies to all layers."""
    if isinstance(value, str) and value.strip():
        return value
    if not isinstance(value, list) or not value:
        raise config_error(f"{format_value(value)} is no list of tokens per expert; write {_EXAMPLE}")
    return value if all(isinstance(element, list) for element in value) else [value]


def _check_token_counts(token_counts: str | list[list[float]]) -> str | list[list[float]]:
    if isinstance(token_counts, str):
        return token_counts
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
            str | list[list[float]],
            value_parser(
                _parse_token_counts, "a list of numbers, a list of such lists, or a file", "[120, 80, 95, 105]"
            ),
            AfterValidator(_check_token_counts),
        ]
        | None
    ) = None
    """measured tokens per expert: one list for all layers, or one per MoE layer; or a file with a list on each
    line, by commas or spaces; left out: none
    """

    @model_validator(mode="after")
    def _require_one_form(self) -> Self:
        if (self.coefficient_of_variation is None) == (self.tokens_per_expert is None):
            raise config_error(
                f"says loads by coefficient_of_variation or by tokens_per_expert, one of the two; write {self.example}"
            )
        return self

    def files(self, base: Path) -> tuple[Path, ...]:
        """The file of token counts, if there is one."""
        counts = self.tokens_per_expert
        return (data_files.resolve_relative(base, counts),) if isinstance(counts, str) else ()

    def expert_load(self, base: Path) -> ExpertLoad:
        """The expert load as the simulator represents it; raises InputError for an unreadable file."""
        if self.tokens_per_expert is None:
            return RandomExpertLoad(self.coefficient_of_variation or 0.0, self.seed)
        counts = self.tokens_per_expert
        lists = _read_counts_file(*self.files(base)) if isinstance(counts, str) else counts
        return MeasuredExpertLoad(tuple(tuple(layer_counts) for layer_counts in lists))


def _read_counts_file(path: Path) -> list[list[float]]:
    """Lists of token counts, one on each line; empty lines and lines that start with # are skipped."""
    try:
        lines = data_files.read_text(path).splitlines()
    except InputError as error:
        raise InputError(f"tokens_per_expert: {error}") from error
    numbered = ((number, line.strip()) for number, line in enumerate(lines, start=1))
    lists = [[*_parse_counts(path, number, line)] for number, line in numbered if line and not line.startswith("#")]
    if not lists:
        raise InputError(f"tokens_per_expert: {path} has no numbers; write those of a layer's experts on each line")
    return lists


def _parse_counts(path: Path, line_number: int, line: str) -> Iterator[float]:
    """Token counts of a line; at least one is above 0."""
    counts: list[float] = []
    for text in re.split(r"[,;\s]+", line.strip(",; ")):
        try:
            count = float(text)
        except ValueError:
            count = math.nan
        if not (math.isfinite(count) and count >= 0.0):
            quoted = quote_cell(text, NUMBER_ALPHABET)
            raise InputError(
                f"tokens_per_expert: {path}, line {line_number}: {quoted} is no number of tokens; write 0 or more"
            )
        counts.append(count)
    if sum(counts) <= 0.0:
        raise InputError(
            f"tokens_per_expert: {path}, line {line_number}: has no tokens at all; at least one expert gets some"
        )
    yield from counts
