"""How are the results of a search stored, so that nothing is lost when it is killed?

One journal, `layouts.jsonl`, to which a line is appended and flushed to disk whenever bounds of some
layouts are computed and whenever a layout is simulated. Its first line identifies the search. A truncated
line is dropped. At the end the simulated layouts are also written as a table if pyarrow is installed:
`layouts.parquet`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from clustersim.common.files import atomic_file_in
from clustersim.common.journal import Journal
from clustersim.planning.layouts.candidate_bounds import CandidateBound
from clustersim.planning.layouts.search_space import LayoutCandidate
from clustersim.results.memory_check import MemoryUse
from clustersim.results.search_result import LayoutResult, SearchResult, layout_from_dict, layout_to_dict

JOURNAL_NAME: Final = "layouts.jsonl"
TABLE_NAME: Final = "layouts.parquet"


class SearchStore:
    """The results of a search so far, backed by a journal.

    bounds: by candidate; layouts: simulated in full; estimates: extrapolated from shorter steps; short_of_memory:
    what candidates need that do not fit, or do not leave the headroom.
    """

    def __init__(self, journal: Journal) -> None:
        self.bounds: dict[LayoutCandidate, CandidateBound] = {}
        self.layouts: dict[LayoutCandidate, LayoutResult] = {}
        self.estimates: dict[LayoutCandidate, LayoutResult] = {}
        self.short_of_memory: dict[LayoutCandidate, MemoryUse] = {}
        self._journal = journal
        for entry in journal.entries:
            self._load_entry(entry)

    @classmethod
    @contextmanager
    def open_or_resume(
        cls, folder: Path | None, identity: Mapping[str, Any], files: Iterable[Path]
    ) -> Iterator["SearchStore"]:
        """Start a store, or resume that of the folder.

        Raise InputError if it is of another search or of changed files.
        """
        with Journal.open_or_resume(
            None if folder is None else folder / JOURNAL_NAME, "search", identity, files
        ) as journal:
            yield cls(journal)

    def add_result(self, candidate: LayoutCandidate, result: LayoutResult | MemoryUse) -> None:
        """Record a simulated layout, or the memory that it needs, if that is too much."""
        self._append(
            {"short": [candidate.job_index, candidate.overrides, asdict(result)]}
            if isinstance(result, MemoryUse)
            else {"layout": layout_to_dict(result)}
        )

    def add_bounds(self, bounds: Sequence[CandidateBound]) -> None:
        """Record bounds and rejections of candidates."""
        entries = [
            [bound.candidate.job_index, bound.candidate.overrides, bound.bound, bound.rejection,
             None if bound.states is None else asdict(bound.states), bound.states_leave_headroom]
            for bound in bounds
        ]  # fmt: skip
        self._append({"weighed": entries})

    def write_table(self, result: SearchResult) -> None:
        """Write the result as a Parquet table if there is a folder and pyarrow."""
        if self._journal.path is None or find_spec("pyarrow") is None:
            return
        with atomic_file_in(self._journal.path.parent, TABLE_NAME) as file:
            import_module("pyarrow.parquet").write_table(result.to_arrow(), file)

    def _append(self, entry: dict[str, Any]) -> None:
        self._load_entry(entry)
        self._journal.append(entry)

    def _load_entry(self, entry: dict[str, Any]) -> None:
        for job, overrides, bound, rejection, states, leave_headroom in entry.get("weighed", ()):
            candidate, states_use = (
                LayoutCandidate(tuple(overrides), job),
                None if states is None else MemoryUse(**states),
            )
            self.bounds[candidate] = CandidateBound(candidate, bound, rejection, states_use, leave_headroom)
        if "short" in entry:
            job, overrides, use = entry["short"]
            self.short_of_memory[LayoutCandidate(tuple(overrides), job)] = MemoryUse(**use)
        if "layout" in entry:
            layout = layout_from_dict(entry["layout"])
            target = self.estimates if layout.extrapolated else self.layouts
            target[LayoutCandidate(layout.overrides, layout.job)] = layout
