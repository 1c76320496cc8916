"""Where is the output written? Every requested output file is checked before any time is spent on simulating."""

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from clustersim.cli.terminal import new_console
from clustersim.common.control_characters import escape_controls
from clustersim.common.errors import ClusterSimError, InputError
from clustersim.common.files import require_writable, write_text_atomically

STDOUT: Final = "-"
EXIT_INTERRUPTED: Final = 130
"""Exit status of a command that Ctrl-C stopped; the results so far are written."""


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Options of trace files: ranks (empty: one of each equivalence class), and whether the size limit is lifted."""

    ranks: str = ""
    force: bool = False


@dataclass(frozen=True, slots=True)
class Outputs:
    """Output names as typed.

    json: a file or `-` for stdout; kineto: a directory; table: print a table; what_if: simulate what would help, as
    the page of a run always has it.
    """

    json: str | None = None
    html: str | None = None
    trace: str | None = None
    kineto: str | None = None
    spans: str | None = None
    trace_options: TraceOptions = TraceOptions()
    table: bool = True
    what_if: bool = False

    @property
    def file_paths(self) -> dict[str, Path]:
        """Option and path of every file that is written."""
        json = None if self.json == STDOUT else self.json
        targets = {"--json": json, "--html": self.html, "--trace": self.trace, "--spans": self.spans}
        return {option: Path(name) for option, name in targets.items() if name is not None}

    @property
    def trace_paths(self) -> dict[str, Path]:
        """Option and path of everything that is written span by span, directories included."""
        targets = {"--trace": self.trace, "--kineto": self.kineto, "--spans": self.spans}
        return {option: Path(name) for option, name in targets.items() if name is not None}

    def check_writable(self, inputs: Iterable[Path]) -> None:
        """Raise InputError or OutputError for outputs that cannot be written, or would overwrite an input."""
        self._check_names()
        for option, path in self.file_paths.items():
            require_writable(path)
            for input_path in inputs:
                if path.exists() and input_path.exists() and path.samefile(input_path):
                    raise InputError(f"{option} {path}: is one of the files that are read; name another")
        if len({path.resolve() for path in self.file_paths.values()}) < len(self.file_paths):
            raise InputError(f"{' and '.join(self.file_paths)} need different files")
        self._check_trace_paths()

    def _check_names(self) -> None:
        if self.json == "":
            raise InputError("--json needs the name of a file, or - for standard output")
        if self.html in ("", STDOUT):
            raise InputError("--html needs the name of a file, such as page.html")
        if self.kineto in ("", STDOUT):
            raise InputError("--kineto needs the name of a directory, such as traces")
        if self.trace_options != TraceOptions() and not self.trace_paths:
            raise InputError("--ranks and --force say how traces are written; name one (--trace, --kineto or --spans)")

    def _check_trace_paths(self) -> None:
        if self.trace is not None:
            from clustersim.report.export.perfetto import require_perfetto

            require_perfetto(self.trace)
        if self.spans is not None:
            from clustersim.report.export.table import table_writer

            table_writer(self.spans)
        if self.kineto is not None:
            self._check_kineto_folder(Path(self.kineto))

    def _check_kineto_folder(self, folder: Path) -> None:
        from clustersim.report.export.write_traces import require_kineto_directory

        require_kineto_directory(folder)
        for option, path in self.file_paths.items():
            if folder.resolve() in (path.resolve(), path.resolve().parent):
                raise InputError(f"{option} {path}: lies in --kineto {folder}, which is for traces alone; name another")


def print_error(error: ClusterSimError) -> None:
    """Print the error as one sentence on stderr."""
    print(f"error: {escape_controls(str(error))}", file=sys.stderr, flush=True)


def announce_file(path: str | Path, note: str = "") -> None:
    """Print that a file was written; on a terminal its name is a hyperlink."""
    if not sys.stdout.isatty():
        print(f"wrote {path}{note}")
        return
    from rich.style import Style
    from rich.text import Text

    link = Style(link=Path(path).resolve().as_uri())
    new_console().print(Text.assemble("wrote ", (str(path), link), note), soft_wrap=True)


def write_json(content: Mapping[str, Any], path: str) -> None:
    """Write plain data without NaN to a file atomically; `-` is standard output."""
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    if path == STDOUT:
        sys.stdout.write(text)
    else:
        write_text_atomically(path, text)
