"""COSTS. Sources of durations for kernels, collectives and host work, each timed in isolation."""
