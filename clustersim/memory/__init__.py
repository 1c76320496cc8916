"""WHAT MUST IT HOLD? Parameters, activations and everything else in device memory, over time."""
