"""Custom schedules in Python: found beside a scenario file or on Python's path, called once, validated."""

import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clustersim.common.errors import InputError
from clustersim.program.action import Action, ActionKind
from clustersim.program.placement import Placement, looped_placement
from clustersim.schedules.custom_schedule import CustomSchedule, load_custom_schedule
from clustersim.schedules.one_f_one_b import OneFOneB

MODULE_SOURCE = """
class Base:
    def __init__(self, reverse=False):
        self.reverse, self.asked = reverse, 0

    def placement(self, ranks):
        return list(range(ranks))

    def order(self, ranks, microbatches):
        self.asked += 1
        many = list(range(microbatches))
        back = many[::-1] if self.reverse else many
        return [[f"{rank}F{m}" for m in many] + [f"{rank}B{m}" for m in back] for rank in range(ranks)]
"""
ScheduleFactory = Callable[..., CustomSchedule]


@pytest.fixture
def make_schedule(tmp_path: Path) -> ScheduleFactory:
    """Loads the class of a module with additional source."""

    def load(source: str = "", name: str = "Base", **arguments: object) -> CustomSchedule:
        (tmp_path / "mine.py").write_text(MODULE_SOURCE + source)
        return load_custom_schedule(f"mine:{name}", arguments, tmp_path)

    return load


def test_strings_and_lists_are_accepted_as_order_and_placement(make_schedule: ScheduleFactory) -> None:
    schedule = make_schedule(reverse=True)
    assert schedule.name == "mine:Base"
    assert schedule.placement(3) == looped_placement(3)
    assert [str(action) for action in schedule.order(1, 2)[0]] == ["0F0", "0F1", "0B1", "0B0"]


def test_the_custom_class_is_called_once_per_ranks_and_microbatches(make_schedule: ScheduleFactory) -> None:
    schedule = make_schedule()
    for _ in range(2):
        schedule.require_supported(2, 3)
        schedule.order(2, 3)
        schedule.order(2, 4)
    assert schedule.rule.asked == 2  # type: ignore[attr-defined]


def test_the_custom_class_may_return_package_types(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from clustersim.schedules.one_f_one_b import OneFOneB\n"
        "class Mine:\n"
        "    placement = OneFOneB.placement\n"
        "    order = lambda self, ranks, microbatches: OneFOneB().order(ranks, microbatches)\n"
    )
    schedule = load_custom_schedule("own:Mine", {}, tmp_path)
    assert isinstance(schedule.placement(2), Placement)
    assert schedule.order(2, 3) == OneFOneB().order(2, 3)
    assert schedule.order(2, 3)[1][0] == Action(1, ActionKind.FORWARD, 0)


def test_a_file_in_the_scenarios_folder_has_precedence_over_pythons_path(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="pathlib has no class Base"):
        load_custom_schedule("pathlib:Base", {}, tmp_path)
    (tmp_path / "pathlib.py").write_text(MODULE_SOURCE)
    assert load_custom_schedule("pathlib:Base", {}, tmp_path).order(1, 1)
    assert sys.modules["pathlib"].Path is Path


def test_a_file_is_reloaded_when_changed_and_may_import_its_neighbors(tmp_path: Path) -> None:
    (tmp_path / "beside_mine.py").write_text("BACK = True\n")
    (tmp_path / "mine.py").write_text(
        "from beside_mine import BACK\n" + MODULE_SOURCE.replace("reverse=False", "reverse=BACK")
    )
    first = load_custom_schedule("mine:Base", {}, tmp_path)
    (tmp_path / "mine.py").write_text(MODULE_SOURCE)
    second = load_custom_schedule("mine:Base", {}, tmp_path)
    assert [schedule.order(1, 2)[0][2].microbatch for schedule in (first, second)] == [1, 0]
    assert str(tmp_path) not in sys.path


def test_files_of_equal_name_in_two_folders_are_distinct(tmp_path: Path) -> None:
    for folder, reverse in (("a", False), ("b", True)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(MODULE_SOURCE.replace("reverse=False", f"reverse={reverse}"))
    schedules = [load_custom_schedule("mine:Base", {}, tmp_path / folder) for folder in "ab"]
    assert schedules[0] != schedules[1]
    assert [custom_schedule.order(1, 2)[0][2].microbatch for custom_schedule in schedules] == [0, 1]


def test_a_custom_schedule_is_pickled_by_name(make_schedule: ScheduleFactory) -> None:
    schedule = make_schedule(reverse=True)
    schedule.order(2, 3)
    unpickled = pickle.loads(pickle.dumps(schedule))
    assert unpickled == schedule
    assert unpickled.order(2, 3) == schedule.order(2, 3)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("mine", r"'mine'.*module:Class, such as my_module:MySchedule"),
        ("mine:", "names no class"),
        ("../mine:Base", "names no class"),
        ("mine.py:Base", "'mine.py:Base' names a file; write its module, mine:Base"),
        ("mini:Base", "there is no module mini, neither .*mini.py nor where Python looks; did you mean mine?"),
        ("mine:Bose", "module mine has no class Bose; did you mean Base?"),
        ("mine:HALF", r"module mine has no class HALF.*Base, Leaves, Needs"),
        ("mine:Lacking", "mine:Lacking has no method placement"),
        ("os:system", "module os has no Python source"),
        ("shlex:split", "module shlex has no class split; it has none with placement"),
        ("subprocess:Popen", "subprocess:Popen has no method placement and no method order"),
        ("mine:Needs", r"mine:Needs cannot be made with arguments {}: TypeError: .*'depth'"),
        ("broken:Base", "module broken cannot be imported: ZeroDivisionError"),
        ("leaving:Base", "module leaving cannot be imported: SystemExit: 4"),
        ("mine:Leaves", "mine:Leaves cannot be made with arguments {}: SystemExit$"),
        ("wanting:Base", r"module wanting.*ModuleNotFoundError: No module named 'not_there'"),
    ],
)
def test_invalid_schedule_classes_are_refused(
    make_schedule: ScheduleFactory, tmp_path: Path, name: str, sentence: str
) -> None:
    make_schedule(
        "HALF = 1\n"
        "class Lacking:\n    def order(self, ranks, microbatches): return []\n"
        "class Needs(Base):\n    def __init__(self, depth): pass\n"
        "class Leaves(Base):\n    def __init__(self): raise SystemExit\n"
    )
    base = "class Base:\n    def placement(self, ranks): ...\n    def order(self, ranks, microbatches): ...\n"
    (tmp_path / "broken.py").write_text(f"1 / 0\n{base}")
    (tmp_path / "leaving.py").write_text(f"import sys\nsys.exit(4)\n{base}")
    (tmp_path / "wanting.py").write_text(f"import not_there\n{base}")
    with pytest.raises(InputError, match=sentence):
        load_custom_schedule(name, {}, tmp_path)


def test_rejected_arguments_are_shown(make_schedule: ScheduleFactory) -> None:
    with pytest.raises(InputError, match=r"mine:Base.*arguments \{depth: 2\}: TypeError"):
        make_schedule(depth=2)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("def placement(self, ranks): return [0, 0]", r"placement\(2\) places stages on 1 pipeline ranks, not on 2"),
        ("def placement(self, ranks): return None", r"placement\(2\): nothing is not a list"),
        ("def order(self, ranks, m): return None", r"order\(2, 3\): nothing is not a list"),
        ("def order(self, ranks, m): return ['0F0', '1F0']", r"order\(2, 3\): '0F0' is not a list"),
        ("def placement(self, ranks): return [0, True]", r"placement\(2\): true is no pipeline rank"),
        ("def placement(self, ranks): return [0, -1]", r"placement\(2\): -1 is no pipeline rank"),
        ("def placement(self, ranks): return [0, 2]", r"placement\(2\): placement \(0, 2\): every pipeline rank"),
        ("def order(self, ranks, m): raise ValueError('odd')", r"order\(2, 3\): ValueError: odd$"),
        ("def order(self, ranks, m): raise SystemExit", r"order\(2, 3\): SystemExit$"),
        ("def order(self, ranks, m): raise type('Mute', (Exception,), {'__str__': None})", r"order\(2, 3\): Mute$"),
        (
            "def order(self, ranks, m): return [row[m:] + row[:m] if rank else row for rank, row in "
            "enumerate([[f'{s}F{n}' for n in range(m)] + [f'{s}B{n}' for n in range(m)] for s in range(ranks)])]",
            r"order\(2, 3\): rank 1, step 0: 1B0 runs before 1F0",
        ),
        (
            "def placement(self, ranks): return [0, 1, 1, 0]\n"
            "    def order(self, ranks, m): return [[f'{s}{k}{n}' for s in held for k in 'FB' for n in range(m)]"
            " for held in ([0, 3], [1, 2])]",
            r"order\(2, 3\): deadlocks: rank 0, step 3 \(0B0\) waits for 1B0.*rank 1, step 3 \(1B0\) waits for 2B0$",
        ),
        ("def order(self, ranks, m): return [[0]]", r"order\(2, 3\): 0.*Action.*'0F0'"),
        ("def order(self, ranks, m): return [['0F']]", r"order\(2, 3\): '0F' is not an action"),
        ("def order(self, ranks, m): return [[]]", r"order\(2, 3\): orders 1 ranks, but stages are placed on 2"),
        (
            "def order(self, ranks, m): return [row[:-1] for row in super().order(ranks, m)]",
            r"order\(2, 3\): rank 0 has neither 0B2",
        ),
        (
            "def order(self, ranks, m): return [row[::-1] for row in super().order(ranks, m)]",
            r"order\(2, 3\): rank 0, step 0: 0B2 runs before 0F2",
        ),
    ],
)
def test_an_invalid_return_value_is_reported_with_its_call(
    make_schedule: ScheduleFactory, body: str, sentence: str
) -> None:
    schedule = make_schedule(f"class Wrong(Base):\n    {body}\n", "Wrong")
    with pytest.raises(InputError, match=f"^mine:Wrong.{sentence}"):
        schedule.require_supported(2, 3)
