"""What `run --watch` answers, and when: looks at files are played, each doing one thing to them, so nothing waits."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from clustersim.cli import watch
from clustersim.cli.watch import FileWatcher
from tests.cli.conftest import PLAN, Run, write_plan

Step = Callable[[], object]
TWICE = {**PLAN, "training": {"sequence": 1024, "global_batch": 16}}
CONFIG = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1024, "max_position_embeddings": 2048,
}  # fmt: skip


def nothing() -> None:
    """A look at files that nobody touches."""


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """What happens before each look; when there is no more, the user presses Ctrl-C."""
    steps: list[Step] = []

    def play(_seconds: float) -> None:
        if not steps:
            raise KeyboardInterrupt
        steps.pop(0)()

    monkeypatch.setattr(watch, "sleep", play)
    return steps


def replaced(path: Path, text: str) -> None:
    """Save as many editors do, and as quickly as no clock tells."""
    before = path.stat()
    other = path.with_name("other")
    other.write_text(text)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)


def left(looks: list[Step], saves: FileWatcher, *happens: Step) -> int:
    """How many looks are left when a save is over."""
    looks[:] = happens
    saves.wait_for_save()
    return len(looks)


def test_a_save_is_over_when_two_looks_see_the_same(looks: list[Step], tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text("a")
    saves = FileWatcher([file])
    first = left(looks, saves, nothing, nothing, lambda: file.write_text(""), lambda: file.write_text("abc"), nothing)
    assert first == 0
    assert left(looks, saves, lambda: replaced(file, "abd"), nothing, nothing) == 1  # as long, of the same moment
    assert left(looks, saves, lambda: os.utime(file, ns=(0, 0)), nothing) == 0  # saved as it is


def test_a_file_that_is_gone_for_a_moment_is_saved_once_and_one_that_stays_away_is_gone(
    looks: list[Step], tmp_path: Path
) -> None:
    file, away = tmp_path / "plan.yaml", tmp_path / "away"
    file.write_text("a")
    saves = FileWatcher([file])
    assert left(looks, saves, file.unlink, nothing, nothing, lambda: file.write_text("ab"), nothing) == 0
    there_and_back = [lambda: file.rename(away), nothing, lambda: away.rename(file), nothing, nothing]
    assert left(looks, saves, *there_and_back, lambda: file.write_text("abc"), nothing) == 0  # the same file again
    assert left(looks, saves, file.unlink, *[nothing] * 20) == 10
    assert left(looks, saves, lambda: file.write_text("abcd"), nothing) == 0


def test_what_is_saved_while_an_answer_is_worked_out_is_not_missed(looks: list[Step], tmp_path: Path) -> None:
    file, further = tmp_path / "plan.yaml", tmp_path / "config.json"
    file.write_text("a")
    further.write_text("{}")
    saves = FileWatcher([file])
    file.write_text("ab")
    saves.watch_files([file, further])
    assert left(looks, saves, nothing, nothing) == 0
    assert left(looks, saves, lambda: further.write_text("{ }"), nothing) == 0


def batch(path: Path) -> int:
    """Sequences of the step that was answered last."""
    found: int = json.loads(path.read_text())["scenario"]["training"]["global_batch"]
    return found


def test_every_save_is_answered_and_a_wrong_one_is_a_sentence(
    clustersim: Run, looks: list[Step], plan: Path, tmp_path: Path
) -> None:
    """The answer of the last file that was right stays where it was written."""
    answers: list[int] = []

    def note() -> None:
        answers.append(batch(tmp_path / "answer.json"))

    looks += [
        note,
        lambda: plan.write_text(yaml.safe_dump(TWICE)), nothing, note,
        lambda: plan.write_text("model: [\n"), nothing, note,
        plan.unlink, *[nothing] * 10, note,
        lambda: write_plan(plan.parent, PLAN), nothing, note,
    ]  # fmt: skip
    done = clustersim("run", plan, "--watch", "--json", "answer.json")
    assert done.returncode == 0
    assert answers == [8, 16, 16, 16, 8]
    assert done.stdout.count("step time ") == 3
    assert done.stdout.count("wrote answer.json") == 3
    times = [line for line in done.stdout.splitlines() if line.endswith(f" {plan}")]
    assert [len(line.split()[0].split(":")) for line in times] == [3] * 5
    unreadable, missing = done.stderr.splitlines()
    assert unreadable.startswith(f"error: {plan}: ")
    assert missing == f"error: {plan}: cannot be read (No such file or directory)"


def test_files_that_the_scenario_names_are_watched_also_while_one_of_them_is_wrong(
    clustersim: Run, looks: list[Step], tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    plan = write_plan(tmp_path, {**PLAN, "model": "config.json"})
    looks += [
        lambda: config.write_text(json.dumps({**CONFIG, "num_hidden_layers": 8})), nothing,
        lambda: config.write_text("{"), nothing,
        lambda: config.write_text(json.dumps(CONFIG)), nothing,
    ]  # fmt: skip
    done = clustersim("run", plan, "--watch")
    times = [line.split()[2] for line in done.stdout.splitlines() if line.startswith("step time ")]
    assert len(times) == 3, done
    first, deeper, again = times
    assert (first == again, first == deeper) == (True, False)
    assert done.stderr.startswith(f"error: {plan}: model: ")
    assert done.stderr.count("\n") == 1


def test_quiet_answers_are_documents_in_a_row(clustersim: Run, looks: list[Step], plan: Path) -> None:
    looks += [lambda: plan.write_text(yaml.safe_dump(TWICE)), nothing]
    done = clustersim("run", plan, "--watch", "--json", "-")
    decoder, text = json.JSONDecoder(), done.stdout
    first, end = decoder.raw_decode(text)
    second = json.loads(text[end:])
    assert [item["scenario"]["training"]["global_batch"] for item in (first, second)] == [8, 16]


@pytest.mark.usefixtures("looks")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["missing.yaml"], "missing.yaml: cannot be read"), (["plan.yaml", "--html", "plan.yaml"], "files that are read")],
)
def test_what_no_save_can_mend_is_refused_at_once(
    clustersim: Run, plan: Path, arguments: list[str], words: str
) -> None:
    assert plan.name == "plan.yaml"
    done = clustersim("run", *arguments, "--watch")
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr


def test_in_a_process_ctrl_c_ends_well(plan: Path) -> None:
    """Saved when an answer has been read, stopped when a sentence has; a watchdog ends what says nothing."""
    command = [sys.executable, "-m", "clustersim.cli", "run", str(plan), "--watch"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        watchdog = threading.Timer(120, started.kill)
        watchdog.start()
        assert started.stdout is not None
        assert started.stderr is not None
        first = next(line for line in started.stdout if line.startswith("step time "))
        replaced(plan, yaml.safe_dump(TWICE))
        second = next(line for line in started.stdout if line.startswith("step time "))
        plan.write_text("model: [\n")
        sentence = started.stderr.readline()
        started.send_signal(signal.SIGINT)
        _, complained = started.communicate()
        watchdog.cancel()
    assert first != second
    assert sentence.startswith(f"error: {plan}: ")
    assert (started.returncode, complained) == (0, "")
