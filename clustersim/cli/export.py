"""What does `clustersim export` do?

Write a scenario as another program's arguments, with remarks on what they cannot express.

Or write its simulated step as execution traces (`export_chakra`).
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from clustersim.cli.outputs import STDOUT, announce_file
from clustersim.common.errors import InputError, suggest_nearest
from clustersim.common.files import require_writable, write_text_atomically
from clustersim.interop.export import export_scenario
from clustersim.interop.registry import EXPORTERS
from clustersim.scenario import Scenario

CHAKRA: Final = "chakra"


def export_for_program(program: str, file: Path, overrides: Sequence[str], out: str, *, force: bool) -> bool:
    """Write the input of another program; return whether the scenario fits in memory (True where not checked)."""
    if program == CHAKRA:
        from clustersim.cli.export_chakra import export_step

        return export_step(file, overrides, out, force=force)
    if program not in EXPORTERS:
        raise InputError(
            f"{program!r} is no program that is written for; {suggest_nearest(program, [CHAKRA, *EXPORTERS])}"
        )
    if force:
        raise InputError(f"--force is for execution traces (export {CHAKRA}); arguments of {program} are never large")
    _export_arguments(program, file, overrides, out)
    return True


def _export_arguments(program: str, file: Path, overrides: Sequence[str], out: str) -> None:
    """Export and write the arguments; what they cannot express is remarked in them and on stderr."""
    if out != STDOUT:
        require_writable(out)
        if Path(out).exists() and file.exists() and Path(out).samefile(file):
            raise InputError(f"--out {out}: is the file that is read; name another")
    exported = export_scenario(Scenario.load(file, overrides), EXPORTERS[program])
    for remark in exported.differences:
        print(f"note: not exported: {remark}", file=sys.stderr)
    if out == STDOUT:
        sys.stdout.write(exported.text)
    else:
        write_text_atomically(out, exported.text)
        announce_file(out)
