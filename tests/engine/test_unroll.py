"""Unrolling of repeated periods, nested repetitions included."""

import numpy as np

from clustersim.engine.recording.unroll import (
    EVENT_KEY_STRIDE,
    SPANS,
    LogSizes,
    Repetition,
    UnrolledLog,
    unroll_predecessors,
)


def make_repetition(begin: int, end: int, logged: int, times: int, seconds: float) -> Repetition:
    """A repetition of one rank, one task per event."""
    tasks, first_task = np.array([end - begin]), np.array([begin])
    return Repetition(
        LogSizes(begin, 0, 0), LogSizes(end, 0, 0), LogSizes(logged, 0, 0), times, seconds, tasks, first_task
    )


def unroll_repetitions(logged: int, *repetitions: Repetition) -> UnrolledLog:
    return UnrolledLog.from_repetitions(repetitions, np.zeros(logged, dtype=np.int64), SPANS)


def test_repeated_events_are_shifted_in_time() -> None:
    """Events a b c d e f, of which c d are repeated twice more, a second later each time."""
    result = unroll_repetitions(6, make_repetition(2, 4, 4, times=2, seconds=1.0))
    assert result.source_index.tolist() == [0, 1, 2, 3, 2, 3, 2, 3, 4, 5]
    assert result.time_offset.tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert result.task_offset.tolist() == [0, 0, 0, 0, 2, 2, 4, 4, 0, 0]


def test_nested_repetitions() -> None:
    """Events a b b' b'' c, then all of it from b on once more; b has a period of 1 s, all of it one of 5 s."""
    result = unroll_repetitions(
        4, make_repetition(1, 2, 2, times=2, seconds=1.0), make_repetition(1, 5, 3, times=1, seconds=5.0)
    )
    assert result.source_index.tolist() == [0, 1, 1, 1, 2, 1, 1, 1, 2, 3]
    assert result.time_offset.tolist() == [0, 0, 1, 2, 2, 5, 6, 7, 7, 7]
    assert result.task_offset.tolist() == [0, 0, 1, 2, 0, 4, 5, 6, 4, 0]


def test_causes_stay_in_their_period_or_precede_it() -> None:
    """Rank 1 repeats tasks 4 and 5. Each waits for the task before it; another rank's task 2 waits for its task 0."""
    tasks, first_task = np.array([1, 2]), np.array([2, 4])
    repetition = Repetition(LogSizes(2, 0, 0), LogSizes(5, 0, 0), LogSizes(5, 0, 0), 2, 1.0, tasks, first_task)
    offset = EVENT_KEY_STRIDE
    logged_causes = [-1, offset + 2, offset + 3, offset + 4, 0]
    causes = unroll_predecessors([repetition], np.array([*logged_causes, *[-1] * 6]))
    assert causes[5:].tolist() == [offset + 5, offset + 6, 0, offset + 7, offset + 8, 0]


def test_events_without_a_cause_stay_without_one() -> None:
    (repetition,) = (make_repetition(0, 1, 1, times=1, seconds=1.0),)
    assert repetition.shift_event_keys(np.array([-1, 0]), 1).tolist() == [-1, 1]
