"""How is an order of actions written as text?

The notation is torch.distributed.pipelining's: an action is stage, kind, microbatch (`0F0`, `2B1`, `2I1`,
`2W1`), an order is a CSV with one row per pipeline rank. Empty cells mean an idle step there; they are read
and discarded, since times are computed by the engine and not given by the schedule. So are the actions that
torch's `compute_comms` form adds (`0SEND_F0`, `1RECV_B2`, `0UNSHARD`, `0RESHARD`, `0REDUCE_GRAD`): what is
sent, gathered and reduced when follows from the order of passes, the placement and the layout. A pair
`(0F3;3B1)OVERLAP_F_B` is one schedule entry. Reference: torch.distributed.pipelining.schedules, `_Action` and
`_PipelineScheduleRuntime._load_csv`.
"""

import re
from dataclasses import dataclass
from typing import Final

from clustersim.common import input_files
from clustersim.common.errors import InputError, format_value
from clustersim.program.action import Action, ActionKind, OverlappedPair, PipelineOrder, ScheduleEntry

_ACTION: Final = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")
_TORCH_2_5: Final = re.compile(r"\d{1,9}BW\d{1,9}")
_ALPHABET: Final = "0-9A-Z_(); "
_COMM_ACTION: Final = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")
_OVERLAPPED_PAIR: Final = re.compile(r"\(([^;]*);([^;]*)\)OVERLAP_F_B")


@dataclass(frozen=True, slots=True)
class ParsedOrder:
    """A parsed order with source locations.

    label: its name in errors; cells: [ranks][entries] CSV cell of each, from 0.
    """

    label: str
    order: PipelineOrder
    cells: tuple[tuple[int, ...], ...]

    def rank_label(self, rank: int) -> str:
        """Location of a rank's row, counted from 1."""
        return f"{self.label}, row {rank + 1}"

    def entry_label(self, rank: int, entry_index: int) -> str:
        """Location of an entry's cell, counted from 1."""
        return f"{self.rank_label(rank)}, cell {self.cells[rank][entry_index] + 1}"


def parse_action(text: str) -> Action:
    """Read one action; raise InputError that names the text.

    >>> parse_action("2B1")
    Action(stage=2, kind=<ActionKind.BACKWARD: 'B'>, microbatch=1)
    """
    match = _ACTION.fullmatch(text.strip())
    if match is None and _TORCH_2_5.fullmatch(text.strip()):
        raise InputError(
            f"{format_value(text)} is PyTorch 2.5's notation; since 2.6 a full backward is B, not BW, and the one of "
            "inputs I, not B"
        )
    if match is None:
        raise InputError(
            f"{format_value(text)} is not an action; write stage, F, B, I or W, and microbatch, such as '0F0'"
        )
    return Action(int(match[1]), ActionKind(match[2]), int(match[3]))


def parse_csv(text: str, source: str) -> ParsedOrder:
    """Read a CSV with one row per rank, with the location of each entry. Blank lines at its end are ignored.

    source: its name in errors, which count rows and cells from 1.
    """
    try:
        numbered_rows = input_files.parse_csv(text)
    except InputError as error:
        raise InputError(f"{source}: {error}") from error
    rows = [row for _, row in numbered_rows]
    while rows and not rows[-1]:
        rows.pop()
    parsed_rows = [_parse_row(cells, f"{source}, row {row_number}") for row_number, cells in enumerate(rows, start=1)]
    order = tuple(tuple(step for _, step in row) for row in parsed_rows)
    return ParsedOrder(source, order, tuple(tuple(cell for cell, _ in row) for row in parsed_rows))


def parse_entry(text: str) -> ScheduleEntry:
    """Read one action or an overlapped pair; raise InputError that names the text.

    >>> str(parse_entry("(0F3;3B1)OVERLAP_F_B"))
    '(0F3;3B1)OVERLAP_F_B'
    """
    match = _OVERLAPPED_PAIR.fullmatch(text.strip())
    if match is None:
        return parse_action(text)
    pair = OverlappedPair(parse_action(match[1]), parse_action(match[2]))
    if (pair.forward.kind, pair.backward.kind) != (ActionKind.FORWARD, ActionKind.BACKWARD):
        raise InputError(
            f"{format_value(text)} is no pair; write a forward and a backward, such as '(0F3;3B1)OVERLAP_F_B'"
        )
    return pair


def _parse_row(cells: list[str], label: str) -> list[tuple[int, ScheduleEntry]]:
    """Schedule entries of a row, with their cell indices."""
    entries: list[tuple[int, ScheduleEntry]] = []
    for cell, text in enumerate(cells):
        if not text.strip() or _COMM_ACTION.fullmatch(text.strip()):
            continue
        try:
            entries.append((cell, parse_entry(text)))
        except InputError as error:
            quoted = input_files.quote_cell(text, _ALPHABET)
            reason = str(error) if quoted.startswith("'") else f"{quoted} is not an action, such as '0F0'"
            raise InputError(f"{label}, cell {cell + 1}: {reason}") from error
    return entries


def format_order(order: PipelineOrder) -> str:
    """Write a CSV with one row per rank, without idle cells.

    >>> format_order(((Action(0, ActionKind.FORWARD, 0), Action(0, ActionKind.BACKWARD, 0)),))
    '0F0,0B0\\n'
    """
    return "".join(",".join(map(str, actions)) + "\n" for actions in order)
