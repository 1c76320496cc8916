"""WHAT IS COMPUTED? A model as layers, a layer as kernels."""
