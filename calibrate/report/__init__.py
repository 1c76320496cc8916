"""Reports on calibration records: terminal text, JSON and HTML."""
