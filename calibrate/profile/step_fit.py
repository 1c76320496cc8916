"""With which factors does a record predict the step that it was made of?

A step's time fixes one factor, between none and all of what it scales, by bisection. Two are found so:

- Where all ranks have traces, how much of the members' waiting is in a collective's time. A simulation has the waiting
  that follows from the plan (bubbles, stages that differ); ranks also wait because each of them is disturbed at other
  times. Such waiting recurs at every collective, so that a step of more layers or microbatches has more of it.
- Where a step without a profiler is known to be faster, the host's time of each launch, and waiting: the profiler
  records every operator on the host, which slows that, and hardly slows the GPU. Kernels keep the times that were
  traced. On a CPU the thread that the profiler slows is the one that computes: where the kernels and collectives alone
  take longer than the step, they are scaled with the rest, by one factor.
"""

from collections.abc import Callable
from typing import Final

from clustersim.common.units import Seconds

_HALVINGS: Final = 12  # of the interval of factors: to 1/4096


def fit_factor(predicted: Callable[[float], Seconds], step_time: Seconds) -> float:
    """The factor, at most 1, with which a step time is predicted; the time grows with it."""
    low, high = 0.0, 1.0
    if predicted(high) <= step_time:
        return high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        if predicted(middle) < step_time:
            low = middle
        else:
            high = middle
    return high
