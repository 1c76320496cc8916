"""What does a signal do to this process?"""

import signal
from contextlib import suppress


def raise_interrupt_on_sigterm() -> None:
    """Make SIGTERM end this process as Ctrl-C does, once: what is written so far is kept or removed; the next kills."""

    def interrupt(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise KeyboardInterrupt

    with suppress(ValueError):  # not the main thread: signals are not ours
        signal.signal(signal.SIGTERM, interrupt)
