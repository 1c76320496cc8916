"""How was this command typed?"""

import shlex
from collections.abc import Sequence


def typed_command(argv: Sequence[str]) -> str:
    """The command as a user types it, whichever way it was started. argv: of the process."""
    return shlex.join(["clustersim", "calibrate", *argv[1 + (argv[1:2] == ["calibrate"]) :]])
