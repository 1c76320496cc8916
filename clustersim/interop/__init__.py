"""How do other programs say what a scenario says? Their arguments, read as scenario files."""
