"""The trace: spans of tasks and operations in columns."""
