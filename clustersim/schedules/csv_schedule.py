"""In which order does a pipeline work whose order somebody wrote down? As the list says, action by action.

What torch.distributed.pipelining dumps, other software generates or a researcher writes by hand. A list is for as many
pipeline ranks as it has rows and for as many microbatches as it names, and for no others. Which rank holds which stage
is what the rows say, since each stage's passes stand in one row; a placement beside the list must say the same, and is
for lists that are to be checked.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from clustersim.common.errors import InputError
from clustersim.program.action import PipelineOrder, flatten_entries, flatten_entry
from clustersim.program.placement import Placement
from clustersim.schedules.csv_format import ParsedOrder, format_order
from clustersim.schedules.validation import validate_order


@dataclass(frozen=True, slots=True)
class CsvSchedule:
    """An order that keeps the rules. name: of the file, or what the list is called; stages: on which rank each is."""

    name: str
    rank_entries: PipelineOrder
    stage_placement: Placement

    @property
    def microbatches(self) -> int:
        """How many microbatches it orders."""
        return _count_microbatches(self.rank_entries)

    @property
    def csv_lines(self) -> tuple[str, ...]:
        """The rows in torch's notation."""
        return tuple(format_order(self.rank_entries).splitlines())

    def placement(self, ranks: int) -> Placement:
        """Where the list has its stages; raise InputError for another number of ranks."""
        if ranks != self.stage_placement.pipeline_size:
            row_label = _format_count(self.stage_placement.pipeline_size, "row")
            raise InputError(
                f"{self.name} has {row_label}, one for each pipeline rank, but layout.pp is {ranks}; "
                f"pp {self.stage_placement.pipeline_size} fits"
            )
        return self.stage_placement

    def require_supported(self, ranks: int, microbatches: int) -> None:
        """Raise InputError unless the numbers are the list's own."""
        self.placement(ranks)
        if microbatches != self.microbatches:
            raise InputError(
                f"{self.name} is for {_format_count(self.microbatches, 'microbatch', 'es')}, but each replica has "
                f"{microbatches}; training.global_batch {self.microbatches} x dp x training.microbatch fits"
            )

    def order(self, ranks: int, microbatches: int) -> PipelineOrder:
        """The list; raise InputError as `require` does."""
        self.require_supported(ranks, microbatches)
        return self.rank_entries


def csv_schedule(name: str, parsed: ParsedOrder, stages: Sequence[int] | None = None) -> CsvSchedule:
    """The schedule of a list. stages: [stages] on which row each is, counted from 0; None: where its actions are.

    Raises InputError that names the row and cell of what breaks the rules of `rules.validate_order`.
    """
    if not parsed.order:
        raise InputError(f"{parsed.label} has no rows; write one for each pipeline rank, such as 0F0,0B0")
    placement = _placement(parsed, _find_stage_ranks(parsed) if stages is None else stages)
    validate_order(parsed.order, placement=placement, microbatches=_count_microbatches(parsed.order), labels=parsed)
    return CsvSchedule(name, parsed.order, placement)


def _placement(parsed: ParsedOrder, stages: Sequence[int]) -> Placement:
    try:
        placement = Placement(tuple(stages))
    except InputError as error:
        raise InputError(f"{parsed.label}: {error}") from error
    if placement.pipeline_size != len(parsed.order):
        row_label = _format_count(len(parsed.order), "row")
        raise InputError(
            f"{parsed.label} has {row_label}, but its placement is on {placement.pipeline_size} pipeline ranks"
        )
    return placement


def _find_stage_ranks(parsed: ParsedOrder) -> list[int]:
    """In which row each stage's actions are."""
    first_entry: dict[int, tuple[int, int]] = {}
    for rank, entries in enumerate(parsed.order):
        for entry_index, action in (
            (entry_index, action) for entry_index, entry in enumerate(entries) for action in flatten_entry(entry)
        ):
            first_rank, first_index = first_entry.setdefault(action.stage, (rank, entry_index))
            if first_rank != rank:
                raise InputError(
                    f"{parsed.entry_label(rank, entry_index)}: {action} is of stage {action.stage}, which row {first_rank + 1} has "
                    f"(cell {parsed.cells[first_rank][first_index] + 1}); a stage is on one pipeline rank"
                )
    for rank, entries_of_rank in enumerate(parsed.order):
        if not entries_of_rank:
            raise InputError(f"{parsed.rank_label(rank)} has no actions; every pipeline rank holds a stage")
    missing = next((stage for stage in range(len(first_entry)) if stage not in first_entry), None)
    if missing is not None:
        last = max(first_entry)
        raise InputError(
            f"{parsed.entry_label(*first_entry[last])}: stage {last} is unknown, as no row has stage {missing}; "
            f"stages are numbered from 0 without gaps"
        )
    return [first_entry[stage][0] for stage in range(len(first_entry))]


def _count_microbatches(order: PipelineOrder) -> int:
    return 1 + max((action.microbatch for entries in order for action in flatten_entries(entries)), default=-1)


def _format_count(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{plural if count != 1 else ''}"
