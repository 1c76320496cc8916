"""Devices on which kernels are run and timed."""
