"""Where do answers go? Every file that a command is asked to write is checked before time is spent on an answer."""

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from clustersim.errors import InputError
from clustersim.report.files import require_writable, write_text_atomically

STDOUT: Final = "-"
_TRACES: Final = (".json", ".pftrace", ".perfetto-trace", "")


@dataclass(frozen=True, slots=True)
class Outputs:
    """Names as they were typed. json: a file or `-` for stdout; table: print one."""

    json: str | None = None
    html: str | None = None
    trace: str | None = None
    table: bool = True

    @property
    def files(self) -> dict[str, Path]:
        """Option and path of every file that is written."""
        wanted = {"--json": None if self.json == STDOUT else self.json, "--html": self.html, "--trace": self.trace}
        return {option: Path(name) for option, name in wanted.items() if name is not None}

    @property
    def drawn(self) -> bool:
        """Whether a table or a page is asked for."""
        return self.table or self.html is not None

    def require(self, inputs: Iterable[Path]) -> None:
        """Raise InputError or OutputError for what cannot be written, or would replace one of the inputs."""
        self._require_names()
        for option, path in self.files.items():
            require_writable(path)
            for read in inputs:
                if path.exists() and read.exists() and path.samefile(read):
                    raise InputError(f"{option} {path}: is one of the files that are read; name another")
        if len({path.resolve() for path in self.files.values()}) < len(self.files):
            raise InputError(f"{' and '.join(self.files)} need different files")
        if self.trace is not None and Path(self.trace).suffix != ".json":
            from clustersim.report.perfetto import require_perfetto

            require_perfetto()

    def _require_names(self) -> None:
        if self.json == "":
            raise InputError("--json needs the name of a file, or - for standard output")
        if self.html in ("", STDOUT):
            raise InputError("--html needs the name of a file, such as page.html")
        if self.trace is not None and (self.trace in ("", STDOUT) or Path(self.trace).suffix not in _TRACES):
            raise InputError(
                f"--trace {self.trace}: name a file that ends in .json (Chrome) or in .pftrace, .perfetto-trace or "
                "nothing (Perfetto)"
            )


def write_json(content: Mapping[str, Any], path: str) -> None:
    """Write plain data without NaN to a file, wholly or not at all; `-` is standard output."""
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    if path == STDOUT:
        sys.stdout.write(text)
    else:
        write_text_atomically(path, text)
