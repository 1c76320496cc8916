"""HOW IS IT DRAWN? Figures of plain data: bars, the timeline, all ranks over time."""
