"""What does `--limit SECONDS` do? It ends a command as Ctrl-C does, so that what is known by then is reported.

Where a command has nothing to report before its end, that is an error.
"""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Annotated, ParamSpec, TypeVar

import typer

from clustersim.common.errors import ClusterSimError

P = ParamSpec("P")
T = TypeVar("T")


class TimeLimitReached(KeyboardInterrupt):
    """The time of a command is over."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeLimitReached in the block, once, after this many seconds."""

    def expire(_number: int, _frame: object) -> None:
        raise TimeLimitReached(f"{seconds:g} s")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)


def _start_limit(context: typer.Context, seconds: float | None) -> float | None:
    if seconds is not None:
        if not hasattr(signal, "setitimer"):
            raise typer.BadParameter("this system has no timers")
        context.with_resource(time_limit(seconds))
    return seconds


Limit = Annotated[
    float | None,
    typer.Option(
        "--limit",
        metavar="SECONDS",
        min=0.001,
        callback=_start_limit,
        help="Stop after this time and report what is known by then, and what was cut.",
    ),
]


def report_cut(limit: float | None, progress: tuple[str, int, int | None]) -> None:
    """Print what a limit cut. progress: label, items done and total of the stage that it ended."""
    label, done, total = progress
    count = f", {done:,} of {total:,}" if total else f", {done:,}" if done else ""
    print(f"stopped after {limit:g} s (--limit): {label}{count}; the rest was cut", file=sys.stderr, flush=True)


def limit_as_error(function: Callable[P, T]) -> Callable[P, T]:
    """The function; a limit that it does not handle is a ClusterSimError."""

    @wraps(function)
    def call(*arguments: P.args, **keywords: P.kwargs) -> T:
        try:
            return function(*arguments, **keywords)
        except TimeLimitReached as limit:
            reason = f"stopped after {limit} (--limit), before there was anything to report"
            raise ClusterSimError(reason) from None

    return call
