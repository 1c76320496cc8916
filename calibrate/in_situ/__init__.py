"""WHAT DOES A STEP DO TO KERNELS? The real layers, one kernel behind the other, beside the same kernels alone."""
