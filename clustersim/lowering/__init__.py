"""SCENARIO -> PROGRAM. Layers, stages and schedules become tasks of ranks."""
