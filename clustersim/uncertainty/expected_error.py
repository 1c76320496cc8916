"""How well are the durations of a step known, by what their sources say of themselves?"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Expectation:
    """Parts of the busy seconds. error: of those whose source knows its own; unknown: all others.

    kernels: of those kernels whose source knows its error; of_kernels: the part of `error` that is theirs.
    """

    error: float
    unknown: float
    kernels: float = 0.0
    of_kernels: float = 0.0

    @property
    def per_kernel(self) -> float:
        """The part by which such kernels are expected to differ."""
        return self.of_kernels / self.kernels if self.kernels else 0.0
