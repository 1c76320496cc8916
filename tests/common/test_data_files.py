"""Data files: read strictly by one reader, with actionable error messages."""

import json
from pathlib import Path

import pytest

from clustersim.common import data_files
from clustersim.common.errors import InputError


def alias_bomb(first_value: str, doubled: str, lines: int = 40) -> str:
    """A few lines of YAML whose aliases stand for 2^40 values."""
    return "\n".join([f"a0: &a0 {first_value}", *(f"a{n + 1}: &a{n + 1} {doubled.format(n)}" for n in range(lines))])


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.yaml", "a: 1\nb: {c: 1,\n  c: 2}", "b.c is given twice, in lines 2 and 3; keep one"),
        ("a.yaml", "a: [{x: 1, x: 2}]", r"a\[0\].x is given twice, in line 1; keep one"),
        ("a.json", '{"a": {"b": 1, "b": 2}}', "b is given twice in one mapping; keep one"),
        ("a.yaml", "a: !!int ''", "line 1: '' is no int$"),
        ("a.yaml", "a: !!binary aGk=", r"is not valid YAML:.*tag.*binary"),
        ("a.json", "[" * 100_000, "has lists or mappings more than 64 deep"),
        ("a.yaml", "a: " + "[" * 100_000, "line 1: lists or mappings are more than 64 deep"),
        ("a.yaml", "".join(f"{' ' * depth}a:\n" for depth in range(500)), "line 65: lists or mappings are more than"),
        ("a.yaml", alias_bomb("[1]", "[*a{0}]", 100), "its aliases nest lists or mappings more than 64 deep"),
        ("a.yaml", f"a: 0x{'F' * 5000}", "line 1: a number has 5,002 digits; 100 are the most"),
        ("a.yaml", f"a: {':'.join(['59'] * 3000)}", "line 1: a number has 8,999 digits; 100 are the most"),
        ("a.json", f'{{"a": {"9" * 5000}}}', "line 1: a number has more than 100 digits"),
        ("a.yaml", "a: &n {x: *n}", "line 1: an alias stands for something that contains it"),
        ("a.yaml", "a: &n [1, [*n]]", "line 1: an alias stands for something that contains it"),
        ("a.yaml", alias_bomb("[1, 1]", "[*a{0}, *a{0}]"), "its aliases stand for more than 100,000 values"),
        ("a.yaml", alias_bomb("{x: 1}", "{{<<: [*a{0}, *a{0}]}}"), "its aliases stand for more than 100,000"),
    ],
)
def test_ambiguous_and_malformed_files_are_refused(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=f"{name}: {sentence}"):
        data_files.read_mapping(tmp_path / name)


def test_yaml_merges_and_aliases_are_no_duplicate_keys(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("x: &x {p: 1}\ny: {<<: *x, p: 2}\nz: [*x, *x]\n1: a\n'1': b")
    content = data_files.read_mapping(tmp_path / "a.yaml")
    assert content == {"x": {"p": 1}, "y": {"p": 2}, "z": [{"p": 1}, {"p": 1}], 1: "a", "1": "b"}


@pytest.mark.parametrize(
    ("shelf", "one"),
    [
        ("accelerators", "accelerator"),
        ("clusters", "cluster"),
        ("frameworks", "framework"),
        ("libraries", "library"),
        ("prices", "price list"),
    ],
)
def test_messages_name_one_item_of_a_data_directory(shelf: str, one: str) -> None:
    with pytest.raises(InputError, match=f"there is no {one} 'zzz'; "):
        data_files.find_file(shelf, "zzz")
    name = data_files.list_names(shelf)[0]
    assert data_files.display_name(data_files.find_file(shelf, name)) == f"{one} {name}"


@pytest.mark.parametrize("name", ["", "..", ".", "../clusters/dgx-h100", "DGX-H100", "dgx-h100.x", "dgx-h100/", "/etc"])
def test_a_packaged_file_has_exactly_one_name(name: str) -> None:
    with pytest.raises(InputError, match="there is no cluster "):
        data_files.find_file("clusters", name)


def test_every_packaged_name_is_found_as_listed() -> None:
    for category in ("clusters", "accelerators", "records"):
        for name in data_files.list_names(category):
            path = data_files.find_file(category, name)
            assert path.relative_to(data_files.category_folder(category)).with_suffix("").as_posix() == name


def test_content_belongs_to_its_reader_and_changed_files_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("x: {p: [1]}")
    data_files.read_mapping(path)["x"]["p"].append(2)
    assert data_files.read_mapping(path) == {"x": {"p": [1]}}
    path.write_text("x: 2")
    assert data_files.read_mapping(path) == {"x": 2}


def test_a_user_file_is_named_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "clusters" / "dgx-h100.json"
    path.parent.mkdir()
    path.write_text(json.dumps([]))
    with pytest.raises(InputError, match=f"^{path}: holds a list"):
        data_files.read_mapping(path)


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "\ud800"])
def test_an_invalid_file_name_is_a_one_line_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="there is no cluster "):
        data_files.find_file("clusters", name)
    for path in (data_files.resolve_relative(tmp_path, f"{name}.yaml"), tmp_path / f"{name}.yaml"):
        with pytest.raises(InputError, match="cannot be read"):
            data_files.read_mapping(path)


def test_a_large_file_without_aliases_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"a: [{'1, ' * 110_000}]")
    assert len(data_files.read_mapping(tmp_path / "a.yaml")["a"]) == 110_000
