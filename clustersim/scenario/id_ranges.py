"""How does a scenario file select GPUs or nodes? By ids, ranges ("8-15") or lists of both."""

import re
from typing import Annotated, Any

from clustersim.common.errors import format_value
from clustersim.scenario.config_reader import config_error, value_parser, yaml_number_message

MAX_SEED = 2**63 - 1
_RANGE = re.compile(r"\s*(\d{1,18})\s*-\s*(\d{1,18})\s*")


def parse_ranges(value: object) -> tuple[range, ...]:
    """Parse ids, ranges or a list of both into ranges; not checked against the cluster's size."""
    parsed = tuple(_parse_range(item) for item in (value if isinstance(value, list) else [value]))
    if not parsed:
        raise config_error("is empty; write a number, a range such as 8-15, or a list of them")
    return parsed


def _parse_range(item: object) -> range:
    if isinstance(item, int) and not isinstance(item, bool) and item >= 0:
        return range(item, item + 1)
    match = _RANGE.fullmatch(item) if isinstance(item, str) else None
    if match is None:
        yaml_message = yaml_number_message(item, integer=True)
        raise config_error(
            yaml_message or f"{format_value(item)} is neither a number from 0 up nor a range such as 8-15"
        )
    first, last = int(match[1]), int(match[2])
    if last < first:
        raise config_error(f"{format_value(item)} is backwards; write {last}-{first}")
    return range(first, last + 1)


IdRanges = Annotated[tuple[Any, ...], value_parser(parse_ranges, "a number, a range, or a list of both", "8-15")]
