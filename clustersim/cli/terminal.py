"""What reaches the terminal? Text as it is, control characters as escapes, and the styles that this program sets.

Whatever is printed while a command runs goes through an `EscapingStream`; consoles of rich write past it, and escape
the text of their segments, so that only their own codes are sent.
"""

import io
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TextIO, TypeVar, cast

from clustersim.common.control_characters import escape_controls
from clustersim.common.memory_limit import watched_memory

if TYPE_CHECKING:
    from rich.console import Console

P = ParamSpec("P")
T = TypeVar("T")


class EscapingStream(io.TextIOBase):
    """A text stream whose control characters are written as escapes. raw: the stream that is written."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str, /) -> int:
        """Write text; return its length."""
        self.raw.write(escape_controls(text))
        return len(text)

    def writable(self) -> bool:
        """It is."""
        return True

    def flush(self) -> None:
        """Flush what is written."""
        if not self.raw.closed:
            self.raw.flush()

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self.raw.isatty()

    def fileno(self) -> int:
        """The file descriptor."""
        return self.raw.fileno()

    def __getattr__(self, name: str) -> Any:
        """The encoding, the buffer and the like are those of the stream."""
        return getattr(self.raw, name)


@contextmanager
def escaped_streams() -> Iterator[None]:
    """Escape control characters in all that is printed in the block."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast("TextIO", EscapingStream(stream)) for stream in streams)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = streams


def with_escaped_streams(function: Callable[P, T]) -> Callable[P, T]:
    """The function, with all that it prints escaped."""

    @wraps(function)
    def call(*arguments: P.args, **keywords: P.kwargs) -> T:
        with escaped_streams(), watched_memory(_warn):
            return function(*arguments, **keywords)

    return call


def ended_by_closed_pipe(function: Callable[P, T]) -> Callable[P, T]:
    """The function, which ends the process as other tools end where the reader of its output is gone (`| head`)."""

    @wraps(function)
    def call(*arguments: P.args, **keywords: P.kwargs) -> T:
        try:
            return function(*arguments, **keywords)
        except BrokenPipeError:
            end_by_closed_pipe()

    return call


def end_by_closed_pipe() -> NoReturn:
    """End this process by SIGPIPE, or where there are no signals with status 1.

    Not by the signal's default action from the start on, which would end it silently where a worker process died, too.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout again when it exits
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.raise_signal(signal.SIGPIPE)
    raise SystemExit(1)


def _warn(sentence: str) -> None:
    print(f"warning: {sentence}", file=sys.stderr, flush=True)


def raw_stream(stream: TextIO) -> TextIO:
    """The stream below an `EscapingStream`."""
    return stream.raw if isinstance(stream, EscapingStream) else stream


def new_console(*, stderr: bool = False) -> "Console":
    """A console of rich that sends its own styles, and control characters of its text as escapes."""
    from rich.console import Console
    from rich.segment import Segment

    class SafeConsole(Console):
        """Escapes segments where they are written, after layout."""

        def _render_buffer(self, buffer: Iterable[Segment]) -> str:
            return super()._render_buffer(
                segment if segment.control else Segment(escape_controls(segment.text), segment.style)
                for segment in buffer
            )

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # `ended_by_closed_pipe` decides

    return SafeConsole(file=raw_stream(sys.stderr if stderr else sys.stdout), emoji=False)
