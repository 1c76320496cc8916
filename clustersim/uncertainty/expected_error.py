"""Expected error of a step's durations, as stated by their sources."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpectedError:
    """Expected errors as fractions of the busy seconds.

    error: sum over items whose source knows its error; unknown_share: share of all others; kernel_share: share
    of kernels whose source knows its error; kernel_error: their contribution to `error`.
    """

    error: float
    unknown_share: float
    kernel_share: float = 0.0
    kernel_error: float = 0.0

    @property
    def error_per_kernel(self) -> float:
        """Expected relative error of such kernels."""
        return self.kernel_error / self.kernel_share if self.kernel_share else 0.0
