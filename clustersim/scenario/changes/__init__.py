"""WHAT IF ONE THING WERE DIFFERENT? Changes of a scenario, each a function that returns the changed one.

What looks for the cause of a gap (`validation_page`) and what looks ahead (`planning`) change a scenario in the same way.
Whether what comes out is legal, `checks.find_problems` says.
"""
