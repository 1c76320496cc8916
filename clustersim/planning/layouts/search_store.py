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
from clustersim.planning.layouts.candidate_bounds import CandidateBound
from clustersim.planning.layouts.search_space import LayoutCandidate
from clustersim.results.search_result import LayoutResult, SearchResult, layout_from_dict, layout_to_dict

JOURNAL_NAME: Final = "layouts.jsonl"
TABLE_NAME: Final = "layouts.parquet"


class SearchStore:
    """What a search has found out so far. kept: the lines of it.

    estimates: layouts whose step is known from shorter ones; full: those that do not fit.
    """

    def __init__(self, journal: Journal) -> None:
        self.bounds: dict[LayoutCandidate, CandidateBound] = {}
        self.layouts: dict[LayoutCandidate, LayoutResult] = {}
        self.estimates: dict[LayoutCandidate, LayoutResult] = {}
        self.out_of_memory: set[LayoutCandidate] = set()
        self._journal = journal
        for entry in journal.entries:
            self._load_entry(entry)

    @classmethod
    @contextmanager
    def open_or_resume(
        cls, folder: Path | None, identity: Mapping[str, Any], files: Iterable[Path]
    ) -> Iterator["SearchStore"]:
        """Begin, or go on with what the folder has; raise InputError where that is another search, or reads others."""
        with Journal.open_or_resume(
            None if folder is None else folder / JOURNAL_NAME, "search", identity, files
        ) as journal:
            yield cls(journal)

    def add_result(self, candidate: LayoutCandidate, layout: LayoutResult | None) -> None:
        """Keep a simulated layout; None: it does not fit."""
        self._append(
            {"full": [candidate.job_index, candidate.overrides]}
            if layout is None
            else {"layout": layout_to_dict(layout)}
        )

    def add_bounds(self, bounds: Sequence[CandidateBound]) -> None:
        """Keep what is known of layouts before they are simulated."""
        entries = [
            [bound.candidate.job_index, bound.candidate.overrides, bound.bound, bound.rejection] for bound in bounds
        ]
        self._append({"weighed": entries})

    def write_table(self, result: SearchResult) -> None:
        """Keep what a search found as a table, where there is a folder to keep it in, and pyarrow."""
        if self._journal.path is None or find_spec("pyarrow") is None:
            return
        with atomic_file(self._journal.path.with_name(TABLE_NAME)) as file:
            import_module("pyarrow.parquet").write_table(result.to_arrow(), file)

    def _append(self, entry: dict[str, Any]) -> None:
        self._load_entry(entry)
        self._journal.append(entry)

    def _load_entry(self, entry: dict[str, Any]) -> None:
        for job, overrides, bound, rejection in entry.get("weighed", ()):
            candidate = LayoutCandidate(tuple(overrides), job)
            self.bounds[candidate] = CandidateBound(candidate, bound, rejection)
        if "full" in entry:
            job, overrides = entry["full"]
            self.out_of_memory.add(LayoutCandidate(tuple(overrides), job))
        if "layout" in entry:
            layout = layout_from_dict(entry["layout"])
            target = self.estimates if layout.extended else self.layouts
            target[LayoutCandidate(layout.overrides, layout.job)] = layout
