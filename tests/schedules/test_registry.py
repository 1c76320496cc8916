"""Schedules by name."""

import pytest

from clustersim.common.errors import InputError
from clustersim.schedules.breadth_first import BreadthFirst
from clustersim.schedules.dual_pipe import DualPipe
from clustersim.schedules.dual_pipe_v import DualPipeV
from clustersim.schedules.gpipe import GPipe
from clustersim.schedules.interleaved import Interleaved
from clustersim.schedules.one_f_one_b import OneFOneB
from clustersim.schedules.registry import SCHEDULE_NAMES, build_schedule
from clustersim.schedules.zero_bubble import ZeroBubble
from clustersim.schedules.zero_bubble_v import ZeroBubbleV


def test_every_name_builds_the_schedule_of_that_name() -> None:
    assert [build_schedule(name).name for name in SCHEDULE_NAMES] == list(SCHEDULE_NAMES)
    assert [build_schedule(name) for name in SCHEDULE_NAMES] == [
        GPipe(), OneFOneB(), ZeroBubble(1), ZeroBubble(2), ZeroBubbleV(), DualPipeV(), DualPipe(),
        Interleaved(2), BreadthFirst(2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "chunks", "sentence"),
    [
        ("interleave", 2, "did you mean interleaved"),
        ("", None, "one of 1f1b, bfs, dualpipe, dualpipev, gpipe, interleaved, zb-1p, zb-2p, zb-v"),
        ("zb-h1", None, "did you mean zb-1p"),
        ("zb-2p", 2, r"schedule zb-2p.*model chunks per rank; interleaved and bfs take 2"),
        ("1f1b", 2, "schedule 1f1b leaves no choice"),
        ("gpipe", 0, "schedule gpipe leaves no choice"),
        ("interleaved", 1, "with 1 it is 1f1b"),
        ("interleaved", 0, "at least 2 model chunks"),
        ("bfs", 1, "with 1 it is gpipe"),
    ],
)
def test_a_wrong_name_or_number_of_chunks_is_refused(name: str, chunks: int | None, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        build_schedule(name, chunks)
