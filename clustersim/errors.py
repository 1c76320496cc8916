"""What can go wrong, in one sentence each.

    ClusterSimError
    ├── InputError        the user's file, option or value is wrong (exit status 2)
    └── OutputError       an answer cannot be written where it was asked for (exit status 2)

`nearest` builds the "did you mean" half of a sentence.
"""

import difflib
from collections.abc import Iterable


class ClusterSimError(Exception):
    """Base of every error that clustersim raises on purpose; its text is meant for a user."""


class InputError(ClusterSimError):
    """A scenario, topology, model or option that cannot be used as it stands."""


class OutputError(ClusterSimError):
    """A result that cannot be written."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """End a sentence about an unknown `word` with its nearest match, or with all choices.

    >>> nearest("lama3-8b", ["llama3-8b", "gpt3-175b"])
    'did you mean llama3-8b?'
    >>> nearest("zzz", ["a", "b"])
    'choose one of a, b'
    """
    names = sorted(choices)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"choose one of {', '.join(names)}"
