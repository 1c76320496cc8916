"""WHAT DOES A USER TYPE? Commands, what they print and how they exit. The only room that prints."""

from clustersim.cli.app import main

__all__ = ["main"]
