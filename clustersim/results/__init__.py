"""WHAT DOES IT MEAN? Answers folded from spans."""
