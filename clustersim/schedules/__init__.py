"""IN WHICH ORDER? A shelf of pipeline schedules."""
