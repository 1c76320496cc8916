"""What does every package use? Errors, units, data files, strict readers, caches, processes."""
