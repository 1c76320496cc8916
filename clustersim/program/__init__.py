"""Programs: the tasks, streams and process groups of every rank, as pure data without durations."""
