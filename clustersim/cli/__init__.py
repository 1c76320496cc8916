"""COMMAND LINE. Commands, their output and their exit status. The only package that prints."""

from clustersim.cli.app import main

__all__ = ["main"]
