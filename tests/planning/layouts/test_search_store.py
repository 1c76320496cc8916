"""The store of a search: nothing is lost when a search is interrupted."""

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
from tests.planning.layouts.search_scenarios import search_scenario

VARY = {"layout.tp": ["1", "2", "4"], "layout.pp": ["1", "2"], "training.microbatch": ["1", "2"]}


def layout_search(store: Path | None = None) -> LayoutSearch:
    return LayoutSearch(SearchSpace.restricted_to(search_scenario(), VARY), top=3, store=store, sensitivity=False)


def comparable_report(result: SearchResult) -> dict[str, object]:
    return {key: value for key, value in result.to_json().items() if key not in ("wall_s", "layouts_per_s")}


class InterruptAfter:
    """Progress callback that raises KeyboardInterrupt after a number of simulated layouts."""

    def __init__(self, layout_count: int) -> None:
        self.layout_count = layout_count

    def __call__(self, activity: str, done: int, _total: int, _best: LayoutResult | None) -> None:
        if activity.startswith("simulating") and done >= self.layout_count:
            raise KeyboardInterrupt


def test_an_interrupted_search_resumes_and_finds_the_same(tmp_path: Path) -> None:
    complete = layout_search().run()
    partial = layout_search(tmp_path).run(InterruptAfter(2))
    assert not partial.complete
    assert 2 <= len(partial.simulated) < len(complete.simulated) + len(complete.bounded)
    lines = (tmp_path / JOURNAL_NAME).read_text().splitlines()
    assert sum('"layout"' in line for line in lines) == 2
    resumed = layout_search(tmp_path).run()
    assert resumed.complete
    assert comparable_report(resumed) == comparable_report(complete)


def test_a_completed_search_is_read_from_its_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = layout_search(tmp_path).run()

    def never(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr("clustersim.planning.layouts.branch_and_bound.bound_candidates", never)
    monkeypatch.setattr("clustersim.planning.layouts.branch_and_bound.evaluate_layout", never)
    assert comparable_report(layout_search(tmp_path).run()) == comparable_report(first)


@pytest.mark.parametrize("length", [1, 20, 200])
def test_a_truncated_line_is_dropped(tmp_path: Path, length: int) -> None:
    """As when the process is killed while it writes."""
    complete = layout_search(tmp_path).run()
    path = tmp_path / JOURNAL_NAME
    path.write_text(path.read_text()[:-length])
    assert comparable_report(layout_search(tmp_path).run()) == comparable_report(complete)
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_the_store_of_another_search_is_refused(tmp_path: Path) -> None:
    layout_search(tmp_path).run()
    journal = (tmp_path / JOURNAL_NAME).read_bytes()
    others = [
        LayoutSearch(SearchSpace.restricted_to(search_scenario("training.sequence=2048"), VARY), store=tmp_path),
        LayoutSearch(SearchSpace.restricted_to(search_scenario(), {**VARY, "layout.pp": ["1"]}), store=tmp_path),
        LayoutSearch(
            SearchSpace.restricted_to(search_scenario(), VARY), objective=Objective.TOKENS_PER_GPU, store=tmp_path
        ),
    ]
    for other in others:
        with pytest.raises(InputError, match=r"is of another search .* name another folder"):
            other.run()
    assert (tmp_path / JOURNAL_NAME).read_bytes() == journal


def test_a_changed_input_file_makes_another_search(tmp_path: Path) -> None:
    """Layouts of the cluster file before the change are not layouts of the changed cluster."""
    packaged_text = find_file("clusters", "dgx-h100").read_text()
    path = tmp_path / "own.yaml"

    def result() -> SearchResult:
        scenario = search_scenario(f"cluster={{path: {path}, gpus: 8}}")
        return LayoutSearch(
            SearchSpace.restricted_to(scenario, VARY), top=3, store=tmp_path / "found", sensitivity=False
        ).run()

    path.write_text(packaged_text)
    first = result()
    assert comparable_report(result()) == comparable_report(first)
    path.write_text(packaged_text.replace("bandwidth: 450 GB/s", "bandwidth: 45 GB/s"))
    with pytest.raises(InputError, match=r"is of another search .* or a file that it reads, differs"):
        result()


def test_top_may_be_raised_in_the_same_store(tmp_path: Path) -> None:
    few = layout_search(tmp_path).run()
    more = LayoutSearch(
        SearchSpace.restricted_to(search_scenario(), VARY), top=5, store=tmp_path, sensitivity=False
    ).run()
    assert more.best[:3] == few.best
    assert len(more.best) == 5


def test_a_complete_search_writes_a_table_of_its_layouts(tmp_path: Path) -> None:
    result = layout_search(tmp_path).run()
    table = parquet.read_table(tmp_path / TABLE_NAME)
    assert table.equals(result.to_arrow())
    assert table["step_time_s"].to_pylist() == [layout_result.step_time for layout_result in result.simulated]
    assert table["layout.tp"].to_pylist() == [
        dict(one.split("=") for one in item.overrides)["layout.tp"] for item in result.simulated
    ]
    assert table["overrides"].to_pylist()[0] == " ".join(result.best[0].overrides)
    category_columns = [name for name in table.column_names if name.endswith(" [s]")]
    sums = [sum(row[name] or 0.0 for name in category_columns) for row in table.to_pylist()]
    assert sums == pytest.approx(table["step_time_s"].to_pylist(), rel=1e-6)
    partial = layout_search(tmp_path / "other").run(InterruptAfter(1))
    assert not partial.complete
    assert not (tmp_path / "other" / TABLE_NAME).exists()
