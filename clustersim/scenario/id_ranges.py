"""How does a scenario file name some GPUs or nodes? By numbers, ranges ("8-15") or lists of both."""

import re
from typing import Annotated, Any

from clustersim.common.errors import shown
from clustersim.scenario.config_reader import mistake, reads, yaml_number

MOST_SEED = 2**63 - 1
_RANGE = re.compile(r"\s*(\d{1,18})\s*-\s*(\d{1,18})\s*")


def ranges(value: object) -> tuple[range, ...]:
    """Numbers, ranges or a list of both as ranges; how many GPUs or nodes there are is not known here."""
    found = tuple(_range(item) for item in (value if isinstance(value, list) else [value]))
    if not found:
        raise mistake("is empty; write a number, a range such as 8-15, or a list of them")
    return found


def _range(item: object) -> range:
    if isinstance(item, int) and not isinstance(item, bool) and item >= 0:
        return range(item, item + 1)
    match = _RANGE.fullmatch(item) if isinstance(item, str) else None
    if match is None:
        meant = yaml_number(item, whole=True)
        raise mistake(meant or f"{shown(item)} is neither a number from 0 up nor a range such as 8-15")
    first, last = int(match[1]), int(match[2])
    if last < first:
        raise mistake(f"{shown(item)} is backwards; write {last}-{first}")
    return range(first, last + 1)


Ranges = Annotated[tuple[Any, ...], reads(ranges, "a number, a range, or a list of both", "8-15")]
