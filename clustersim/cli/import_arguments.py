"""What does `clustersim import` do?

Convert another program's arguments to a scenario, listing what they leave open.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import yaml

from clustersim.cli.outputs import STDOUT, announce_file
from clustersim.common.data_files import read_text
from clustersim.common.errors import InputError, suggest_nearest
from clustersim.common.files import require_writable, write_text_atomically
from clustersim.interop.detect import AUTO, detect_program
from clustersim.interop.import_result import ImportContext
from clustersim.interop.registry import IMPORTERS
from clustersim.scenario import Scenario
from clustersim.scenario.overrides import apply_overrides

_MAX_FILE: Final = 32_000_000
"""Bytes of a file; what a program prints when it starts has less than 1 MB."""


def import_scenario(
    program: str,
    file: Path,
    overrides: Sequence[str],
    definitions: Sequence[str],
    cluster: str,
    gpus: int | None,
    out: str,
) -> None:
    """Read, check and write the scenario; ignored arguments and assumptions are listed on stderr."""
    if program != AUTO and program not in IMPORTERS:
        names = (AUTO, *IMPORTERS)
        raise InputError(f"{program!r} is no program whose arguments are read; {suggest_nearest(program, names)}")
    if out != STDOUT:
        require_writable(out)
        if Path(out).exists() and file.exists() and Path(out).samefile(file):
            raise InputError(f"--out {out}: is the file that is read; name another")
    overridden = tuple(override.partition("=")[0].strip() for override in overrides)
    context = ImportContext(file.parent, dict(map(_definition, definitions)), overridden)
    text = _read(file)
    name = detect_program(text, str(file)) if program == AUTO else program
    imported = IMPORTERS[name](text, str(file), cluster, gpus, context)
    mapping = apply_overrides({**imported.mapping, "name": file.stem}, overrides)
    scenario = Scenario.from_mapping(mapping, default_name=str(file))
    text = yaml.safe_dump(mapping, sort_keys=False, default_flow_style=False, width=120)
    remarks = [f"is read as {name}'s"] if program == AUTO else []
    remarks += [f"assumed: {assumption}" for assumption in imported.assumptions]
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


def _definition(text: str) -> tuple[str, str]:
    """The name and the value of NAME=VALUE; a name is a variable's, or the number of a parameter."""
    name, separator, value = text.partition("=")
    if not separator or not re.fullmatch(r"[A-Za-z_]\w*|[1-9]\d?", name):
        raise InputError(f"--define {text}: is not NAME=VALUE, such as TP=8, or 1=8 for the script's first parameter")
    return name, value


def _read(file: Path) -> str:
    """The file's text; raises InputError for one that is larger than any program's arguments."""
    size = file.stat().st_size if file.is_file() else 0
    if size > _MAX_FILE:
        raise InputError(
            f"{file}: has {size / 1e6:,.0f} MB; arguments are at the beginning of a log, so give its first "
            f"{_MAX_FILE / 1e6:,.0f} MB"
        )
    return read_text(file)
