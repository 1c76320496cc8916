"""WHAT IS COMPUTED? A model as a stack of layers, a layer as operators, an operator as GPU kernels."""
