"""What does `python -m clustersim.cli` do? The same as `clustersim`."""

from clustersim.cli.app import main

main()
