"""Pipeline orders in tests: read from text, and how many microbatches they hold."""

from itertools import accumulate

from clustersim.program.action import ActionKind, PipelineOrder, flatten_entries
from clustersim.schedules.csv_format import parse_csv

_HELD_FROM_PASS = {
    ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1, ActionKind.INPUT_GRADIENT: 0, ActionKind.WEIGHT_GRADIENT: -1,
}  # fmt: skip


def parse_order(text: str, source: str = "schedule") -> PipelineOrder:
    return parse_csv(text, source).order


def peak_in_flight_microbatches(order: PipelineOrder) -> tuple[int, ...]:
    """For each rank the peak number of (stage, microbatch) activations held at once, from `F` to `B` or `W`."""
    return tuple(
        max(accumulate(_HELD_FROM_PASS[action.kind] for action in flatten_entries(entries)), default=0)
        for entries in order
    )
