"""What if components fail? A job over weeks: failures, checkpoints, spares, and the goodput that remains.

The job is a simpy process on top of the step simulation: it asks for the step time in each cluster state
that occurs, which is simulated once and cached, and never unrolls steps.
"""

from clustersim.reliability.goodput_simulation import simulate_goodput
from clustersim.reliability.run_estimate import RunEstimate, estimate_run

__all__ = ["RunEstimate", "estimate_run", "simulate_goodput"]
