"""Tests of clustersim.results."""
