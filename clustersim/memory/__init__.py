"""MEMORY. Parameters, activations and all other device memory of a rank, over time."""
