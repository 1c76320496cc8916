"""How is what a search found out kept, so that nothing is lost when it is killed?

One file, `layouts.jsonl`, to which a line is added for some layouts as soon as they were weighed, and for each as soon
as it was simulated, and written to the disk. Its first line tells the search from others. A line that was cut off is
dropped. At the end what was simulated is there as a table, too, where pyarrow is installed: `layouts.parquet`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from clustersim.common.files import atomic_file
from clustersim.common.journal import Journal
from clustersim.planning.layouts.candidate_bounds import Weighed
from clustersim.planning.layouts.search_space import Candidate
from clustersim.results.search_result import Found, Layout, layout_of, plain

NAME: Final = "layouts.jsonl"
TABLE: Final = "layouts.parquet"


class Store:
    """What a search has found out so far. kept: the lines of it.

    estimates: layouts whose step is known from shorter ones; full: those that do not fit.
    """

    def __init__(self, kept: Journal) -> None:
        self.weighed: dict[Candidate, Weighed] = {}
        self.layouts: dict[Candidate, Layout] = {}
        self.estimates: dict[Candidate, Layout] = {}
        self.full: set[Candidate] = set()
        self._kept = kept
        for entry in kept.entries:
            self._remember(entry)

    @classmethod
    @contextmanager
    def opened(cls, folder: Path | None, search: Mapping[str, Any], files: Iterable[Path]) -> Iterator["Store"]:
        """Begin, or go on with what the folder has; raise InputError where that is another search, or reads others."""
        with Journal.open_or_resume(None if folder is None else folder / NAME, "search", search, files) as kept:
            yield cls(kept)

    def add(self, candidate: Candidate, layout: Layout | None) -> None:
        """Keep a simulated layout; None: it does not fit."""
        self._keep({"full": [candidate.job, candidate.overrides]} if layout is None else {"layout": plain(layout)})

    def add_weighed(self, weighed: Sequence[Weighed]) -> None:
        """Keep what is known of layouts before they are simulated."""
        rows = [[item.candidate.job, item.candidate.overrides, item.bound, item.said] for item in weighed]
        self._keep({"weighed": rows})

    def write_table(self, found: Found) -> None:
        """Keep what a search found as a table, where there is a folder to keep it in, and pyarrow."""
        if self._kept.path is None or find_spec("pyarrow") is None:
            return
        with atomic_file(self._kept.path.with_name(TABLE)) as file:
            import_module("pyarrow.parquet").write_table(found.to_arrow(), file)

    def _keep(self, content: dict[str, Any]) -> None:
        self._remember(content)
        self._kept.append(content)

    def _remember(self, content: dict[str, Any]) -> None:
        for job, overrides, bound, said in content.get("weighed", ()):
            candidate = Candidate(tuple(overrides), job)
            self.weighed[candidate] = Weighed(candidate, bound, said)
        if "full" in content:
            job, overrides = content["full"]
            self.full.add(Candidate(tuple(overrides), job))
        if "layout" in content:
            layout = layout_of(content["layout"])
            known = self.estimates if layout.extended else self.layouts
            known[Candidate(layout.overrides, layout.job)] = layout
