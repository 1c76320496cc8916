"""How is an order of actions written as text?

The notation is torch.distributed.pipelining's: an action is stage, kind, microbatch (`0F0`, `2B1`), an order is a CSV
with one row per pipeline rank. Empty cells mean an idle step there; they are read and forgotten, since time is the
engine's answer and not the schedule's.
"""

import csv
import io
import re
from typing import Final

from clustersim.errors import InputError
from clustersim.program.action import Action, ActionKind, Order

_ACTION: Final = re.compile(r"(\d+)([FBIW])(\d+)")


def parse_action(text: str) -> Action:
    """Read one action; raise InputError that names the text.

    >>> parse_action("2B1")
    Action(stage=2, kind=<ActionKind.BACKWARD: 'B'>, microbatch=1)
    """
    match = _ACTION.fullmatch(text.strip())
    if match is None:
        raise InputError(f"{text!r} is not an action; write stage, F, B, I or W, and microbatch, such as '0F0'")
    return Action(int(match[1]), ActionKind(match[2]), int(match[3]))


def parse_order(text: str, source: str = "schedule") -> Order:
    """Read a CSV with one row per rank; `source` names it in errors, which count rows and cells from 1."""
    rows = csv.reader(io.StringIO(text))
    return tuple(_row(cells, f"{source}, row {number}") for number, cells in enumerate(rows, start=1))


def _row(cells: list[str], where: str) -> tuple[Action, ...]:
    actions = []
    for number, cell in enumerate(cells, start=1):
        if not cell.strip():
            continue
        try:
            actions.append(parse_action(cell))
        except InputError as error:
            raise InputError(f"{where}, cell {number}: {error}") from error
    return tuple(actions)


def format_order(order: Order) -> str:
    """Write a CSV with one row per rank, without idle cells.

    >>> format_order(((Action(0, ActionKind.FORWARD, 0), Action(0, ActionKind.BACKWARD, 0)),))
    '0F0,0B0\\n'
    """
    return "".join(",".join(map(str, actions)) + "\n" for actions in order)
