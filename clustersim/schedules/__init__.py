"""IN WHICH ORDER? A registry of pipeline schedules."""
