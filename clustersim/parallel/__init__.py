"""WHO COMPUTES WHAT? Layouts, process groups, sharding of layers."""
