"""Interface between lowering and schedules: stage placement, and the order of passes on every pipeline rank."""

from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

from clustersim.common.errors import InputError
from clustersim.program.action import PipelineOrder
from clustersim.program.placement import Placement, looped_placement


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Costs of a microbatch's passes through a stage, in one unit of time.

    pending_memory_ratio: memory kept between `I` and `W`, relative to that between `F` and `I`; may exceed 1.
    """

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    pending_memory_ratio: float = 1.0


def require_positive(ranks: int, microbatches: int) -> None:
    """Raise InputError unless there is at least one pipeline rank and one microbatch."""
    if ranks < 1:
        raise InputError(f"a pipeline of {ranks} ranks cannot be scheduled; 1 is the fewest")
    if microbatches < 1:
        raise InputError(f"a pipeline cannot run {microbatches} microbatches; 1 is the fewest")


class ScheduleTraits:
    """What a schedule is asked about its order; these are the answers of one about which nothing is known.

    has_whole_backwards: no backward is split into the gradients of input and weights; is_periodic: each microbatch
    repeats a pattern of alternating forwards and backwards; is_bidirectional: two pipelines share the ranks;
    overlaps_passes: made for forwards that overlap backwards; may_pair_passes: it can have such pairs, if only in a
    pipeline of several chunks (needs_chunks_to_pair); takes_pass_costs: its order depends on how long passes take;
    ends_staggered: ranks start and end a step one by one; csv_lines: the rows of one that is a list of actions.
    """

    __slots__ = ()
    has_whole_backwards: ClassVar[bool] = False
    is_periodic: ClassVar[bool] = False
    is_bidirectional: ClassVar[bool] = False
    overlaps_passes: ClassVar[bool] = False
    may_pair_passes: ClassVar[bool] = False
    needs_chunks_to_pair: ClassVar[bool] = False
    takes_pass_costs: ClassVar[bool] = False

    def round_size(self, ranks: int) -> int:  # noqa: ARG002 - the same for any number of ranks
        """Number of microbatches that go through one chunk, then through the next one; 1: there are no rounds."""
        return 1

    def require_supported(self, ranks: int, microbatches: int) -> None:
        """Any positive numbers are supported."""
        require_positive(ranks, microbatches)

    def with_pass_costs(self, costs: PassCosts) -> Self:  # noqa: ARG002 - it takes none
        """The schedule for passes of these costs."""
        return self

    @property
    def ends_staggered(self) -> bool:
        """Whether ranks start and end a step one by one."""
        return False

    @property
    def csv_lines(self) -> tuple[str, ...]:
        """The rows in torch's notation of a schedule that is a list of actions; empty: it follows a rule."""
        return ()


class Schedule(Protocol):
    """A rule that places stages on pipeline ranks and orders forward and backward passes of microbatches on them.

    The number of stages per rank (chunks) follows from the placement. Schedules from outside the package come in
    through `csv_schedule` and `custom_schedule`.
    """

    has_whole_backwards: ClassVar[bool]
    is_periodic: ClassVar[bool]
    is_bidirectional: ClassVar[bool]
    overlaps_passes: ClassVar[bool]
    may_pair_passes: ClassVar[bool]
    needs_chunks_to_pair: ClassVar[bool]
    takes_pass_costs: ClassVar[bool]

    @property
    def name(self) -> str:
        """Name in scenarios and on pages."""

    def round_size(self, ranks: int) -> int:
        """See `ScheduleTraits`."""

    def with_pass_costs(self, costs: PassCosts) -> Self:
        """See `ScheduleTraits`."""

    @property
    def csv_lines(self) -> tuple[str, ...]:
        """See `ScheduleTraits`."""

    @property
    def ends_staggered(self) -> bool:
        """See `ScheduleTraits`."""

    def placement(self, ranks: int) -> Placement:
        """Pipeline rank of each stage, with this number of ranks; raise InputError where that is not supported."""

    def require_supported(self, ranks: int, microbatches: int) -> None:
        """Raise InputError where the schedule does not support these numbers of ranks and microbatches."""

    def order(self, ranks: int, microbatches: int) -> PipelineOrder:
        """The entries of every pipeline rank; raise InputError as `require_supported` does."""


class OneStagePerRank(ScheduleTraits):
    """Traits of a schedule of pipelines without chunks that supports any number of microbatches."""

    __slots__ = ()

    def placement(self, ranks: int) -> Placement:
        """One stage on each rank."""
        return looped_placement(ranks)
