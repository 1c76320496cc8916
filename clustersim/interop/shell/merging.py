"""What is known behind a branch whose condition is not? The states at its two ends as one.

What both ends share stays as it is, around choices of the decision between the rest: where TP=4 is appended to a list
in one of them, the list begins with what it was and ends with a choice of that word and nothing.
"""

from collections.abc import Iterator, Sequence

from clustersim.interop.shell.state import ShellState, Value, Variant
from clustersim.interop.shell.unknowns import Decision, Unknowns


def merge_states(unknowns: Unknowns, decision: Decision, first: ShellState, second: ShellState) -> ShellState:
    """The state of which `first` holds where the decision's condition does, and `second` where it does not."""
    merged = first.copy()
    for name in {**first.variables, **second.variables}:
        values = first.variables.get(name), second.variables.get(name)
        merged.variables[name] = _merged_value(unknowns, decision, name, values)
    merged.exported |= second.exported
    merged.functions = {**second.functions, **first.functions}
    if first.positional != second.positional:
        merged.positional = tuple(_merged_words(unknowns, decision, first.positional, second.positional))
    return merged


def _merged_value(unknowns: Unknowns, decision: Decision, name: str, values: tuple[Value, Value]) -> Value:
    first, second = values
    if first is second or first == second:
        return first
    if isinstance(first, str) and isinstance(second, str):
        return _merged_text(unknowns, decision, name, first, second)
    if isinstance(first, tuple) and isinstance(second, tuple):
        return tuple(_merged_words(unknowns, decision, first, second))
    return Variant(decision, (first, second))


def _merged_text(unknowns: Unknowns, decision: Decision, name: str, first: str, second: str) -> str:
    """What two texts share, around a choice between the rest."""
    start = end = 0
    if " " in first + second or "\0" in first + second:
        start = _uncut_prefix(first, second)
        end = _uncut_prefix(first[start:][::-1], second[start:][::-1])  # holes are marked at both ends
    middle = unknowns.choice(decision, (first[start : len(first) - end],), (second[start : len(second) - end],), name)
    return first[:start] + middle + first[len(first) - end :]


def _merged_words(unknowns: Unknowns, decision: Decision, first: Sequence[str], second: Sequence[str]) -> Iterator[str]:
    start = _shared_prefix(first, second)
    end = _shared_prefix(first[start:][::-1], second[start:][::-1])
    yield from first[:start]
    yield unknowns.choice(decision, tuple(first[start : len(first) - end]), tuple(second[start : len(second) - end]))
    yield from first[len(first) - end :]


def _uncut_prefix(first: str, second: str) -> int:
    """How many characters begin both texts, without cutting a hole."""
    length = _shared_prefix(first, second)
    return length if first[:length].count("\0") % 2 == 0 else first[:length].rindex("\0")


def _shared_prefix(first: Sequence[str], second: Sequence[str]) -> int:
    """How many elements begin both."""
    shortest = min(len(first), len(second))
    return next((index for index in range(shortest) if first[index] != second[index]), shortest)
