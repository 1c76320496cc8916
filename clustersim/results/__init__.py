"""Results: metrics and breakdowns derived from simulated traces."""
