"""HOW LONG, ALONE? Sources of durations for kernels and collectives."""
