"""Which parts of a script does its author leave for others to fill in?

Examples write `DATA=<path to the data>`. Bash takes it for redirections; who runs the script replaces it, so it is a
value that is not known.
"""

import re
from typing import Final

from clustersim.interop.shell.unknowns import Unknowns

_PLACEHOLDER: Final = re.compile(
    r"""([=/:,"']|--?[A-Za-z][\w-]*[ \t]+)(<[A-Za-z](?:[^<>\n;|&`${}"']*[^<>\s;|&`${}"'])?>)(?![\w&])"""
)
"""Words in angle brackets that touch both, as a value; a redirection has a space, or a name after its bracket."""


def with_placeholders_as_holes(text: str, unknowns: Unknowns) -> str:
    """The text with a hole for each placeholder."""

    def hole(match: re.Match[str]) -> str:
        return match[1] + unknowns.unknown(match[2], text.count("\n", 0, match.start()) + 1)

    return _PLACEHOLDER.sub(hole, text) if "<" in text else text
