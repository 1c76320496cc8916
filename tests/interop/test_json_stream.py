"""JSON read element by element: the same as read at once, whatever the chunks."""

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.errors import InputError
from clustersim.interop import json_stream
from clustersim.interop.json_stream import JsonObjectStream

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=3), children, max_size=3),
    max_leaves=6,
)


def read_all(content: bytes) -> tuple[list[Any], dict[str, Any]]:
    stream = JsonObjectStream(Path("a.json"), "items")
    return list(stream.elements(io.BytesIO(content))), stream.others


@given(
    st.lists(VALUES, max_size=4),
    st.dictionaries(st.text(max_size=3).filter(lambda key: key != "items"), VALUES, max_size=3),
    st.integers(1, 9),
    st.sampled_from([None, 1]),
    st.booleans(),
)
def test_elements_are_those_of_the_whole(
    items: list[Any], others: dict[str, Any], chunk: int, indent: int | None, first: bool
) -> None:
    content = {"items": items, **others} if first else {**others, "items": items}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_stream, "CHUNK_CHARACTERS", chunk)
        assert read_all(json.dumps(content, indent=indent).encode()) == (items, others)


def test_every_truncation_is_reported(tmp_path: Path) -> None:
    text = json.dumps({"a": {"b": [1.5, "x"]}, "items": [{"c": "d"}, 12, None], "e": 3})
    file = tmp_path / "a.json"
    for length in range(len(text)):
        file.write_text(text[:length])
        with pytest.raises(InputError, match="is not valid JSON, or truncated"):
            list(JsonObjectStream(file, "items").elements())


def test_a_truncated_archive_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "a.json.gz"
    data = gzip.compress(json.dumps({"items": list(range(10_000))}).encode())
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match=r"a\.json\.gz: is not valid gzip, or truncated"):
        list(JsonObjectStream(file, "items").elements())


def test_progress_reaches_the_size_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"items": list(range(10_000))}))
    seen: list[int] = []
    list(JsonObjectStream(file, "items", seen.append).elements())
    assert seen[-1] == file.stat().st_size
