"""Which single changes of a scenario are there? Each is defined once; the questions select theirs."""

from clustersim.scenario.changes.catalogue.catalogue import CATALOGUE, CONTINUOUS_CHANGES, changes_for

__all__ = ["CATALOGUE", "CONTINUOUS_CHANGES", "changes_for"]
