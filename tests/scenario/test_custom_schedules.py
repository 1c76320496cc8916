"""Custom schedules (CSV files and Python classes): loading, relative paths, round trip and error messages."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clustersim.common.errors import InputError
from clustersim.scenario import Scenario
from clustersim.schedules.breadth_first import BreadthFirst
from clustersim.schedules.csv_format import format_order
from clustersim.schedules.csv_schedule import CsvSchedule
from clustersim.schedules.one_f_one_b import OneFOneB
from clustersim.schedules.registry import SCHEDULE_NAMES, build_schedule
from clustersim.schedules.zero_bubble_v import ZeroBubbleV

SCHEDULE_SOURCE = """
from clustersim.schedules.one_f_one_b import OneFOneB


class Mine:
    def __init__(self, times=1):
        self.times = times

    def placement(self, ranks):
        return range(ranks)

    def order(self, ranks, microbatches):
        if microbatches % self.times:
            raise ValueError(f"microbatches come in {self.times}s")
        return OneFOneB().order(ranks, microbatches)
"""
Plan = Callable[..., Scenario]


@pytest.fixture
def load_plan(tmp_path: Path, mapping: dict[str, Any]) -> Plan:
    """Loads the scenario with a CSV or Python schedule of its folder: 2 pipeline ranks, 16 microbatches."""
    (tmp_path / "my.csv").write_text(format_order(OneFOneB().order(2, 16)))
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe")
    (tmp_path / "my_module.py").write_text(SCHEDULE_SOURCE)

    def load(schedule: object, *overrides: str) -> Scenario:
        (tmp_path / "plan.json").write_text(json.dumps({**mapping, "schedule": schedule}))
        return Scenario.load(tmp_path / "plan.json", overrides)

    return load


CSV_FORMS = "my.csv", {"csv": "my.csv"}, {"csv": {"file": "my.csv"}}, {"csv": {"file": "my.csv", "placement": [0, 1]}}
PYTHON_FORMS = (
    "my_module:Mine",
    {"python": "my_module:Mine"},
    {"python": {"class_path": "my_module:Mine", "arguments": {}}},
)


@pytest.mark.parametrize("written", [*CSV_FORMS, *PYTHON_FORMS])
def test_all_schedule_forms_give_the_same_order(load_plan: Plan, written: object) -> None:
    scenario = load_plan(written)
    assert scenario.schedule.order(2, 16) == OneFOneB().order(2, 16)
    assert scenario.schedule.name == ("my_module:Mine" if written in PYTHON_FORMS else "my.csv")


@pytest.mark.parametrize(
    ("written", "expected"),
    [("zb-v", ZeroBubbleV()), ("bfs", BreadthFirst(2)), ({"bfs": {"chunks": 4}}, BreadthFirst(4))],
)
def test_registered_schedules_accept_options(load_plan: Plan, written: object, expected: object) -> None:
    assert load_plan(written).schedule == expected


def test_all_registered_schedule_names_load(load_plan: Plan) -> None:
    assert [load_plan(name, "layout.pp=4", "layout.dp=4").schedule for name in SCHEDULE_NAMES] == [
        build_schedule(name) for name in SCHEDULE_NAMES
    ]


def test_csv_schedule_is_read_once_and_inlined(load_plan: Plan, tmp_path: Path) -> None:
    scenario = load_plan({"csv": "my.csv"})
    assert tmp_path / "my.csv" in scenario.files
    (tmp_path / "my.csv").unlink()
    changed = scenario.with_overrides("training.sequence=4096")
    assert changed.schedule == scenario.schedule
    assert pickle.loads(pickle.dumps(scenario)) == scenario
    mapping = json.loads(json.dumps(scenario.to_mapping()))
    reread = Scenario.from_mapping(mapping)
    assert reread.schedule == scenario.schedule
    assert reread.to_mapping() == mapping
    assert isinstance(reread.schedule, CsvSchedule)
    assert reread.with_overrides("schedule.orders.name=other").schedule.name == "other"


def test_python_schedule_is_loaded_once_and_reevaluated(load_plan: Plan, tmp_path: Path) -> None:
    scenario = load_plan({"python": {"class_path": "my_module:Mine", "arguments": {"times": 8}}})
    assert tmp_path / "my_module.py" in scenario.files
    assert Scenario.from_mapping(scenario.to_mapping(), default_name="plan", path=scenario.path) == scenario
    assert pickle.loads(pickle.dumps(scenario)) == scenario
    (tmp_path / "my_module.py").unlink()
    deeper = scenario.with_overrides("layout.pp=4", "layout.dp=4")
    assert deeper.schedule.order(4, 32) == OneFOneB().order(4, 32)
    with pytest.raises(InputError, match=r"my_module:Mine\.order\(2, 4\): ValueError: microbatches come in 8s"):
        scenario.with_overrides("training.global_batch=32")


@pytest.mark.parametrize(
    ("written", "overrides", "sentence"),
    [
        ("my2.csv", (), r"schedule: .*my2.csv: cannot be read .*; did you mean my\? \(of the CSV files"),
        ("bytes.csv", (), r"bytes.csv: cannot be read \(not UTF-8 text\)$"),
        ({"csv": {"placement": [0, 1]}}, (), "schedule.csv.file: is missing; write file: my.csv"),
        ({"csv": {"file": "my.csv", "placement": [1, 0]}}, (), "schedule: my.csv, row 1, cell 1: 0F0 is not of this"),
        ({"csv": {"file": "my.csv", "placement": [0, -1]}}, (), "schedule.csv.placement.1: -1 is too small"),
        ({"csv": "my.csv", "gpipe": {}}, (), "schedule: needs exactly one of 1f1b, gpipe"),
        (
            "my.csv",
            ("layout.pp=4", "layout.dp=4"),
            "schedule: my.csv has 2 rows, .* layout.pp is 4; pp 2 with dp 8 fits",
        ),
        (
            "my.csv",
            ("training.global_batch=64",),
            "my.csv is for 16 microbatches, .* has 8: .*global_batch has to be 16 x dp x .*; global_batch 128 fits",
        ),
        ({"orders": {"rows": ["0F0,0B0", "1F0,1"]}}, (), "schedule: written order, row 2, cell 2: '1' is not"),
        ({"orders": {}}, (), "schedule.orders.rows: is missing; write rows"),
        ("my_modul:Mine", (), "schedule: there is no module my_modul, .*; did you mean my_module?"),
        (
            {"python": {"class": "my_module:Mine"}},
            (),
            "schedule.python.class_path: is missing; write class_path: my_module:MyS",
        ),
        ("zb-v", ("layout.pp=1", "layout.dp=16"), r"schedule: zb-v.*layout\.pp is 1; write 1f1b"),
    ],
)
def test_invalid_custom_schedules_have_one_line_errors(
    load_plan: Plan, written: object, overrides: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        load_plan(written, *overrides)


def test_zb_v_warns_about_single_step_bubble(load_plan: Plan) -> None:
    """Also with tied embeddings: the first pipeline rank holds both the first and the last stage."""
    (warning,) = load_plan("zb-v").warnings
    assert "with steps 3 the last one has the step time" in warning
    assert load_plan("zb-v", "model.tied_embeddings=true").warnings == (warning,)
    assert not load_plan("zb-v", "steps=3").warnings
