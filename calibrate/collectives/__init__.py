"""Measurements of collectives between these processes."""
