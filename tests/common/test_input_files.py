"""Whatever a path is, reading it ends soon and takes little memory: with the content, or with one sentence."""

import gzip
import os
import threading
from pathlib import Path

import pytest

from clustersim.common import input_files
from clustersim.common.errors import InputError
from clustersim.common.input_files import (
    expand_gzip,
    is_long_number,
    parse_csv,
    parse_json,
    parse_table,
    parse_toml,
    read_bytes,
    read_text,
)


@pytest.mark.parametrize(("path", "reason"), [("/dev/zero", "is a device"), ("/dev/urandom", "is a device"), ("/", "")])
def test_what_is_no_file_is_refused(path: str, reason: str) -> None:
    with pytest.raises(InputError, match=f"{path}: cannot be read .*{reason}"):
        read_bytes(Path(path))


def test_a_pipe_is_read_and_a_silent_one_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_files, "_PIPE_SECONDS", 0.3)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(InputError, match="nothing came through this pipe"):
        read_text(pipe)
    monkeypatch.setattr(input_files, "_PIPE_SECONDS", 20.0)
    writer = threading.Thread(target=pipe.write_text, args=("a: 1\n" * 100_000,))
    writer.start()
    assert read_text(pipe) == "a: 1\n" * 100_000
    writer.join()


def test_files_are_read_up_to_their_bound(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 1000)
    assert read_bytes(file, 1000) == b"x" * 1000
    with pytest.raises(InputError, match="larger than 0 MB"):
        read_bytes(file, 999)
    assert read_bytes(Path("/proc/self/status"))  # has size 0


def test_gzip_of_several_members_is_expanded_whole() -> None:
    texts = [b"{}", os.urandom(3 << 20), b"", b"end"]
    packed = b"".join(map(gzip.compress, texts)) + bytes(512)
    assert expand_gzip(packed, "x") == b"".join(texts) == gzip.decompress(packed)


@pytest.mark.parametrize(
    "damaged",
    [b"", b"no gzip", gzip.compress(b"text" * 999)[:-9], gzip.compress(b"a")[:12] + b"?" * 9],
    ids=["empty", "no gzip", "cut off", "no deflate"],  # packed bytes have the time in them
)
def test_damaged_gzip_is_a_sentence(damaged: bytes) -> None:
    if not damaged:
        assert expand_gzip(damaged, "x") == b""
        return
    with pytest.raises(InputError, match="x: is not valid gzip, or truncated"):
        expand_gzip(damaged, "x")


def test_a_bomb_is_refused_before_it_is_kept() -> None:
    import tracemalloc

    bomb = gzip.compress(bytes(3 * 10**8), 9)
    tracemalloc.start()
    with pytest.raises(InputError, match="expands to more than"):
        expand_gzip(bomb, "x")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2e7


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 70 + "1" + "}" * 70, "[" * 66 + "]" * 66])
def test_deep_json_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="more than 64 deep"):
        parse_json(text)


def test_json_within_the_bounds_is_accepted() -> None:
    assert parse_json("[" * 64 + "]" * 64)
    assert parse_json(f'{{"a": {"9" * 100}, "b": "{"9" * 5000}"}}')["a"] == int("9" * 100)


@pytest.mark.parametrize("text", ["9" * 101, f"[1, {'9' * 5000}]", f'{{"a":-{"9" * 101}}}'])
def test_endless_numbers_in_json_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="more than 100 digits"):
        parse_json(text)


@pytest.mark.parametrize(
    "text", ["9" * 200, "0x" + "F" * 200, ":".join(["59"] * 60), "-1_" + "0" * 200, "1." + "0" * 200]
)
def test_long_numbers_are_seen(text: str) -> None:
    assert is_long_number(text)


@pytest.mark.parametrize("text", ["1" * 100, "a" * 300, "https://example.org/" + "9" * 200])
def test_texts_and_short_numbers_are_not_long_numbers(text: str) -> None:
    assert not is_long_number(text)


@pytest.mark.parametrize("text", ["a = " + "9" * 5000, "a = [" * 3000, "a = 0x", "\x00"])
def test_invalid_toml_is_a_sentence(text: str) -> None:
    with pytest.raises(InputError, match="is not TOML"):
        parse_toml(text)


def test_tables_have_the_cells_of_their_columns() -> None:
    assert parse_table("\ufeffa,b\n1\n\n2,3\n") == (["a", "b"], [(2, {"a": "1", "b": ""}), (4, {"a": "2", "b": "3"})])
    assert parse_table("") == ([], [])
    with pytest.raises(InputError, match="line 2 has more cells"):
        parse_table("a\n1,2\n")


@pytest.mark.parametrize("text", ['"open', "a" * 200_000, 'a"b"c,"d"e\n'])
def test_invalid_tables_are_a_sentence(text: str) -> None:
    with pytest.raises(InputError, match="is not a CSV table"):
        parse_csv(text)
