"""Nothing that a search found out is lost when it ends before its time."""

import json
from pathlib import Path

import pytest
from pyarrow import parquet

from clustersim.common.data_files import find_file
from clustersim.common.errors import InputError
from clustersim.planning.layouts import LayoutSearch, SearchSpace
from clustersim.planning.layouts.objective import Objective
from clustersim.planning.layouts.search_store import JOURNAL_NAME, TABLE_NAME
from clustersim.results.search_result import LayoutResult, SearchResult
from tests.planning.layouts.search_scenarios import job

VARY = {"layout.tp": ["1", "2", "4"], "layout.pp": ["1", "2"], "training.microbatch": ["1", "2"]}


def searched(store: Path | None = None) -> LayoutSearch:
    return LayoutSearch(SearchSpace.restricted_to(job(), VARY), top=3, store=store, sensitivity=False)


def answer(found: SearchResult) -> dict[str, object]:
    return {key: value for key, value in found.to_json().items() if key not in ("wall_s", "layouts_per_s")}


class Stop:
    """Ctrl-C once so many layouts were simulated."""

    def __init__(self, after: int) -> None:
        self.after = after

    def __call__(self, what: str, done: int, _of: int, _best: LayoutResult | None) -> None:
        if what.startswith("simulating") and done >= self.after:
            raise KeyboardInterrupt


def test_a_search_that_was_stopped_goes_on_and_finds_the_same(tmp_path: Path) -> None:
    whole = searched().run()
    part = searched(tmp_path).run(Stop(2))
    assert not part.complete
    assert 2 <= len(part.simulated) < len(whole.simulated) + len(whole.bounded)
    lines = (tmp_path / JOURNAL_NAME).read_text().splitlines()
    assert sum('"layout"' in line for line in lines) == 2
    again = searched(tmp_path).run()
    assert again.complete
    assert answer(again) == answer(whole)


def test_what_was_found_out_is_not_found_out_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = searched(tmp_path).run()

    def never(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr("clustersim.planning.layouts.branch_and_bound.bound_candidates", never)
    monkeypatch.setattr("clustersim.planning.layouts.branch_and_bound._evaluate", never)
    assert answer(searched(tmp_path).run()) == answer(first)


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path, cut: int) -> None:
    """As when the process is killed while it writes."""
    whole = searched(tmp_path).run()
    path = tmp_path / JOURNAL_NAME
    path.write_text(path.read_text()[:-cut])
    assert answer(searched(tmp_path).run()) == answer(whole)
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_folder_of_another_search_is_refused(tmp_path: Path) -> None:
    searched(tmp_path).run()
    kept = (tmp_path / JOURNAL_NAME).read_bytes()
    others = [
        LayoutSearch(SearchSpace.restricted_to(job("training.sequence=2048"), VARY), store=tmp_path),
        LayoutSearch(SearchSpace.restricted_to(job(), {**VARY, "layout.pp": ["1"]}), store=tmp_path),
        LayoutSearch(SearchSpace.restricted_to(job(), VARY), objective=Objective.TOKENS_PER_GPU, store=tmp_path),
    ]
    for other in others:
        with pytest.raises(InputError, match=r"is of another search .* name another folder"):
            other.run()
    assert (tmp_path / JOURNAL_NAME).read_bytes() == kept


def test_what_a_file_says_now_is_another_search(tmp_path: Path) -> None:
    """Layouts on the cluster as it was are none of the cluster as it is."""
    shipped = find_file("clusters", "dgx-h100").read_text()
    own = tmp_path / "own.yaml"

    def result() -> SearchResult:
        scenario = job(f"cluster={{path: {own}, gpus: 8}}")
        return LayoutSearch(
            SearchSpace.restricted_to(scenario, VARY), top=3, store=tmp_path / "found", sensitivity=False
        ).run()

    own.write_text(shipped)
    first = result()
    assert answer(result()) == answer(first)
    own.write_text(shipped.replace("bandwidth: 450 GB/s", "bandwidth: 45 GB/s"))
    with pytest.raises(InputError, match=r"is of another search .* or a file that it reads, differs"):
        result()


def test_more_of_the_best_are_another_question_of_the_same_search(tmp_path: Path) -> None:
    few = searched(tmp_path).run()
    more = LayoutSearch(SearchSpace.restricted_to(job(), VARY), top=5, store=tmp_path, sensitivity=False).run()
    assert more.best[:3] == few.best
    assert len(more.best) == 5


def test_what_was_simulated_is_a_table_at_the_end(tmp_path: Path) -> None:
    found = searched(tmp_path).run()
    table = parquet.read_table(tmp_path / TABLE_NAME)
    assert table.equals(found.to_arrow())
    assert table["step_time_s"].to_pylist() == [layout_result.step_time for layout_result in found.simulated]
    assert table["layout.tp"].to_pylist() == [
        dict(one.split("=") for one in item.overrides)["layout.tp"] for item in found.simulated
    ]
    assert table["overrides"].to_pylist()[0] == " ".join(found.best[0].overrides)
    parts = [name for name in table.column_names if name.endswith(" [s]")]
    sums = [sum(row[name] or 0.0 for name in parts) for row in table.to_pylist()]
    assert sums == pytest.approx(table["step_time_s"].to_pylist(), rel=1e-6)
    part = searched(tmp_path / "other").run(Stop(1))
    assert not part.complete
    assert not (tmp_path / "other" / TABLE_NAME).exists()
