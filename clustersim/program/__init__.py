"""WHAT IS TO BE DONE? Pure data: tasks, streams, groups."""
