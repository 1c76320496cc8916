"""How is what a search found out kept, so that nothing is lost when it is killed?

One file, `layouts.jsonl`, to which a line is added for some layouts as soon as they were weighed, and for each as soon
as it was simulated, and written to the disk. Its first line tells the search from others. A line that was cut off is
dropped. At the end what was simulated is there as a table, too, where pyarrow is installed: `layouts.parquet`.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Final

from clustersim.analysis.search import Found, Layout, layout_of, plain
from clustersim.errors import InputError, OutputError
from clustersim.planning.search.space import Candidate
from clustersim.planning.search.weighing import Weighed

NAME: Final = "layouts.jsonl"
TABLE: Final = "layouts.parquet"


class Store:
    """What a search has found out so far: full are layouts that do not fit. lines: where it is kept, None: nowhere."""

    def __init__(self, lines: IO[str] | None = None) -> None:
        self.weighed: dict[Candidate, Weighed] = {}
        self.layouts: dict[Candidate, Layout] = {}
        self.full: set[Candidate] = set()
        self._lines = lines

    @classmethod
    @contextmanager
    def opened(cls, folder: Path | None, search: Mapping[str, Any]) -> Iterator["Store"]:
        """Begin, or go on with what the folder has; raise InputError where that is another search."""
        if folder is None:
            yield cls()
            return
        path, told = folder / NAME, _name(search)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            known = _read(path, told) if path.exists() else []
            whole = "".join(f"{json.dumps(each, separators=(',', ':'))}\n" for each in [{"search": told}, *known])
            part = path.with_suffix(".part")
            part.write_text(whole, encoding="utf-8")  # without a line that was cut off
            part.replace(path)
            lines = path.open("a", encoding="utf-8")
        except OSError as error:
            raise OutputError(f"{path}: cannot be written ({error.strerror})") from error
        with lines:
            store = cls(lines)
            for each in known:
                store._remember(each)
            yield store

    def add(self, candidate: Candidate, layout: Layout | None) -> None:
        """Keep a simulated layout; None: it does not fit."""
        self._keep({"full": [candidate.job, candidate.overrides]} if layout is None else {"layout": plain(layout)})

    def add_weighed(self, weighed: Sequence[Weighed]) -> None:
        """Keep what is known of layouts before they are simulated."""
        rows = [[each.candidate.job, each.candidate.overrides, each.bound, each.said] for each in weighed]
        self._keep({"weighed": rows})

    def write_table(self, found: Found) -> None:
        """Keep what a search found as a table, where there is a folder to keep it in, and pyarrow."""
        if self._lines is None or find_spec("pyarrow") is None:
            return
        path = Path(self._lines.name).with_name(TABLE)
        part = path.with_suffix(".part")
        import_module("pyarrow.parquet").write_table(found.to_arrow(), part)
        part.replace(path)

    def _keep(self, content: dict[str, Any]) -> None:
        self._remember(content)
        if self._lines is not None:
            self._lines.write(json.dumps(content, separators=(",", ":")) + "\n")
            self._lines.flush()
            os.fsync(self._lines.fileno())

    def _remember(self, content: dict[str, Any]) -> None:
        for job, overrides, bound, said in content.get("weighed", ()):
            candidate = Candidate(tuple(overrides), job)
            self.weighed[candidate] = Weighed(candidate, bound, said)
        if "full" in content:
            job, overrides = content["full"]
            self.full.add(Candidate(tuple(overrides), job))
        if "layout" in content:
            layout = layout_of(content["layout"])
            self.layouts[Candidate(layout.overrides, layout.job)] = layout


def _name(search: Mapping[str, Any]) -> str:
    return sha256(json.dumps(search, sort_keys=True, default=str).encode()).hexdigest()


def _read(path: Path, told: str) -> list[dict[str, Any]]:
    """The lines behind the first; raise InputError where that names another search."""
    lines = path.read_text(encoding="utf-8").splitlines()
    whole = [content for content in map(_content, lines) if content is not None]
    if not whole or whole[0].get("search") != told:
        raise InputError(
            f"{path}: is of another search (its scenario, what varies or what is the best differs); name another folder"
        )
    return whole[1:]


def _content(line: str) -> dict[str, Any] | None:
    try:
        content = json.loads(line)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None
