"""SplitMix64 hashing of integers, identical on every machine.

SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, section 4,
figure 17).
"""

from typing import Final

import numpy as np

from clustersim.common.arrays import HashArray

_GOLDEN_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2: Final = np.uint64(0x94D049BB133111EB)


def splitmix64(states: HashArray) -> HashArray:
    """The generator's output for each state; a bijection of 64-bit integers of any shape, in which 0 is not fixed."""
    return splitmix64_finalize(states + _GOLDEN_GAMMA)


def splitmix64_finalize(values: HashArray) -> HashArray:
    """SplitMix64's finalizer: every input bit flips each output bit with a probability of about one half; 0 stays 0.

    A bijection of 64-bit integers of any shape.
    """
    mixed = values >> np.uint64(30)
    mixed ^= values
    mixed *= _MULTIPLIER_1  # in place, as there may be millions of them
    mixed ^= mixed >> np.uint64(27)
    mixed *= _MULTIPLIER_2
    mixed ^= mixed >> np.uint64(31)
    return mixed
