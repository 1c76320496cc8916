"""WHAT IF ONE THING WERE DIFFERENT? Scenario transformations; each function returns a changed scenario.

Root-cause analysis of prediction errors (`validation_page`) and what-if planning (`planning`) share them. Whether
the result is valid is decided by `consistency.find_problems`.
"""
