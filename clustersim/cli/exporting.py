"""What does `clustersim export` do? Write a scenario in another program's arguments, and say what they leave out."""

import sys
from collections.abc import Sequence
from pathlib import Path

from clustersim.cli.outputs import STDOUT, announce
from clustersim.errors import InputError, nearest
from clustersim.foreign.exported import export
from clustersim.foreign.programs import WRITERS
from clustersim.report.files import require_writable, write_text_atomically
from clustersim.scenario import Scenario


def export_scenario(program: str, file: Path, overrides: Sequence[str], out: str) -> None:
    """Read, write and read again; what the arguments do not say is said in them and on stderr."""
    if program not in WRITERS:
        raise InputError(f"{program!r} is no program whose arguments are written; {nearest(program, WRITERS)}")
    if out != STDOUT:
        require_writable(out)
        if Path(out).exists() and file.exists() and Path(out).samefile(file):
            raise InputError(f"--out {out}: is the file that is read; name another")
    found = export(Scenario.load(file, overrides), WRITERS[program])
    for each in found.remarks:
        print(f"note: not said: {each}", file=sys.stderr)
    if out == STDOUT:
        sys.stdout.write(found.text)
    else:
        write_text_atomically(out, found.text)
        announce(out)
