"""Registry of pipeline schedules by name.

A new schedule is one new file in this package and one line here.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Final

from clustersim.common.errors import InputError, suggest_nearest
from clustersim.schedules.breadth_first import BreadthFirst
from clustersim.schedules.dual_pipe import DualPipe
from clustersim.schedules.dual_pipe_v import DualPipeV
from clustersim.schedules.gpipe import GPipe
from clustersim.schedules.interleaved import Interleaved
from clustersim.schedules.one_f_one_b import OneFOneB
from clustersim.schedules.schedule import Schedule
from clustersim.schedules.zero_bubble import ZeroBubble
from clustersim.schedules.zero_bubble_v import ZeroBubbleV

_ZERO_BUBBLE: Final = {f"zb-{memory}p": partial(ZeroBubble, memory) for memory in (1, 2)}
_FIXED_SCHEDULES: Final[Mapping[str, Callable[[], Schedule]]] = MappingProxyType(
    {
        GPipe.name: GPipe,
        OneFOneB.name: OneFOneB,
        **_ZERO_BUBBLE,
        ZeroBubbleV.name: ZeroBubbleV,
        DualPipeV.name: DualPipeV,
        DualPipe.name: DualPipe,
    }
)
_CHUNKED_SCHEDULES: Final[Mapping[str, Callable[[int], Schedule]]] = MappingProxyType(
    {Interleaved.name: Interleaved, BreadthFirst.name: BreadthFirst}
)
CHUNKED_SCHEDULES: Final = tuple(_CHUNKED_SCHEDULES)
"""Schedules with a free number of model chunks per rank."""
SCHEDULE_NAMES: Final = (*_FIXED_SCHEDULES, *_CHUNKED_SCHEDULES)


def build_schedule(name: str, chunks: int | None = None) -> Schedule:
    """The schedule of that name with that number of model chunks per rank; None: the smallest it supports.

    >>> build_schedule("interleaved", 4)
    Interleaved(chunks=4, microbatch_group_size=None)
    """
    if name in _CHUNKED_SCHEDULES:
        return _CHUNKED_SCHEDULES[name](2 if chunks is None else chunks)
    if name not in _FIXED_SCHEDULES:
        raise InputError(f"there is no schedule {name!r}; {suggest_nearest(name, SCHEDULE_NAMES)}")
    if chunks is not None:
        raise InputError(
            f"schedule {name} leaves no choice of model chunks per rank; {' and '.join(CHUNKED_SCHEDULES)} take "
            f"{chunks}"
        )
    return _FIXED_SCHEDULES[name]()
