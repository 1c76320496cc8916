"""A calibration record of what one rank did in a step under PyTorch's profiler."""
