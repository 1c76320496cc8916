"""What if it breaks? A job over weeks: failures, checkpoints, spares, and what is left of its time.

The job is a simpy process above the simulation of steps: it asks how long a step takes in each state of the cluster
that occurs, which is simulated once and remembered, and never unrolls steps.
"""

from clustersim.reliability.goodput_simulation import simulate_goodput
from clustersim.reliability.run_estimate import RunEstimate, estimate_run

__all__ = ["RunEstimate", "estimate_run", "simulate_goodput"]
