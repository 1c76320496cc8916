"""Holdout steps: real steps that a record was not measured for, predicted and run."""
