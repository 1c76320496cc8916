"""Figures of the documents: how they are written, and whether a document states what is computed."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
VALIDATION_PAGE = "docs/validation.md"


def percent(value: float | None, digits: int = 0) -> str:
    """A fraction in percent.

    >>> percent(0.0821, 1), percent(0.15)
    ('8.2 %', '15 %')
    """
    assert value is not None
    return f"{value:.{digits}%}".replace("%", " %")


def document_text(document: str) -> str:
    """The text of a document on one line, with single spaces."""
    return " ".join((ROOT / document).read_text(encoding="utf-8").split())


def assert_states(document: str, *sentences: str) -> None:
    """Each sentence, with figures that were computed, is in the document."""
    text = document_text(document)
    missing = [sentence for sentence in sentences if sentence not in text]
    assert not missing, f"{document} does not state: " + "; ".join(missing)
