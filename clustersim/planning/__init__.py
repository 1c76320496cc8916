"""WHAT SHOULD BE TRIED? Other scenarios than the one that was asked for, simulated."""
