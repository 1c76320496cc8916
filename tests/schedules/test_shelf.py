"""Schedules by name."""

import pytest

from clustersim.errors import InputError
from clustersim.schedules.gpipe import GPipe
from clustersim.schedules.interleaved import Interleaved
from clustersim.schedules.one_f_one_b import OneFOneB
from clustersim.schedules.shelf import NAMES, schedule
from clustersim.schedules.zero_bubble import ZeroBubble


def test_every_name_makes_the_schedule_that_knows_itself_by_it() -> None:
    assert [schedule(name).name for name in NAMES] == list(NAMES)
    assert [schedule(name) for name in NAMES] == [GPipe(), OneFOneB(), ZeroBubble(1), ZeroBubble(2), Interleaved(2)]


@pytest.mark.parametrize(
    ("name", "chunks", "sentence"),
    [
        ("interleave", 2, "did you mean interleaved"),
        ("", None, "choose one of 1f1b, gpipe, interleaved, zb-1p, zb-2p"),
        ("zb-h1", None, "did you mean zb-1p"),
        ("zb-2p", 2, "schedule zb-2p has 1 model chunk per rank, not 2"),
        ("1f1b", 2, "1 model chunk per rank, not 2; interleaved takes more"),
        ("gpipe", 0, "1 model chunk per rank, not 0"),
        ("interleaved", 1, "with 1 it is 1f1b"),
        ("interleaved", 0, "at least 2 model chunks"),
    ],
)
def test_a_wrong_name_or_number_of_chunks_is_refused(name: str, chunks: int | None, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        schedule(name, chunks)
