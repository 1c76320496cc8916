"""WHO DOES WHICH PART? Layouts, process groups, sharding of layers."""
