"""How do warm-up, 1F1B steady state and cool-down of one rank follow each other?

1F1B and its interleaved form differ in which forwards and backwards a rank runs and in the length of the
warm-up; the way the two lists are merged is the same. Reference: PipeDream-Flush in Narayanan et al. 2021
(arXiv:2104.04473), figure 4.
"""

from collections.abc import Sequence
from itertools import chain

from clustersim.program.action import Action


def interleave_1f1b(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> tuple[Action, ...]:
    """Run `warmup` forwards, then alternate one forward and one backward, then the remaining backwards."""
    steady_count = len(forwards) - warmup
    pairs = zip(forwards[warmup:], backwards[:steady_count], strict=True)
    return (*forwards[:warmup], *chain.from_iterable(pairs), *backwards[steady_count:])
