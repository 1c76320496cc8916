"""How many sequences is a global batch that is given in tokens?

Papers state batches in tokens, mostly rounded: the 16M of Llama 3 405B are 2,048 sequences of 8,192, 16 x 2^20
tokens. So a batch in tokens is a multiple of the sequence length, or refused; `Mi` is 2^20, and `M` too wherever
that gives whole sequences, else 10^6 (`K` and `G` in the same way).
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Final

from clustersim.common.errors import format_value
from clustersim.scenario.config_reader import config_error

_TOKENS: Final = re.compile(r"\s*(\d[\d,_]*(?:\.\d+)?)\s*([KkMGBT]?)(i?)\s*(tokens?)?\s*$")
_POWERS: Final = MappingProxyType({"": 0, "K": 1, "M": 2, "G": 3, "B": 3, "T": 4})


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """A global batch in tokens, as stated. amount: without its prefix; is_binary: whether the prefix is Ki, Mi, ..."""

    amount: Fraction
    prefix: str
    is_binary: bool

    @property
    def decimal_tokens(self) -> Fraction:
        """Tokens with M as 10^6."""
        return self.amount * Fraction(1000) ** _POWERS[self.prefix]

    @property
    def binary_tokens(self) -> Fraction:
        """Tokens with M as 2^20."""
        return self.amount * Fraction(1024) ** _POWERS[self.prefix]

    def is_read_as_binary(self, sequence: int) -> bool:
        """Whether the prefix counts as 2^10, 2^20 or 2^30, for sequences of a length in tokens."""
        return self.is_binary or self.binary_tokens % sequence == 0

    def sequences(self, sequence: int) -> Fraction:
        """Sequences per step; a fraction where the tokens are no multiple of the sequence length."""
        tokens = self.binary_tokens if self.is_read_as_binary(sequence) else self.decimal_tokens
        return tokens / sequence


def parse_token_batch(value: object) -> TokenBatch | None:
    """The batch in tokens that a value states; None for a value that is none, such as a number of sequences.

    From M on, the word `tokens` may be left out. Raises a config error for `2K`, which may be 2,048 sequences.
    """
    match = _TOKENS.match(value) if isinstance(value, str) else None
    if match is None or not (match[4] or match[2]):
        return None
    if match[2] in {"k", "K"} and not match[4]:
        raise config_error(f"{format_value(value)} may be sequences or tokens; write '{match[0]} tokens' or a number")
    return TokenBatch(Fraction(re.sub("[,_]", "", match[1])), match[2].upper(), match[3] == "i")


def parse_global_batch(value: object, sequence: int | None) -> object:
    """Sequences per step of a value in tokens; any other value unchanged. Raises a config error.

    sequence: tokens of a sequence, None: the file does not state it.
    """
    batch = parse_token_batch(value)
    if batch is None:
        return value
    if sequence is None:
        raise config_error(
            f"{format_value(value)} is in tokens, and nothing says how long a sequence is; give sequence"
        )
    sequences = batch.sequences(sequence)
    if sequences.denominator == 1 and sequences > 0:
        return int(sequences)
    below = sequences.numerator // sequences.denominator
    nearest = " or ".join(f"{count} ({count * sequence:,} tokens)" for count in (below, below + 1) if count > 0)
    raise config_error(
        f"{format_value(value)} is no multiple of the sequence, {sequence:,} tokens; write the sequences: {nearest}"
    )
