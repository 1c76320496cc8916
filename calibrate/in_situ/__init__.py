"""IN-SITU KERNEL TIMES. Kernels in real layers, relative to the same kernels measured in isolation."""
