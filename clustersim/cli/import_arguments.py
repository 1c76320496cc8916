"""What does `clustersim import` do?

Convert another program's arguments to a scenario, listing what they leave open.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from clustersim.cli.outputs import STDOUT, announce_file
from clustersim.common.data_files import read_text
from clustersim.common.errors import InputError, suggest_nearest
from clustersim.common.files import require_writable, write_text_atomically
from clustersim.interop.registry import IMPORTERS
from clustersim.scenario import Scenario
from clustersim.scenario.overrides import apply_overrides


def import_scenario(
    program: str, file: Path, overrides: Sequence[str], cluster: str, gpus: int | None, out: str
) -> None:
    """Read, check and write the scenario; ignored arguments and assumptions are listed on stderr."""
    if program not in IMPORTERS:
        raise InputError(f"{program!r} is no program whose arguments are read; {suggest_nearest(program, IMPORTERS)}")
    if out != STDOUT:
        require_writable(out)
        if Path(out).exists() and file.exists() and Path(out).samefile(file):
            raise InputError(f"--out {out}: is the file that is read; name another")
    imported = IMPORTERS[program](read_text(file), str(file), cluster, gpus)
    mapping = apply_overrides({**imported.mapping, "name": file.stem}, overrides)
    scenario = Scenario.from_mapping(mapping, default_name=str(file))
    text = yaml.safe_dump(mapping, sort_keys=False, default_flow_style=False, width=120)
    remarks = [f"assumed: {assumption}" for assumption in imported.assumptions]
    remarks += (
        [f"passed over, as no key says it: {', '.join(imported.ignored_arguments)}"]
        if imported.ignored_arguments
        else []
    )
    for remark in (*remarks, *scenario.warnings):
        print(f"note: {remark}", file=sys.stderr)
    if out == STDOUT:
        sys.stdout.write(text)
    else:
        write_text_atomically(out, text)
        announce_file(out)
