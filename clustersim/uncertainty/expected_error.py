"""How well are the durations of a step known, by what their sources say of themselves?"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpectedError:
    """Parts of the busy seconds. error: of those whose source knows its own; unknown: all others.

    kernels: of those kernels whose source knows its error; of_kernels: the part of `error` that is theirs.
    """

    error: float
    unknown_share: float
    kernel_share: float = 0.0
    kernel_error: float = 0.0

    @property
    def error_per_kernel(self) -> float:
        """The part by which such kernels are expected to differ."""
        return self.kernel_error / self.kernel_share if self.kernel_share else 0.0
