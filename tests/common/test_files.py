import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from clustersim.common.errors import OutputError
from clustersim.common.files import (
    atomic_file,
    atomic_file_in,
    atomic_files,
    is_leftover,
    require_writable,
    write_text_atomically,
)


def test_text_is_written_as_utf8(tmp_path: Path) -> None:
    write_text_atomically(tmp_path / "answer", "α → β")
    assert (tmp_path / "answer").read_bytes() == "α → β".encode()


def test_an_error_while_writing_keeps_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "answer"
    target.write_text("old")
    with pytest.raises(RuntimeError), atomic_file(target) as file:
        file.write(b"new")
        raise RuntimeError
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"there is no directory .*nowhere"):
        write_text_atomically(tmp_path / "nowhere" / "answer", "text")
    assert list(tmp_path.iterdir()) == []


def test_a_link_to_a_missing_directory_names_that(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "absent" / "file")
    with pytest.raises(OutputError, match=r"no directory .*absent; create it"):
        write_text_atomically(tmp_path / "link", "text")


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="is a directory"):
        write_text_atomically(tmp_path, "text")


def test_a_full_disk_is_a_one_line_error() -> None:
    with pytest.raises(OutputError, match=r"/dev/full: cannot be written \(No space left on device\)"):
        write_text_atomically("/dev/full", "text")


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "\ud800"])
def test_an_invalid_file_name_is_a_one_line_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(OutputError, match="cannot be written"):
        write_text_atomically(tmp_path / name, "text")
    with pytest.raises(OutputError, match="cannot be written"):
        require_writable(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_symlink_is_kept_and_its_target_written(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "answer")
    write_text_atomically(link, "text")
    assert link.is_symlink()
    assert (tmp_path / "answer").read_text() == "text"


def test_a_link_that_was_planted_in_a_folder_of_outputs_is_replaced(tmp_path: Path) -> None:
    """The user named the folder, not the link."""
    victim, folder = tmp_path / "victim", tmp_path / "traces"
    victim.write_text("untouched")
    folder.mkdir()
    for name, plant in (("soft", Path.symlink_to), ("hard", Path.hardlink_to)):
        plant(folder / name, victim)
        with atomic_file_in(folder, name) as file:
            file.write(b"trace")
        assert (folder / name).read_bytes() == b"trace"
        assert not (folder / name).is_symlink()
    assert victim.read_text() == "untouched"


def test_a_lone_surrogate_is_written_as_a_question_mark(tmp_path: Path) -> None:
    write_text_atomically(tmp_path / "answer", "a\ud800b")
    assert (tmp_path / "answer").read_text() == "a?b"


def test_a_pipe_is_written_directly_by_its_dev_fd_name() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as answer:
        require_writable(f"/dev/fd/{writing}")
        write_text_atomically(f"/dev/fd/{writing}", "text")
        os.close(writing)
        assert answer.read() == "text"


def test_the_directory_must_be_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "answer").touch()
    monkeypatch.setattr(os, "access", lambda path, _mode: Path(path) != tmp_path)
    for name in ("answer", "new"):
        with pytest.raises(OutputError, match="no permission"):
            require_writable(tmp_path / name)


def test_the_mode_of_an_existing_file_stays(tmp_path: Path) -> None:
    for mode in (0o600, 0o664, 0o640):
        target = tmp_path / f"answer-{mode:o}"
        target.write_text("old")
        target.chmod(mode)
        write_text_atomically(target, "new")
        assert (target.read_text(), stat.S_IMODE(target.stat().st_mode)) == ("new", mode)


def test_a_new_file_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    write_text_atomically(tmp_path / "answer", "text")
    assert (tmp_path / "answer").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_temporary_names_are_new_each_time_and_planted_files_are_not_written(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        with atomic_files([tmp_path / "answer"]) as (partial,):
            assert is_leftover(partial)
            assert not partial.is_symlink()
            names.append(partial.name)
    assert len({*names}) == len(names)


def test_one_target_named_twice_is_written_once(tmp_path: Path) -> None:
    with atomic_files([tmp_path / "answer", tmp_path / "answer"]) as (first, second):
        assert first == second
        first.write_text("text")
    assert [path.name for path in tmp_path.iterdir()] == ["answer"]


def test_of_threads_that_write_one_file_the_last_wins_whole(tmp_path: Path) -> None:
    target, texts = tmp_path / "answer", [character * 300_000 for character in "abcdefgh"]
    with ThreadPoolExecutor(len(texts)) as pool:
        writes = [pool.submit(write_text_atomically, target, text) for text in texts * 8]
        while not all(write.done() for write in writes):
            if target.exists():
                assert target.read_text() in texts
    for write in writes:
        write.result()
    assert target.read_text() in texts
    assert list(tmp_path.iterdir()) == [target]
