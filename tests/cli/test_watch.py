"""`run --watch`: polls of the files are simulated, each with one file change, so that no test waits."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml

from clustersim.cli import watch
from clustersim.cli.watch import FileWatcher
from tests.cli.conftest import BASE_MAPPING, CommandRunner, write_plan

PollAction = Callable[[], object]
DOUBLED_BATCH = {**BASE_MAPPING, "training": {"sequence": 1024, "global_batch": 16}}
HF_CONFIG = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1024, "max_position_embeddings": 2048,
}  # fmt: skip


def no_change() -> None:
    """A poll without a change."""


@pytest.fixture
def poll_actions(monkeypatch: pytest.MonkeyPatch) -> list[PollAction]:
    """Actions before each poll; when none is left, KeyboardInterrupt is raised."""
    actions: list[PollAction] = []

    def fake_sleep(_seconds: float) -> None:
        if not actions:
            raise KeyboardInterrupt
        actions.pop(0)()

    monkeypatch.setattr(watch, "sleep", fake_sleep)
    return actions


def replace_file(path: Path, text: str) -> None:
    """Atomic replacement as by many editors, with an unchanged modification time."""
    before = path.stat()
    other = path.with_name("other")
    other.write_text(text)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)


def actions_left(poll_actions: list[PollAction], saves: FileWatcher, *actions: PollAction) -> int:
    """Number of actions left when a save has been detected."""
    poll_actions[:] = actions
    saves.wait_for_save()
    return len(poll_actions)


def test_save_ends_after_two_equal_polls(poll_actions: list[PollAction], tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text("a")
    saves = FileWatcher([file])
    first = actions_left(
        poll_actions,
        saves,
        no_change,
        no_change,
        lambda: file.write_text(""),
        lambda: file.write_text("abc"),
        no_change,
    )
    assert first == 0
    assert (
        actions_left(poll_actions, saves, lambda: replace_file(file, "abd"), no_change, no_change) == 1
    )  # of equal size and modification time
    assert actions_left(poll_actions, saves, lambda: os.utime(file, ns=(0, 0)), no_change) == 0  # saved without changes


def test_briefly_missing_file_is_one_save(poll_actions: list[PollAction], tmp_path: Path) -> None:
    file, away = tmp_path / "plan.yaml", tmp_path / "away"
    file.write_text("a")
    saves = FileWatcher([file])
    assert (
        actions_left(poll_actions, saves, file.unlink, no_change, no_change, lambda: file.write_text("ab"), no_change)
        == 0
    )
    moved_and_restored = [lambda: file.rename(away), no_change, lambda: away.rename(file), no_change, no_change]
    assert (
        actions_left(poll_actions, saves, *moved_and_restored, lambda: file.write_text("abc"), no_change) == 0
    )  # the same file again
    assert actions_left(poll_actions, saves, file.unlink, *[no_change] * 20) == 10
    assert actions_left(poll_actions, saves, lambda: file.write_text("abcd"), no_change) == 0


def test_save_during_simulation_is_detected(poll_actions: list[PollAction], tmp_path: Path) -> None:
    file, config = tmp_path / "plan.yaml", tmp_path / "config.json"
    file.write_text("a")
    config.write_text("{}")
    saves = FileWatcher([file])
    file.write_text("ab")
    saves.watch_files([file, config])
    assert actions_left(poll_actions, saves, no_change, no_change) == 0
    assert actions_left(poll_actions, saves, lambda: config.write_text("{ }"), no_change) == 0


def written_global_batch(path: Path) -> int:
    """Global batch of the last written result."""
    global_batch: int = json.loads(path.read_text())["scenario"]["training"]["global_batch"]
    return global_batch


def test_saves_are_simulated_and_errors_are_one_line(
    clustersim: CommandRunner, poll_actions: list[PollAction], plan: Path, tmp_path: Path
) -> None:
    """The output of the last valid file stays."""
    batches: list[int] = []

    def record_batch() -> None:
        batches.append(written_global_batch(tmp_path / "answer.json"))

    poll_actions += [
        record_batch,
        lambda: plan.write_text(yaml.safe_dump(DOUBLED_BATCH)), no_change, record_batch,
        lambda: plan.write_text("model: [\n"), no_change, record_batch,
        plan.unlink, *[no_change] * 10, record_batch,
        lambda: write_plan(plan.parent, BASE_MAPPING), no_change, record_batch,
    ]  # fmt: skip
    done = clustersim("run", plan, "--watch", "--json", "answer.json")
    assert done.returncode == 0
    assert batches == [8, 16, 16, 16, 8]
    assert done.stdout.count("step time ") == 3
    assert done.stdout.count("wrote answer.json") == 3
    times = [line for line in done.stdout.splitlines() if line.endswith(f" {plan}")]
    assert [len(line.split()[0].split(":")) for line in times] == [3] * 5
    unreadable, missing = done.stderr.splitlines()
    assert unreadable.startswith(f"error: {plan}: ")
    assert missing == f"error: {plan}: cannot be read (No such file or directory)"


def test_referenced_files_are_watched_even_if_invalid(
    clustersim: CommandRunner, poll_actions: list[PollAction], tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(HF_CONFIG))
    plan = write_plan(tmp_path, {**BASE_MAPPING, "model": "config.json"})
    poll_actions += [
        lambda: config.write_text(json.dumps({**HF_CONFIG, "num_hidden_layers": 8})), no_change,
        lambda: config.write_text("{"), no_change,
        lambda: config.write_text(json.dumps(HF_CONFIG)), no_change,
    ]  # fmt: skip
    done = clustersim("run", plan, "--watch")
    times = [line.split()[2] for line in done.stdout.splitlines() if line.startswith("step time ")]
    assert len(times) == 3, done
    first, deeper, restored = times
    assert (first == restored, first == deeper) == (True, False)
    assert done.stderr.startswith(f"error: {plan}: model: ")
    assert done.stderr.count("\n") == 1


def test_watch_writes_consecutive_json_documents(
    clustersim: CommandRunner, poll_actions: list[PollAction], plan: Path
) -> None:
    poll_actions += [lambda: plan.write_text(yaml.safe_dump(DOUBLED_BATCH)), no_change]
    done = clustersim("run", plan, "--watch", "--json", "-")
    decoder, text = json.JSONDecoder(), done.stdout
    first, end = decoder.raw_decode(text)
    second = json.loads(text[end:])
    assert [document["scenario"]["training"]["global_batch"] for document in (first, second)] == [8, 16]


@pytest.mark.usefixtures("poll_actions")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["missing.yaml"], "missing.yaml: cannot be read"), (["plan.yaml", "--html", "plan.yaml"], "files that are read")],
)
def test_unrecoverable_errors_end_watch(
    clustersim: CommandRunner, plan: Path, arguments: list[str], message: str
) -> None:
    assert plan.name == "plan.yaml"
    done = clustersim("run", *arguments, "--watch")
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_ctrl_c_in_a_subprocess_exits_0(plan: Path) -> None:
    """Saves after the first result is read, interrupts after an error; a timer kills a silent process."""
    command = [sys.executable, "-m", "clustersim.cli", "run", str(plan), "--watch"]
    heeds_sigint = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # which shells ignore in the background
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heeds_sigint
    ) as started:
        watchdog = threading.Timer(120, started.kill)
        watchdog.start()
        assert started.stdout is not None
        assert started.stderr is not None
        first = next(line for line in started.stdout if line.startswith("step time "))
        replace_file(plan, yaml.safe_dump(DOUBLED_BATCH))
        second = next(line for line in started.stdout if line.startswith("step time "))
        plan.write_text("model: [\n")
        sentence = started.stderr.readline()
        started.send_signal(signal.SIGINT)
        _, errors = started.communicate()
        watchdog.cancel()
    assert first != second
    assert sentence.startswith(f"error: {plan}: ")
    assert (started.returncode, errors) == (0, "")
