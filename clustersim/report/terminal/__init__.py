"""WHAT DOES THE TERMINAL SAY? Answers as tables of text."""
