"""The sections of a scenario file, one for each part."""
