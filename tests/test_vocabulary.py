"""The code speaks the field's words: retired words stay away, and every class name is defined once."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
RETIRED = yaml.safe_load((ROOT / "tests" / "retired_words.yaml").read_text())
PACKAGES = ("clustersim", "calibrate")
SHARED_CLASS_NAMES: dict[str, str] = {}
"""Class names that may be defined more than once, each with its reason; at most ten."""


@cache
def sources() -> tuple[Path, ...]:
    return tuple(path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))


@cache
def tokens(path: Path) -> dict[int, frozenset[str]]:
    """The names of a module, used or defined, and its comments: strings by type of token."""
    strings: dict[int, set[str]] = {tokenize.NAME: set(), tokenize.COMMENT: set()}
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type in strings:
            strings[token.type].add(token.string)
    return {kind: frozenset(found) for kind, found in strings.items()}


@cache
def uses_of_names() -> dict[str, set[str]]:
    """`file: name` of all files that have a name, by name."""
    uses = defaultdict[str, set[str]](set)
    for path in sources():
        for name in tokens(path)[tokenize.NAME]:
            uses[name].add(f"{path.relative_to(ROOT)}: {name}")
    return uses


@cache
def uses_of_words() -> dict[str, set[str]]:
    """`file: name` of all files that have a name of which a word is part, by word."""
    uses = defaultdict[str, set[str]](set)
    for name, files in uses_of_names().items():
        for word in name_words(name):
            uses[word] |= files
    return uses


@dataclass(frozen=True)
class Definitions:
    """Names that a module defines; its docstrings and what is printed, strings of several words."""

    functions: frozenset[str]
    classes: tuple[str, ...]
    arguments: frozenset[str]
    sentences: tuple[str, ...]


@cache
def definitions(path: Path) -> Definitions:
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    strings = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return Definitions(
        frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef)),
        tuple(node.name for node in nodes if isinstance(node, ast.ClassDef)),
        frozenset(node.arg for node in nodes if isinstance(node, ast.arg)),
        tuple(string for string in strings if " " in string),
    )


def name_words(name: str) -> list[str]:
    """The words of a name.

    >>> name_words("_find_OOMSuggestions2")
    ['find', 'oom', 'suggestions']
    """
    return re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", name).lower())


@cache
def prose() -> tuple[tuple[str, str], ...]:
    """(file, text) of everything that people read: docstrings, comments, messages, documents, pages."""
    documents = [*ROOT.glob("*.md"), ROOT / "tests" / "benchmarks" / "README.md", *(ROOT / "docs").glob("*.md")]
    documents.remove(ROOT / "docs" / "renamed_keys.md")  # it lists what was renamed
    pages = [*(ROOT / "clustersim" / "report" / "templates").glob("*")]
    texts = [(str(path.relative_to(ROOT)), path.read_text()) for path in (*documents, *pages)]
    return (
        *texts,
        *(
            (str(path.relative_to(ROOT)), text)
            for path in sources()
            for text in (*definitions(path).sentences, *tokens(path)[tokenize.COMMENT])
        ),
    )


@pytest.mark.parametrize("word", RETIRED["identifiers"])
def test_no_name_contains_a_retired_word(word: str) -> None:
    uses = uses_of_words().get(word)
    assert not uses, f"{word} is retired; write {RETIRED['identifiers'][word]}"


@pytest.mark.parametrize("word", sorted(set(RETIRED["names"]) - set(RETIRED["file_keys"])))
def test_no_name_is_a_retired_word(word: str) -> None:
    uses = {use for name, files in uses_of_names().items() if name.strip("_") == word for use in files}
    assert not uses, f"{word} says nothing as a name; write {RETIRED['names'][word]}"


@pytest.mark.parametrize("word", RETIRED["file_keys"])
def test_file_keys_are_attributes_only(word: str) -> None:
    """A word that a file dictates names a field, never a function, a class, a parameter or a local variable."""
    for path in sources():
        defined = definitions(path)
        assert word not in {name.strip("_") for name in (*defined.functions, *defined.classes)}, path
        assert word not in defined.arguments, path


@pytest.mark.parametrize("word", RETIRED["prose"])
def test_no_sentence_uses_a_retired_word(word: str) -> None:
    uses = {file for file, text in prose() if re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE)}
    assert not uses, f"{word} is retired; write {RETIRED['prose'][word]}"


def test_every_class_name_is_defined_once() -> None:
    modules = defaultdict(list)
    for path in sources():
        for name in definitions(path).classes:
            modules[name].append(str(path.relative_to(ROOT)))
    repeated = {name: files for name, files in modules.items() if len(files) > 1}
    assert set(repeated) == set(SHARED_CLASS_NAMES), repeated
    assert len(SHARED_CLASS_NAMES) <= 10
