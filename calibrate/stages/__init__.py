"""Stages of a calibration session, and how long each takes."""
