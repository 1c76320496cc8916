"""WHAT HAPPENED? Spans in columns."""
