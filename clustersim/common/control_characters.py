r"""How is text shown that may hold control characters? As their escapes, so that a terminal does not obey them.

A file's name, or a name in a file, may set a terminal's title, its colours and links, or reverse the order of what
follows (ECMA-48; Unicode TR36, bidirectional text spoofing).
"""

from typing import Final

_SHOWN: Final = "\n\t"
_CODES: Final = (
    *range(0x20),
    *range(0x7F, 0xA0),  # delete, and the controls of one byte
    0x61C,
    *range(0x200E, 0x2010),  # marks and overrides of the direction of text
    *range(0x2028, 0x202F),
    *range(0x2066, 0x206A),
    0xFEFF,
)
_ESCAPES: Final = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CODES} | {
    ord(character): character for character in _SHOWN
}


def escape_controls(text: str) -> str:
    r"""The text with control characters as escapes; line ends and tabs stay.

    >>> escape_controls("\x1b[31mred\x1b[0m")
    '\\x1b[31mred\\x1b[0m'
    """
    return text.translate(_ESCAPES)
