"""What does `clustersim import` do?

Convert another program's arguments to a scenario, listing what they leave open.
"""

import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import yaml

from clustersim.cli.outputs import STDOUT, announce_file
from clustersim.common.data_files import read_text
from clustersim.common.errors import InputError, suggest_nearest
from clustersim.common.files import require_writable, write_text_atomically
from clustersim.hardware.cluster import load_cluster
from clustersim.interop.detect import AUTO, detect_program
from clustersim.interop.import_result import ImportContext
from clustersim.interop.machines import MACHINE_READERS, import_machine
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
    if program != AUTO and program not in (*IMPORTERS, *MACHINE_READERS):
        names = (AUTO, *IMPORTERS, *MACHINE_READERS)
        raise InputError(f"{program!r} is no program whose arguments are read; {suggest_nearest(program, names)}")
    if out != STDOUT:
        require_writable(out)
        if Path(out).exists() and file.exists() and Path(out).samefile(file):
            raise InputError(f"--out {out}: is the file that is read; name another")
    overridden = tuple(override.partition("=")[0].strip() for override in overrides)
    context = ImportContext(file.parent, dict(map(_definition, definitions)), overridden)
    text = _read(file)
    name = detect_program(text, str(file)) if program == AUTO else program
    if name in MACHINE_READERS:
        _import_machine(name, text, file, (*overrides, *definitions), cluster, gpus, out, is_detected=program == AUTO)
        return
    imported = IMPORTERS[name](text, str(file), cluster, gpus, context)
    mapping = apply_overrides({**imported.mapping, "name": file.stem}, overrides)
    scenario = Scenario.from_mapping(mapping, default_name=str(file))
    text = yaml.safe_dump(mapping, sort_keys=False, default_flow_style=False, width=120)
    remarks = [f"is read as {name}'s"] if program == AUTO else []
    remarks += [f"assumed: {assumption}" for assumption in imported.assumptions]
    remarks += (
        [f"ignored, as scenarios have no such key: {', '.join(imported.ignored_arguments)}"]
        if imported.ignored_arguments
        else []
    )
    _write(text, (*remarks, *scenario.warnings), out)


def _import_machine(
    kind: str,
    text: str,
    file: Path,
    settings: Sequence[str],
    cluster: str,
    gpus: int | None,
    out: str,
    *,
    is_detected: bool,
) -> None:
    """Write the cluster file of a machine, once it is read back; settings are of scenarios, so there are none here."""
    if settings:
        raise InputError(f"{settings[0]}: is a setting of scenarios, and {file} is a machine; edit what is written")
    imported = import_machine(kind, text, str(file), cluster, gpus)
    written = yaml.safe_dump(dict(imported.content), sort_keys=False, default_flow_style=None, width=120)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{file.stem or 'machine'}.yaml"
        path.write_text(written, encoding="utf-8")
        try:
            load_cluster(str(path), gpus)
        except InputError as error:
            raise InputError(f"{file}: {str(error).replace(f'{path}: ', '')}") from None
    remarks = [f"is read as {kind}'s, and written as a cluster file, for --cluster and cluster:"] if is_detected else []
    _write(written, (*remarks, *imported.remarks), out)


def _write(text: str, remarks: Sequence[str], out: str) -> None:
    for remark in remarks:
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
