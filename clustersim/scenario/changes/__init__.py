"""WHAT IF ONE THING WERE DIFFERENT? Functions that return a changed scenario, and the catalogue of such changes.

Every question that changes a scenario takes its changes from the catalogue: what-if, sensitivity of a search,
explanation of a measured step, goodput, and what would fit in memory. Whether a changed scenario is legal is
decided by `consistency.find_problems`.
"""
