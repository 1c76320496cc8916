"""What is a span called, in words?"""

from clustersim.report.theme import CATEGORIES
from clustersim.report.view import Spans


def what(spans: Spans, span: int) -> str:
    """The category, microbatch and chunk of a span in words."""
    words = CATEGORIES[int(spans.category[span])].label
    if spans.microbatch[span] >= 0:
        words += f" of microbatch {number_of(spans, span)}"
    if spans.chunk[span] > 0:
        words += f", chunk {spans.chunk[span]}"
    if spans.per_step and spans.microbatch[span] >= 0:
        words += f", step {int(spans.microbatch[span]) // spans.per_step + 1}"
    return words


def number_of(spans: Spans, span: int) -> int:
    """A span's microbatch, counted from the beginning of its step."""
    number = int(spans.microbatch[span])
    return number % spans.per_step if spans.per_step else number
