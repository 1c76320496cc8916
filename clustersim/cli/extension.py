"""How does the command line run a package that it must not import?

`calibrate` imports clustersim (and torch), never the reverse. It provides its command as an entry point of
the group `clustersim.commands`, which is looked up when the command is typed.
"""

from collections.abc import Sequence
from importlib.metadata import entry_points

from clustersim.common.errors import InputError


def run_extension(name: str, arguments: Sequence[str]) -> int:
    """Run the command that an installed package provides under a name; return its exit status."""
    commands = entry_points(group="clustersim.commands", name=name)
    if not commands:
        raise InputError(f"nothing installed offers {name}; install clustersim again: pip install 'clustersim[{name}]'")
    status: int = next(iter(commands)).load()(list(arguments))
    return status
