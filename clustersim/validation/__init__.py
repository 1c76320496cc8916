"""IS IT TRUE? Validation: published measurements as tables, predicted by the simulator and compared."""
