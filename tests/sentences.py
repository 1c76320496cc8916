"""What a message must say, without the words that merely join it."""

import re

_WORD_EDGE = r"(?!(?<=\w)\w)"


def parts(sentence: str) -> re.Pattern[str]:
    """A pattern of one line with these parts in this order; " ... " stands for the words between two of them.

    At the end " ..." stands for what may follow. A part neither begins nor ends inside a word or a number.

    >>> bool(parts("layout.tp: 3 ... tp 2 or 4").search("layout.tp: 3 does not divide 16 heads; tp 2 or 4 fits"))
    True
    >>> bool(parts("layout.tp: 3 ... 1").search("layout.tp: 3 does not divide 16 heads"))
    False
    """
    known = sentence.removesuffix(" ...")
    words = ".*?".join(f"{_WORD_EDGE}{re.escape(part)}{_WORD_EDGE}" for part in known.split(" ... "))
    return re.compile(words if known == sentence else f"{words}.*")
