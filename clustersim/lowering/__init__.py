"""Lowering: turns layers, pipeline stages and schedules into the tasks of every rank (scenario -> program)."""
