"""CALIBRATION. Fits to published measurements and, with torch, measurements of local hardware."""
