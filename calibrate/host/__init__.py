"""Host time per launch on this machine."""
