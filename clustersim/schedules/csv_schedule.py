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
from clustersim.schedules.csv_format import Listing, format_order
from clustersim.schedules.validation import verify


@dataclass(frozen=True, slots=True)
class Listed:
    """An order that keeps the rules. name: of the file, or what the list is called; stages: on which rank each is."""

    name: str
    rows: PipelineOrder
    stages: Placement

    @property
    def microbatches(self) -> int:
        """How many microbatches it orders."""
        return _microbatches(self.rows)

    @property
    def lines(self) -> tuple[str, ...]:
        """The rows in torch's notation."""
        return tuple(format_order(self.rows).splitlines())

    def placement(self, ranks: int) -> Placement:
        """Where the list has its stages; raise InputError for another number of ranks."""
        if ranks != self.stages.pipeline_size:
            rows = _count(self.stages.pipeline_size, "row")
            raise InputError(
                f"{self.name} has {rows}, one for each pipeline rank, but layout.pp is {ranks}; "
                f"pp {self.stages.pipeline_size} fits"
            )
        return self.stages

    def require(self, ranks: int, microbatches: int) -> None:
        """Raise InputError unless the numbers are the list's own."""
        self.placement(ranks)
        if microbatches != self.microbatches:
            raise InputError(
                f"{self.name} is for {_count(self.microbatches, 'microbatch', 'es')}, but each replica has "
                f"{microbatches}; training.global_batch {self.microbatches} x dp x training.microbatch fits"
            )

    def order(self, ranks: int, microbatches: int) -> PipelineOrder:
        """The list; raise InputError as `require` does."""
        self.require(ranks, microbatches)
        return self.rows


def listed(name: str, listing: Listing, stages: Sequence[int] | None = None) -> Listed:
    """The schedule of a list. stages: [stages] on which row each is, counted from 0; None: where its actions are.

    Raises InputError that names the row and cell of what breaks the rules of `rules.verify`.
    """
    if not listing.order:
        raise InputError(f"{listing.whole} has no rows; write one for each pipeline rank, such as 0F0,0B0")
    placement = _placement(listing, _found(listing) if stages is None else stages)
    verify(listing.order, placement=placement, microbatches=_microbatches(listing.order), places=listing)
    return Listed(name, listing.order, placement)


def _placement(listing: Listing, stages: Sequence[int]) -> Placement:
    try:
        placement = Placement(tuple(stages))
    except InputError as error:
        raise InputError(f"{listing.whole}: {error}") from error
    if placement.pipeline_size != len(listing.order):
        rows = _count(len(listing.order), "row")
        raise InputError(
            f"{listing.whole} has {rows}, but its placement is on {placement.pipeline_size} pipeline ranks"
        )
    return placement


def _found(listing: Listing) -> list[int]:
    """In which row each stage's actions are."""
    first: dict[int, tuple[int, int]] = {}
    for rank, steps in enumerate(listing.order):
        for step, action in ((step, action) for step, item in enumerate(steps) for action in flatten_entry(item)):
            row, where = first.setdefault(action.stage, (rank, step))
            if row != rank:
                raise InputError(
                    f"{listing.step(rank, step)}: {action} is of stage {action.stage}, which row {row + 1} has "
                    f"(cell {listing.cells[row][where] + 1}); a stage is on one pipeline rank"
                )
    for rank, actions in enumerate(listing.order):
        if not actions:
            raise InputError(f"{listing.row(rank)} has no actions; every pipeline rank holds a stage")
    missing = next((stage for stage in range(len(first)) if stage not in first), None)
    if missing is not None:
        last = max(first)
        raise InputError(
            f"{listing.step(*first[last])}: stage {last} is unknown, as no row has stage {missing}; "
            f"stages are numbered from 0 without gaps"
        )
    return [first[stage][0] for stage in range(len(first))]


def _microbatches(order: PipelineOrder) -> int:
    return 1 + max((action.microbatch for steps in order for action in flatten_entries(steps)), default=-1)


def _count(number: int, word: str, plural: str = "s") -> str:
    return f"{number} {word}{plural if number != 1 else ''}"
