"""HOW DOES DATA TRAVEL? Collective algorithms as lists of flows, the libraries that provide them, and their tuner."""
