"""What is repeated is where it would have been written, repeats within repeats among it."""

import numpy as np

from clustersim.engine.recording.unroll import (
    EVENT_KEY_STRIDE,
    SPANS,
    LogSizes,
    Repetition,
    UnrolledLog,
    unroll_predecessors,
)


def repeat(begin: int, end: int, written: int, times: int, seconds: float) -> Repetition:
    """Of one rank, one task a row."""
    tasks, first = np.array([end - begin]), np.array([begin])
    return Repetition(LogSizes(begin, 0, 0), LogSizes(end, 0, 0), LogSizes(written, 0, 0), times, seconds, tasks, first)


def unrolled(written: int, *repeats: Repetition) -> UnrolledLog:
    return UnrolledLog.from_repetitions(repeats, np.zeros(written, dtype=np.int64), SPANS)


def test_rows_that_follow_are_as_they_were_written_but_later() -> None:
    """Rows a b c d e f, of which c d are there twice more, a second later each time."""
    found = unrolled(6, repeat(2, 4, 4, times=2, seconds=1.0))
    assert found.source_index.tolist() == [0, 1, 2, 3, 2, 3, 2, 3, 4, 5]
    assert found.time_offset.tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert found.task_offset.tolist() == [0, 0, 0, 0, 2, 2, 4, 4, 0, 0]


def test_repeats_within_what_is_repeated() -> None:
    """Rows a b b' b'' c, then all of it from b on once more; b has a period of 1 s, all of it one of 5 s."""
    found = unrolled(4, repeat(1, 2, 2, times=2, seconds=1.0), repeat(1, 5, 3, times=1, seconds=5.0))
    assert found.source_index.tolist() == [0, 1, 1, 1, 2, 1, 1, 1, 2, 3]
    assert found.time_offset.tolist() == [0, 0, 1, 2, 2, 5, 6, 7, 7, 7]
    assert found.task_offset.tolist() == [0, 0, 1, 2, 0, 4, 5, 6, 4, 0]


def test_what_allowed_a_start_is_in_its_own_period_or_there_already() -> None:
    """Rank 1 repeats tasks 4 and 5. Each waits for the task before it; another rank's task 2 waits for its task 0."""
    tasks, first = np.array([1, 2]), np.array([2, 4])
    twice = Repetition(LogSizes(2, 0, 0), LogSizes(5, 0, 0), LogSizes(5, 0, 0), 2, 1.0, tasks, first)
    own = EVENT_KEY_STRIDE
    written = [-1, own + 2, own + 3, own + 4, 0]
    found = unroll_predecessors([twice], np.array([*written, *[-1] * 6]))
    assert found[5:].tolist() == [own + 5, own + 6, 0, own + 7, own + 8, 0]


def test_rows_that_nothing_allowed_stay_so() -> None:
    (once,) = (repeat(0, 1, 1, times=1, seconds=1.0),)
    assert once.shift_event_keys(np.array([-1, 0]), 1).tolist() == [-1, 1]
