"""Microbenchmarks of compute kernels on this machine."""
